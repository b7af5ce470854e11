"""The kernel of `adpt_scan`: its arguments as the C++ program takes them, and the memory it works in."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...errors import InputError
from .. import _buffers, _build
from .form import Constants, Factors, Form, Retracted, check, form_of, numbers_of

__all__ = ["Inputs", "Plan", "backward", "forward", "kept", "plan", "products", "ready"]

FEW, FEWER, MANY = 12, 8, 64  # sequences that are run together: two groups of six, two of four, the most
DOTS = 16  # numbers that are kept of a row beside its projections: `dots` of rotation.h
SMALL = 256  # rows of K and V that fit well into the second cache
PLANS = 64  # kinds of calls that are remembered
LEAST = 1_000_000  # products that are worth a thread

_NAMES = {torch.float32: "float", torch.float64: "double"}

_NUMBERS = "batch steps heads size features width tile threads complex_pairs given turns source form aware"
_NUMBERS += " coupled beta_given mixes norms factored rank outer_size inner_size"
_LEAVES = 2 + len(Constants._fields)  # drive, state and constants: what has a derivative
_INPUTS = _LEAVES + 2 + len(Factors._fields)  # and reset, lengths, factors
_IMAGINARY = [2 + Constants._fields.index(name) for name in ("imag", "feed_imag")]
_DECAY = 2 + Constants._fields.index("decay")

Inputs: TypeAlias = Sequence[Any]  # drive, state, constants, reset, lengths, factors: each a tensor or None


class _Scan(ctypes.Structure):
    """`struct Scan` of kernel.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS.split(" ")),
        ("spike", ctypes.c_double),
        ("dot", ctypes.c_double),
        ("norm", ctypes.c_double),
        ("inputs", ctypes.c_void_p * _INPUTS),
        ("states", ctypes.c_void_p),
        ("projections", ctypes.c_void_p),
        ("state_gradients", ctypes.c_void_p),
        ("gradients", ctypes.c_void_p * _LEAVES),
        ("workspace", ctypes.c_void_p),
    )


class Plan(NamedTuple):
    """What the kinds of all arguments decide."""

    library: Any
    form: Form
    dtype: torch.dtype
    scan: _Scan  # without pointers
    forward: int  # bytes of the workspace
    backward: int
    kept: tuple[int, ...]  # the shape of what a forward saves for the backward
    nothing: Tensor  # what it saves otherwise
    places: list[int]  # of the inputs that there are, among all
    kinds: list[Any]  # of these inputs, the gradient and the states
    kept_kinds: list[Any]  # what was kept, or nothing


_plans: dict[Any, Plan] = {}


def ready(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for `dtype`; builds it at the first question."""
    return dtype in _NAMES and _build.wanted() and _build.load("adpt_scan", _NAMES[dtype]) is not None


def kept(drive: Tensor, constants: Constants, form: Form, save: bool) -> tuple[int, ...]:
    """The shape of what the forward saves: K x and V x of every step, and their dot products."""
    if not save or not _turns(form) or form.given or drive.device.type not in ("cpu", "meta"):
        return (0,)
    batch, steps = drive.shape[:2]
    return form.heads, steps, batch, 2 * _padded(constants.real.shape[0] // form.heads, drive.dtype) + DOTS


def _turns(form: Form) -> bool:
    return form.turns and not form.linear


def _padded(size: int, dtype: torch.dtype) -> int:
    """Numbers in a row of the kernel's own memory: whole cache lines."""
    line = 64 // dtype.itemsize
    return -(-size // line) * line


def forward(plan: Plan, inputs: Inputs, save: bool) -> tuple[Tensor, Tensor]:
    """The states, and K x and V x of every step if they are to be saved; otherwise nothing, always the same."""
    scan, dtype = _scan(plan, inputs), plan.dtype
    states = _buffers.empty(scan.batch, scan.steps, scan.width, dtype=dtype)
    projections = _buffers.empty(*plan.kept, dtype=dtype) if save else plan.nothing
    scan.states, scan.projections = states.data_ptr(), projections.data_ptr()
    _run(plan.library.adpt_scan_forward, scan, plan.forward)
    return states, projections


def backward(
    plan: Plan, gradient: Tensor, inputs: Inputs, states: Tensor, projections: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Derivatives with respect to the drive, the initial state and each of the constants that there are.

    `needed` says of which of these; that of the drive is always found.
    """
    *kinds, kind = _kinds((*inputs, gradient, states, projections))
    if kinds != plan.kinds or kind not in plan.kept_kinds:
        raise InputError("adpt_scan: saved tensors came back with other shapes, types or devices: look at the hooks.")
    scan = _scan(plan, inputs)
    # The kernel writes all of these, so that torch need not: its threads would stay busy for some milliseconds and be
    # in the way of the kernel's.
    leaves, wanted = [t for t in inputs[:_LEAVES] if t is not None], (True, *needed[1:])
    found = [
        _buffers.empty(*t.shape, dtype=plan.dtype) if want else None for t, want in zip(leaves, wanted, strict=False)
    ]
    gradient, states, projections = _dense(gradient), _dense(states), _dense(projections)  # as hooks gave them back
    scan.states, scan.projections, scan.state_gradients = _addresses((states, projections, gradient))
    for place, one in zip(plan.places, found, strict=False):
        if one is not None:
            scan.gradients[place] = one.data_ptr()
    _run(plan.library.adpt_scan_backward, scan, plan.backward)
    return found


def products(inputs: Inputs, form: Form, which: str) -> None:
    """Only the matrix products of the "forward", of the "backward" or of the "weights": a limit to measure against."""
    found = plan(inputs, form)
    scan, library = _scan(found, inputs), found.library
    scan.tile = min(MANY, scan.batch)  # their best
    needed = library.adpt_scan_workspace(ctypes.byref(scan), which != "forward")
    _run(library.adpt_scan_products, scan, needed, ("forward", "backward", "weights").index(which))


def _run(function: Callable[..., None], scan: _Scan, needed: int, *numbers: int) -> None:
    workspace = _buffers.take(needed)
    scan.workspace = workspace.address
    function(ctypes.byref(scan), *numbers)
    _buffers.give(workspace)


def _scan(plan: Plan, given: Inputs) -> _Scan:
    """What the kernel is told of the inputs."""
    inputs = [t if t is None or (t.is_contiguous() and not t.is_neg()) else _dense(t) for t in given]
    for at in _IMAGINARY:
        if (imag := inputs[at]) is not None:
            inputs[at] = _signed(imag)
    scan = _Scan.from_buffer_copy(plan.scan)
    scan.inputs[:] = _addresses(inputs)
    scan.held = inputs  # which live as long as the pointers to them
    return scan


def _dense(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous()


def _addresses(tensors: Inputs) -> list[int | None]:
    found = [None if t is None else t.data_ptr() for t in tensors]
    if 0 in found:
        for t in tensors:
            if t is not None and t.numel() and not t.data_ptr():
                raise InputError(f"adpt_scan: a tensor of shape {tuple(t.shape)} has no memory; pass a copy of it.")
    return found


def _kinds(tensors: Inputs) -> list[Any]:
    return [(t.shape, t.dtype, t.is_cpu) for t in tensors if t is not None]


def _signed(imag: Tensor) -> Tensor:
    """As a multiplier of each pair swapped: the quarter turn has a minus in the first place."""
    if imag.shape[0] % 2:  # no pairs: zeros that nobody asks for
        return imag
    return torch.stack((-imag[::2], imag[1::2]), -1).flatten()


def _tile(batch: int, heads: int, size: int, threads: int) -> int:
    """How many sequences to run together.

    Products of fewer rows are slower for each row. But the rows of a few sequences stay in the nearest cache, and small
    matrices come from the next one quickly enough to be read once for each of them.
    """
    each = -(-batch * heads // threads)
    small = size <= SMALL and each > FEW
    if small and threads == 1:
        return min(FEW, batch)  # a smaller last tile keeps nobody waiting
    tiles = -(-batch // max(1, min(FEW if small else MANY, each)))
    if heads == 1 and tiles > threads:
        tiles = -(-tiles // threads) * threads  # as many for each thread
    equal = max(1, -(-batch // max(1, tiles)))
    most = {tile: -(-(-(-batch // tile) * heads) // threads) * tile for tile in (FEWER, equal)}  # sequences of a thread
    return FEWER if small and most[FEWER] <= most[equal] else equal


def plan(inputs: Inputs, form: Form) -> Plan:
    """That of such arguments, which are looked at closely the first time, and refused if they do not fit together."""
    threads = torch.get_num_threads()
    key = form, threads, *[None if t is None else (t.shape, t.dtype) for t in inputs]
    found = _plans.get(key)
    if found is None:
        reset, lengths, *factors = inputs[_LEAVES:]
        check(inputs[0], inputs[1], Constants(*inputs[2:_LEAVES]), form, reset, lengths, Factors(*factors))
        if len(_plans) >= PLANS:
            _plans.clear()
        # An equal form may have other types of numbers, which its plan would keep.
        found = _plans[key] = _planned(inputs, form_of(numbers_of(form)), threads)
    return found


def _planned(inputs: Inputs, form: Form, threads: int) -> Plan:
    drive, state, real = inputs[:3]
    library = _declared(_build.load("adpt_scan", _NAMES[drive.dtype]))
    batch, steps, features = drive.shape
    rank, _, outer, inner = [0 if t is None else t.shape[-1] for t in inputs[-len(Factors._fields) :]]
    size, turns = real.shape[0] // form.heads, _turns(form)
    work = batch * steps * form.heads * (2 * size * size + 16 * size)
    threads = max(1, min(threads, work // LEAST))
    tile = _tile(batch, form.heads, size, threads)
    scan = _Scan(
        batch=batch,
        steps=steps,
        heads=form.heads,
        size=size,
        features=features,
        width=state.shape[-1],
        tile=tile,
        threads=max(1, min(threads, -(-batch // tile) * form.heads)),
        complex_pairs=inputs[_IMAGINARY[0]] is not None,
        given=form.given,
        turns=turns,
        source=int(form.source),
        form=int(form.retracted),
        aware=form.aware and form.retracted in (Retracted.EXPONENTIAL, Retracted.CAYLEY),
        coupled=inputs[_DECAY] is not None,
        beta_given=form.beta_given,
        mixes=turns and form.dot is not None,
        norms=turns and form.norm is not None,
        factored=rank > 0 or outer > 0,
        rank=rank,
        outer_size=outer,
        inner_size=inner,
        spike=form.spike,
        dot=0.0 if form.dot is None else form.dot,
        norm=0.0 if form.norm is None else form.norm,
    )
    whole, projections = (batch, steps, state.shape[-1]), kept(drive, Constants(real), form, True)
    return Plan(
        library,
        form,
        drive.dtype,
        scan,
        forward=library.adpt_scan_workspace(ctypes.byref(scan), False),
        backward=library.adpt_scan_workspace(ctypes.byref(scan), True),
        kept=projections,
        nothing=torch.empty(0, dtype=drive.dtype, device="cpu"),
        places=[i for i, t in enumerate(inputs) if t is not None],
        kinds=[*_kinds(inputs), *[(whole, drive.dtype, True)] * 2],
        kept_kinds=[(shape, drive.dtype, True) for shape in (projections, (0,))],
    )


@functools.cache
def _declared(library: Any) -> Any:
    library.adpt_scan_workspace.argtypes = [ctypes.POINTER(_Scan), ctypes.c_int64]
    library.adpt_scan_products.argtypes = [ctypes.POINTER(_Scan), ctypes.c_int64]
    for function in (library.adpt_scan_workspace, library.adpt_scan_layout):
        function.restype = ctypes.c_int64
    for function in (library.adpt_scan_forward, library.adpt_scan_backward):
        function.argtypes = [ctypes.POINTER(_Scan)]
        function.restype = None
    assert library.adpt_scan_layout() == ctypes.sizeof(_Scan)
    return library
