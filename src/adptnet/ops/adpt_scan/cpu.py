"""The CPU kernel of `adpt_scan`: cached launch plans, the ctypes structure of a call, and its memory."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...errors import InputError
from .. import _backends, _buffers, _build
from .._structures import read_structure
from .form import Constants, Factors, Form, RetractionKind, check, decode_form, encode_form

__all__ = ["Inputs", "Plan", "backward", "forward", "has_kernel", "make_plan", "run_products", "saved_shape"]

# Sequences per tile: two register tiles of four rows, two of six rows, and the largest tile.
TILE_OF_EIGHT, TILE_OF_TWELVE, LARGEST_TILE = 8, 12, 64
DOT_COUNT = 16  # dot products saved per row, beside its projections: `dot_count` in directions.h
SMALL_SIZE = 256  # state dimension up to which K and V fit well into the L2 cache
MAX_PLANS = 64  # call signatures whose plans are cached
MIN_WORK_PER_THREAD = 1_000_000  # multiplications

_SCALARS = {torch.float32: "float", torch.float64: "double"}

_LEAF_COUNT = 2 + len(Constants._fields)  # drive, state and constants: the differentiable inputs
_INPUT_COUNT = _LEAF_COUNT + 2 + len(Factors._fields)  # and reset, lengths, factors
_IMAGINARY = [2 + Constants._fields.index(name) for name in ("imag", "feed_imag")]
_DECAY = 2 + Constants._fields.index("decay")

Inputs: TypeAlias = Sequence[Any]  # drive, state, constants, reset, lengths, factors: each a tensor or None


@functools.cache
def _mirror(name: str) -> Any:
    """Return the ctypes mirror of a structure in csrc/arguments.h."""
    return read_structure(Path(__file__).parent / "csrc" / "arguments.h", name)


class Plan(NamedTuple):
    """Everything about a call that its signature (form, shapes, dtypes, number of threads) determines."""

    library: Any
    form: Form
    dtype: torch.dtype
    scan: Any  # the arguments of a call (`struct Scan`), without pointers
    forward_bytes: int  # size of the workspace
    backward_bytes: int
    states_shape: tuple[int, ...]
    saved_shape: tuple[int, ...]  # shape of what the forward saves for the backward
    empty: Tensor  # returned if nothing is saved
    present: list[int]  # positions of the inputs that are not None
    signature: list[Any]  # of these inputs, the gradient and the states
    saved_signatures: list[Any]  # of the saved projections, or of `empty`


_plans: dict[Any, Plan] = {}


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for `dtype`. The first call builds it.

    Args:
        dtype: The dtype of the drive.
    """
    return _backends.choose_cpu("adpt_scan", dtype).is_kernel


def saved_shape(drive: Tensor, constants: Constants, form: Form, save: bool) -> tuple[int, ...]:
    """Return the shape of what the forward saves: K x and V x of every step, and their dot products.

    Args:
        drive, constants, form: As in `adpt_scan`.
        save: Whether anything is saved.
    """
    if not save or not _rotates(form) or form.directions_in_drive or drive.device.type not in ("cpu", "meta"):
        return (0,)
    batch, steps = drive.shape[:2]
    pad = _pad(constants.real.shape[0] // form.heads, drive.dtype)
    return form.heads, steps, batch, 2 * form.planes * pad + DOT_COUNT


def _rotates(form: Form) -> bool:
    return form.rotates and not form.linear


def _pad(size: int, dtype: torch.dtype) -> int:
    """Return `size` rounded up to whole cache lines, as rows of the kernel's own memory are."""
    line = 64 // dtype.itemsize
    return -(-size // line) * line


def forward(plan: Plan, inputs: Inputs, save: bool) -> tuple[Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        plan: The plan of the call.
        inputs: The tensors of the call.
        save: Whether to save K x and V x for the backward.

    Returns:
        The states, (batch, time, width), and the projections K x and V x for the backward; an empty tensor, the same
        for all calls, if `save` is False.
    """
    scan, dtype = _make_scan(plan, inputs), plan.dtype
    states = _buffers.empty(*plan.states_shape, dtype=dtype)
    projections = _buffers.empty(*plan.saved_shape, dtype=dtype) if save else plan.empty
    outputs = scan.outputs
    outputs.states, outputs.projections = states.data_ptr(), projections.data_ptr()
    _run(plan.library.adpt_scan_forward, scan, plan.forward_bytes)
    return states, projections


def backward(
    plan: Plan, gradient: Tensor, inputs: Inputs, states: Tensor, projections: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Run the backward kernel.

    Args:
        plan: The plan of the call.
        gradient: With respect to the states.
        inputs: The tensors of the call.
        states, projections: The results of `forward`.
        needed: Which of the gradients to compute; that of the drive always is.

    Returns:
        The gradients of the drive, the initial state and each of the constants that are not None.

    Raises:
        InputError: A saved tensor has another shape, dtype or device than in the forward.
    """
    *signature, saved_signature = _signature((*inputs, gradient, states, projections))
    if signature != plan.signature or saved_signature not in plan.saved_signatures:
        raise InputError(
            "adpt_scan: saved tensors changed their shape, dtype or device before the backward. "
            "Check the saved-tensor hooks."
        )
    scan = _make_scan(plan, inputs)
    # The kernel writes every entry, so torch need not fill these: its threads would stay busy for some milliseconds and
    # compete with those of the kernel.
    leaves, required = [t for t in inputs[:_LEAF_COUNT] if t is not None], (True, *needed[1:])
    gradients = [
        _buffers.empty(*t.shape, dtype=plan.dtype) if need else None for t, need in zip(leaves, required, strict=False)
    ]
    gradient, states, projections = _densify(gradient), _densify(states), _densify(projections)  # hooks may restride
    outputs = scan.outputs
    outputs.states, outputs.projections, scan.state_gradients = _addresses((states, projections, gradient))
    pointers = _as_array(scan, "gradients", _LEAF_COUNT)
    for position, found in zip(plan.present, gradients, strict=False):
        if found is not None:
            pointers[position] = found.data_ptr()
    _run(plan.library.adpt_scan_backward, scan, plan.backward_bytes)
    return gradients


def run_products(inputs: Inputs, form: Form, which: str) -> None:
    """Run the matrix products of a call and nothing else: a lower bound on its time, for benchmarks.

    Args:
        inputs: The tensors of the call.
        form: The form of the recurrence.
        which: "forward", "backward" or "weights".
    """
    plan = make_plan(inputs, form)
    scan, library = _make_scan(plan, inputs), plan.library
    scan.sizes.tile = min(LARGEST_TILE, scan.sizes.batch)  # the fastest for products alone
    size = library.adpt_scan_workspace(ctypes.byref(scan), which != "forward")
    _run(library.adpt_scan_products, scan, size, ("forward", "backward", "weights").index(which))


def _run(function: Callable[..., None], scan: Any, workspace_bytes: int, *arguments: int) -> None:
    workspace = _buffers.acquire(workspace_bytes)
    scan.workspace = workspace.address
    function(ctypes.byref(scan), *arguments)
    _buffers.release(workspace)


def _make_scan(plan: Plan, inputs: Inputs) -> Any:
    """Return the structure of a call with pointers to its inputs."""
    dense = [t if t is None or (t.is_contiguous() and not t.is_neg()) else _densify(t) for t in inputs]
    for position in _IMAGINARY:
        if (imag := dense[position]) is not None:
            dense[position] = _negate_first_of_pairs(imag)
    scan = type(plan.scan).from_buffer_copy(plan.scan)
    _as_array(scan, "inputs", _INPUT_COUNT)[:] = _addresses(dense)
    scan.tensors = dense  # keeps them alive as long as the pointers
    return scan


def _as_array(scan: Any, group: str, count: int) -> Any:
    """Return the pointers of a group of `struct Scan` as an array, in the order of the inputs of a call."""
    return (ctypes.c_void_p * count).from_buffer(scan, getattr(type(scan), group).offset)


def _densify(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous()


def _addresses(tensors: Inputs) -> list[int | None]:
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    if 0 in addresses:
        for t in tensors:
            if t is not None and t.numel() and not t.data_ptr():
                raise InputError(f"adpt_scan: a tensor of shape {tuple(t.shape)} has no memory; pass a copy of it.")
    return addresses


def _signature(tensors: Inputs) -> list[Any]:
    return [(t.shape, t.dtype, t.is_cpu) for t in tensors if t is not None]


def _negate_first_of_pairs(imag: Tensor) -> Tensor:
    """Return `imag` as the kernel multiplies it with swapped pairs: negated in the first entry of each pair."""
    if imag.shape[0] % 2:  # no pairs: zeros that the kernel does not read
        return imag
    return torch.stack((-imag[::2], imag[1::2]), -1).flatten()


def _choose_tile(batch: int, heads: int, size: int, threads: int) -> int:
    """Return the number of sequences per tile.

    Products of fewer rows are slower per row. But the rows of a few sequences stay in L1, and small matrices come from
    L2 fast enough to be read again for each tile.
    """
    per_thread = -(-batch * heads // threads)
    small = size <= SMALL_SIZE and per_thread > TILE_OF_TWELVE
    if small and threads == 1:
        return min(TILE_OF_TWELVE, batch)  # with one thread a smaller last tile costs nothing
    tiles = -(-batch // max(1, min(TILE_OF_TWELVE if small else LARGEST_TILE, per_thread)))
    if heads == 1 and tiles > threads:
        tiles = -(-tiles // threads) * threads  # the same number for each thread
    equal = max(1, -(-batch // max(1, tiles)))
    # Sequences of the busiest thread.
    busiest = {tile: -(-(-(-batch // tile) * heads) // threads) * tile for tile in (TILE_OF_EIGHT, equal)}
    return TILE_OF_EIGHT if small and busiest[TILE_OF_EIGHT] <= busiest[equal] else equal


def make_plan(inputs: Inputs, form: Form) -> Plan:
    """Return the cached plan for this call signature; validate the arguments when the signature is new.

    Args:
        inputs: The tensors of the call.
        form: The form of the recurrence.

    Raises:
        InputError: The arguments are inconsistent.
    """
    threads = torch.get_num_threads()
    key = form, threads, *[None if t is None else (t.shape, t.dtype) for t in inputs]
    plan = _plans.get(key)
    if plan is None:
        reset, lengths, *factors = inputs[_LEAF_COUNT:]
        check(inputs[0], inputs[1], Constants(*inputs[2:_LEAF_COUNT]), form, reset, lengths, Factors(*factors))
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        # Forms that compare equal may differ in type (1, 1.0, True): keep the canonical types.
        plan = _plans[key] = _make_new_plan(inputs, decode_form(encode_form(form)), threads)
    return plan


def _make_new_plan(inputs: Inputs, form: Form, threads: int) -> Plan:
    drive, state, real = inputs[:3]
    library = _declare_functions(_build.load("adpt_scan", _SCALARS[drive.dtype]))
    batch, steps, features = drive.shape
    rank, _, outer, inner = [0 if t is None else t.shape[-1] for t in inputs[-len(Factors._fields) :]]
    size, rotates = real.shape[0] // form.heads, _rotates(form)
    work = batch * steps * form.heads * form.planes * (2 * size * size + 16 * size)
    threads = max(1, min(threads, work // MIN_WORK_PER_THREAD))
    tasks = 1 if form.whole_state else form.heads  # per tile
    tile = _choose_tile(batch, tasks, size, threads)
    sizes = _mirror("Sizes")(
        batch=batch,
        steps=steps,
        heads=form.heads,
        size=size,
        features=features,
        width=state.shape[-1],
        tile=tile,
        threads=max(1, min(threads, -(-batch // tile) * tasks)),
        rank=rank,
        outer=outer,
        inner=inner,
        planes=form.planes,
        depth=real.shape[0] if form.whole_state else size,
    )
    options = _mirror("Options")(
        complex_pairs=inputs[_IMAGINARY[0]] is not None,
        rotates=rotates,
        directions_in_drive=form.directions_in_drive,
        beta_in_drive=form.beta_in_drive,
        rotation_aware=form.rotation_aware and form.retraction in (RetractionKind.EXPONENTIAL, RetractionKind.CAYLEY),
        slow_memory=inputs[_DECAY] is not None,
        has_norm=rotates and form.norm_epsilon is not None,
        has_fixed_dot=rotates and form.dot is not None,
        phased=form.phased,
        whole_state=form.whole_state and rotates,
        source=int(form.source),
        retraction=int(form.retraction),
        spike_threshold=form.spike_threshold,
        norm_epsilon=0.0 if form.norm_epsilon is None else form.norm_epsilon,
        dot=0.0 if form.dot is None else form.dot,
        softness=form.softness,
    )
    scan = _mirror("Scan")(sizes=sizes, options=options)
    whole, projections = (batch, steps, state.shape[-1]), saved_shape(drive, Constants(real), form, True)
    return Plan(
        library,
        form,
        drive.dtype,
        scan,
        forward_bytes=library.adpt_scan_workspace(ctypes.byref(scan), False),
        backward_bytes=library.adpt_scan_workspace(ctypes.byref(scan), True),
        states_shape=whole,
        saved_shape=projections,
        empty=torch.empty(0, dtype=drive.dtype, device="cpu"),
        present=[i for i, t in enumerate(inputs) if t is not None],
        signature=[*_signature(inputs), *[(whole, drive.dtype, True)] * 2],
        saved_signatures=[(shape, drive.dtype, True) for shape in (projections, (0,))],
    )


@functools.cache
def _declare_functions(library: Any) -> Any:
    scan = _mirror("Scan")
    library.adpt_scan_workspace.argtypes = [ctypes.POINTER(scan), ctypes.c_int64]
    library.adpt_scan_products.argtypes = [ctypes.POINTER(scan), ctypes.c_int64]
    for function in (library.adpt_scan_workspace, library.adpt_scan_layout):
        function.restype = ctypes.c_int64
    for function in (library.adpt_scan_forward, library.adpt_scan_backward):
        function.argtypes = [ctypes.POINTER(scan)]
        function.restype = None
    assert library.adpt_scan_layout() == ctypes.sizeof(scan)
    return library
