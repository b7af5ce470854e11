"""What an ADPT recurrence is made of, in tensors and numbers: the arguments of the operation."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError

__all__ = [
    "DENSE",
    "PLAIN",
    "Constants",
    "Factors",
    "Form",
    "Retracted",
    "Source",
    "check",
    "form_of",
    "is_plain",
    "numbers_of",
]


class Source(enum.IntEnum):
    """What K and V are applied to."""

    STATE = 0
    RELU = 1
    SPIKES = 2


class Retracted(enum.IntEnum):
    """How M is made from the plane of key and value."""

    EXPONENTIAL = 0
    CAYLEY = 1
    TAYLOR_ONE = 2
    TAYLOR_TWO = 3


class Form(NamedTuple):
    """The kind of recurrence. Numbers only, so that it can be part of a graph."""

    heads: int = 1
    turns: bool = True  # whether there are directions at all; if not, M = Λ̄
    given: bool = False  # the drive holds key and value behind itself: (drive, key, value), each of the state's size
    beta_given: bool = False  # the drive's last number is β
    source: int = Source.STATE.value  # a plain number, which torch.compile can read
    spike: float = 0.0
    retracted: int = Retracted.EXPONENTIAL.value
    dot: float | None = None  # of key and value, where it is fixed
    aware: bool = False  # the drive is turned with the state
    norm: float | None = None  # ε of the LayerNorm on unit(K x) and unit(V x), where there is one: with one head
    linear: bool = False  # β is zero and has no derivative: directions change nothing, and need not be computed


PLAIN = Form()
_NONE = -1e300  # stands for None among numbers: a finite one, since JSON has no infinity and a saved program is JSON


def numbers_of(form: Form) -> list[float]:
    """A form as one argument of an operation: torch walks the arguments of each call once for every one of them."""
    return [_NONE if number is None else float(number) for number in form]


def form_of(numbers: "Sequence[float] | Form") -> Form:
    """The form with these numbers."""
    if isinstance(numbers, Form):
        return numbers
    kinds = [float if default is None else type(default) for default in PLAIN]
    given: list[Any] = [None if x == _NONE else kind(x) for kind, x in zip(kinds, numbers, strict=True)]
    return Form(*given)


class Constants(NamedTuple):
    """What stays the same along a sequence. Each number of the state has its own entry; n is their count."""

    real: Tensor  # (n,): Λ̄
    imag: Tensor | None = None  # (n,): as in spectra.BlockDiagonal, b twice for a pair [[a, -b], [b, a]]
    weight: Tensor | None = None  # (heads, 2, m, m): K and V, m = n / heads; None if not needed
    bias: Tensor | None = None  # (heads, 2, m)
    beta: Tensor | None = None  # (heads,)
    # With a slow memory w, the state is (x, w): drive += feed w, and w becomes decay w + charge x.
    feed_real: Tensor | None = None  # (n,)
    feed_imag: Tensor | None = None
    decay: Tensor | None = None
    charge: Tensor | None = None
    norm_weight: Tensor | None = None  # (2, n): of the LayerNorm on key and value
    norm_bias: Tensor | None = None


class Factors(NamedTuple):
    """K and V as A B' + C ⊗ D, either part or none: a cheaper way to the products with `Constants.weight`.

    They must make those matrices, which hold the derivative: what is here has none.
    """

    left: Tensor | None = None  # A, (heads, 2, m, rank)
    right: Tensor | None = None  # B, likewise
    outer: Tensor | None = None  # C, (heads, 2, a, a)
    inner: Tensor | None = None  # D, (heads, 2, b, b), a b = m


DENSE = Factors()


def is_plain(form: Form, *, paired: bool, slow: bool) -> bool:
    """One head, a real spectrum, unit key and value along K and V of the state, a rotation, and nothing else.

    `paired` and `slow` say whether there are complex pairs of eigenvalues and a slow memory.
    """
    return (
        form.heads == 1
        and form.turns
        and not (form.given or form.beta_given or form.aware)
        and form.source == Source.STATE
        and form.dot is None
        and form.norm is None
        and form.retracted in (Retracted.EXPONENTIAL, Retracted.CAYLEY)
        and not (paired or slow)
    )


def _fits(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        given = None if tensor is None else (tuple(tensor.shape), tensor.dtype, str(tensor.device))
        raise InputError(f"adpt_scan: {name} must be {dtype} of shape {shape} on {device}; got {given}.")


def check(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
    factors: Factors,
) -> None:
    """Refuses what does not fit together: a kernel believes what it is told about sizes."""
    if drive.dim() != 3 or constants.real.dim() != 1:
        given = tuple(drive.shape), tuple(constants.real.shape)
        raise InputError(f"adpt_scan: drive must be (batch, time, features) and real (n,); got {given}.")
    possible = 0 <= form.source < len(Source) and 0 <= form.retracted < len(Retracted)
    if form.heads < 1 or not possible or (form.dot is not None and not -1 <= form.dot <= 1):
        raise InputError(f"adpt_scan: heads must be positive, source and retracted known, -1 <= dot <= 1; got {form}.")
    size, heads, dtype, device = constants.real.shape[0], form.heads, drive.dtype, drive.device
    batch, steps = drive.shape[:2]
    m = size // heads
    matrices = form.turns and not form.given
    slow = constants.decay is not None
    _fits("drive", drive, (batch, steps, size * (3 if form.given else 1) + form.beta_given), dtype, device)
    _fits("state", state, (batch, size * (2 if slow else 1)), dtype, device)
    _fits("real", constants.real, (size,), dtype, device)
    if reset is not None:
        _fits("reset", reset, (batch, steps), torch.bool, device)
    if lengths is not None:
        _fits("lengths", lengths, (batch,), torch.int64, device)
    if matrices or constants.weight is not None:
        _fits("weight", constants.weight, (heads, 2, m, m), dtype, device)
    if constants.beta is not None or (form.turns and not form.beta_given):
        _fits("beta", constants.beta, (heads,), dtype, device)
    if constants.imag is not None:
        _fits("imag", constants.imag, (size,), dtype, device)
    if constants.bias is not None:
        _fits("bias", constants.bias, (heads, 2, m), dtype, device)
    if slow:
        _fits("feed_real", constants.feed_real, (size,), dtype, device)
        _fits("decay", constants.decay, (size,), dtype, device)
        _fits("charge", constants.charge, (size,), dtype, device)
        if constants.imag is not None:
            _fits("feed_imag", constants.feed_imag, (size,), dtype, device)
    if form.norm is not None or constants.norm_weight is not None or constants.norm_bias is not None:
        _fits("norm_weight", constants.norm_weight, (2, size), dtype, device)
        _fits("norm_bias", constants.norm_bias, (2, size), dtype, device)
    if (factors.left is None) != (factors.right is None) or (factors.outer is None) != (factors.inner is None):
        raise InputError("adpt_scan: left and right, and outer and inner, are each of two factors; got one of them.")
    if factors.left is not None:
        of_left = heads, 2, m, factors.left.shape[-1]
        _fits("left", factors.left, of_left, dtype, device)
        _fits("right", factors.right, of_left, dtype, device)
    if factors.outer is not None:
        a = factors.outer.shape[-1]
        b = m // a if a else 0
        if a * b != m:
            raise InputError(
                f"adpt_scan: outer, {a} x {a}, and inner do not make matrices of {m} x {m}: pick a divisor."
            )
        _fits("outer", factors.outer, (heads, 2, a, a), dtype, device)
        _fits("inner", factors.inner, (heads, 2, b, b), dtype, device)
    if form.norm is not None and (heads > 1 or not matrices):
        raise InputError(f"adpt_scan: norm={form.norm} is for one head with K and V of the state; got {form}.")
    if form.beta_given and heads > 1:
        raise InputError(f"adpt_scan: a β that comes with the drive is for one head; got {form}.")
    if not slow and (constants.feed_real is not None or constants.charge is not None):
        raise InputError("adpt_scan: feed_real and charge are of a slow memory, which needs decay too.")
    if constants.feed_imag is not None and (not slow or constants.imag is None):
        raise InputError("adpt_scan: feed_imag is of a slow memory beside complex pairs: it needs decay and imag too.")
    if size % heads or (constants.imag is not None and m % 2):
        raise InputError(f"adpt_scan: {heads} heads, complex pairs within each, do not divide a state of {size}.")
