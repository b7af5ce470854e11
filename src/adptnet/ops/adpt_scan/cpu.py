"""The kernel of `adpt_scan`: its arguments as the C++ program takes them, and the memory it works in."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import memory, native
from .form import DENSE, Constants, Factors, Form, Retracted

__all__ = ["backward", "forward", "kept", "products", "ready"]

FEW, FEWER, MANY = 12, 8, 64  # sequences that are run together: two groups of six, two of four, the most
DOTS = 16  # numbers that are kept of a row beside its projections: `dots` of rotation.h
SMALL = 256  # rows of K and V that fit well into the second cache

_NAMES = {torch.float32: "float", torch.float64: "double"}

_NUMBERS = "batch steps heads size features width tile threads complex_pairs given turns source form aware"
_NUMBERS += " coupled beta_given mixes norms factored rank outer_size inner_size"
_POINTERS = "drive initial real imag weight bias beta feed_real feed_imag decay charge norm_weight norm_bias left right"
_POINTERS += " outer inner reset lengths states projections state_gradients initial_gradients drive_gradients"
_POINTERS += " real_gradients imag_gradients weight_gradients bias_gradients beta_gradients feed_real_gradients"
_POINTERS += " feed_imag_gradients decay_gradients charge_gradients norm_weight_gradients norm_bias_gradients workspace"


class _Scan(ctypes.Structure):
    """`struct Scan` of kernel.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS.split(" ")),
        ("spike", ctypes.c_double),
        ("dot", ctypes.c_double),
        ("norm", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _POINTERS.split(" ")),
    )


def ready(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for `dtype`; builds it at the first question."""
    return dtype in _NAMES and native.wanted() and native.load("adpt_scan", _NAMES[dtype]) is not None


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


def forward(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
    factors: Factors,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """The states, and K x and V x of every step if they are to be saved (nothing otherwise)."""
    call = _Call(drive, state, constants, form, reset, lengths, factors)
    batch, steps, width = *drive.shape[:2], state.shape[-1]
    states = memory.empty(batch, steps, width, dtype=drive.dtype)
    projections = memory.empty(*kept(drive, constants, form, save), dtype=drive.dtype)
    call.set(states=states, projections=projections)
    call.run("adpt_scan_forward", backward=False)
    return states, projections


def backward(
    gradient: Tensor,
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
    factors: Factors,
    states: Tensor,
    projections: Tensor,
) -> tuple[Tensor, Tensor, Constants]:
    """Derivatives with respect to the drive, the initial state and each of the constants."""
    call = _Call(drive, state, constants, form, reset, lengths, factors)
    # The kernel writes all of these, so that torch need not: its threads would stay busy for some milliseconds and be
    # in the way of the kernel's.
    inputs = {"drive": drive, "initial": state, **constants._asdict()}
    found = {
        name: None if tensor is None else memory.empty(*tensor.shape, dtype=drive.dtype)
        for name, tensor in inputs.items()
    }
    call.set(states=states, projections=projections, state_gradients=gradient)
    call.set(**{f"{name}_gradients": tensor for name, tensor in found.items()})
    call.run("adpt_scan_backward", backward=True)
    to_drive, to_initial, *to_constants = found.values()
    assert to_drive is not None
    assert to_initial is not None
    return to_drive, to_initial, Constants(*to_constants)  # type: ignore[arg-type]


def products(drive: Tensor, state: Tensor, constants: Constants, form: Form, which: str) -> None:
    """Only the matrix products of the "forward", of the "backward" or of the "weights": a limit to measure against."""
    call = _Call(drive, state, constants, form, None, None, DENSE)
    call.scan.tile = min(MANY, drive.shape[0])  # their best
    call.run("adpt_scan_products", ("forward", "backward", "weights").index(which), backward=which != "forward")


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


@functools.lru_cache(maxsize=64)
def _numbers(
    form: Form,
    batch: int,
    steps: int,
    features: int,
    n: int,
    width: int,
    pairs: bool,
    coupled: bool,
    factor_sizes: tuple[int, int, int],
    threads: int,
) -> _Scan:
    """A `struct Scan` without pointers."""
    size, turns = n // form.heads, _turns(form)
    work = batch * steps * form.heads * (2 * size * size + 16 * size)
    threads = max(1, min(threads, work // 1_000_000))  # which must have something to do
    tile = _tile(batch, form.heads, size, threads)
    rank, outer, inner = factor_sizes
    return _Scan(
        batch=batch,
        steps=steps,
        heads=form.heads,
        size=size,
        features=features,
        width=width,
        tile=tile,
        threads=max(1, min(threads, -(-batch // tile) * form.heads)),
        complex_pairs=pairs,
        given=form.given,
        turns=turns,
        source=int(form.source),
        form=int(form.retracted),
        aware=form.aware and form.retracted in (Retracted.EXPONENTIAL, Retracted.CAYLEY),
        coupled=coupled,
        beta_given=form.beta_given,
        mixes=turns and form.dot is not None,
        norms=turns and form.norm is not None,
        factored=any(factor_sizes),
        rank=rank,
        outer_size=outer,
        inner_size=inner,
        spike=form.spike,
        dot=0.0 if form.dot is None else form.dot,
        norm=0.0 if form.norm is None else form.norm,
    )


class _Call:
    """A `struct Scan` and the tensors it points to."""

    def __init__(
        self,
        drive: Tensor,
        state: Tensor,
        constants: Constants,
        form: Form,
        reset: Tensor | None,
        lengths: Tensor | None,
        factors: Factors,
    ):
        self.library = _declared(native.load("adpt_scan", _NAMES[drive.dtype]))
        pairs, coupled = constants.imag is not None, constants.decay is not None
        sizes = tuple(0 if t is None else t.shape[-1] for t in (factors.left, factors.outer, factors.inner))
        n, threads = constants.real.shape[0], torch.get_num_threads()
        numbers = _numbers(form, *drive.shape, n, state.shape[-1], pairs, coupled, sizes, threads)
        self.scan = _Scan.from_buffer_copy(numbers)
        self.held: dict[str, Tensor] = {}
        self.set(drive=drive, initial=state, reset=reset, lengths=lengths, **factors._asdict())
        self.set(**constants._asdict())
        for name in ("imag", "feed_imag"):
            if name in self.held:
                self.set(**{name: _signed(self.held[name])})

    def set(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None and tensor.numel():
                self.held[name] = tensor.resolve_neg().contiguous()
                setattr(self.scan, name, self.held[name].data_ptr())

    def run(self, function: str, *numbers: int, backward: bool) -> None:
        needed = self.library.adpt_scan_workspace(ctypes.byref(self.scan), backward)
        if "workspace" not in self.held:
            self.set(workspace=memory.empty(needed, dtype=torch.uint8))
        call: Callable[..., None] = getattr(self.library, function)
        call(ctypes.byref(self.scan), *numbers)


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
