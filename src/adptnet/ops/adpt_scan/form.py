"""Arguments of `adpt_scan`: the form of the recurrence, its parameters, and their validation."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError

__all__ = [
    "DEFAULT_FORM",
    "DENSE",
    "Constants",
    "Factors",
    "Form",
    "RetractionKind",
    "Source",
    "check",
    "decode_form",
    "encode_form",
    "is_basic_form",
]


class Source(enum.IntEnum):
    """The vector that K and V are applied to: the state, its ReLU, or its spikes."""

    STATE = 0
    RELU = 1
    SPIKES = 2


class RetractionKind(enum.IntEnum):
    """The map from the plane of key and value to the transition M."""

    EXPONENTIAL = 0
    CAYLEY = 1
    TAYLOR_ONE = 2
    TAYLOR_TWO = 3


class Form(NamedTuple):
    """The form of a recurrence. It holds plain numbers only, so that it can be a constant of a graph."""

    heads: int = 1
    rotates: bool = True  # whether there is a rotation; if not, M = Λ̄
    directions_in_drive: bool = False  # the drive is (drive, key, value), with a key and a value per plane
    beta_in_drive: bool = False  # the last feature of the drive is β
    source: int = Source.STATE.value  # a plain int, which torch.compile can read
    spike_threshold: float = 0.0
    retraction: int = RetractionKind.EXPONENTIAL.value
    dot: float | None = None  # the dot product of key and value, if it is fixed
    rotation_aware: bool = False  # the drive is rotated with the state
    norm_epsilon: float | None = None  # ε of the LayerNorm on unit(K x) and unit(V x), if any; for one head
    linear: bool = False  # β is zero and needs no gradient: the directions have no effect and are not computed
    phased: bool = False  # the result of M is rotated by P; the drive holds cos φ, sin φ of each pair, before its β
    planes: int = 1  # Q is the product of so many rotations, each with its own K and V; the first is innermost
    whole_state: bool = False  # K and V of each head act on the state of all heads
    softness: float = 0.0  # ε: with the whole state, key and value are K x / √(‖K x‖² + ε²‖x‖²), and likewise V x

    @property
    def has_products(self) -> bool:
        """Whether each step multiplies the state by K and V."""
        return self.rotates and not self.directions_in_drive and not self.linear


DEFAULT_FORM = Form()
_NONE = -1e300  # encodes None; finite, because exported programs are saved as JSON, which has no infinity


def encode_form(form: Form) -> list[float]:
    """Return a form as one list of floats: torch processes every argument of an operation on each call.

    Args:
        form: The form of the recurrence.
    """
    return [_NONE if number is None else float(number) for number in form]


def decode_form(numbers: "Sequence[float] | Form") -> Form:
    """Return the form that `encode_form` encoded.

    Args:
        numbers: The encoded form, or a form, which is returned unchanged.
    """
    if isinstance(numbers, Form):
        return numbers
    types = [float if default is None else type(default) for default in DEFAULT_FORM]
    # A program that was exported earlier has fewer numbers; the later fields have their defaults.
    values: list[Any] = [None if x == _NONE else as_type(x) for as_type, x in zip(types, numbers, strict=False)]
    return Form(*values)


class Constants(NamedTuple):
    """Parameters of the recurrence, which are constant along a sequence. n is the state dimension."""

    real: Tensor  # (n,): Λ̄
    imag: Tensor | None = None  # (n,): as in spectra.BlockDiagonal, b twice for a pair [[a, -b], [b, a]]
    # With several planes, the 2 of K and V is 2 planes: K and V of the first plane, then those of the next.
    weight: Tensor | None = None  # (heads, 2, m, m), of the whole state (heads, 2, m, n): K and V, m = n / heads
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
    """Factors of K and V, each A B' + C ⊗ D, either part optional: a cheaper way to apply `Constants.weight`.

    The factors must multiply to `Constants.weight`, which receives the gradient; they receive none.
    """

    left: Tensor | None = None  # A, (heads, 2, m, rank)
    right: Tensor | None = None  # B, (heads, 2, m, rank)
    outer: Tensor | None = None  # C, (heads, 2, a, a)
    inner: Tensor | None = None  # D, (heads, 2, b, b), a b = m


DENSE = Factors()


def is_basic_form(form: Form, *, paired: bool, slow: bool) -> bool:
    """Return whether the recurrence has no optional features.

    It then has one head, a real spectrum, unit key and value along K x and V x, and a rotation.

    Args:
        form: The form of the recurrence.
        paired: Whether eigenvalues come in complex pairs.
        slow: Whether there is a slow memory.
    """
    return (
        form.heads == 1
        and form.rotates
        and not (form.directions_in_drive or form.beta_in_drive or form.rotation_aware or form.phased)
        and form.planes == 1
        and not form.whole_state
        and form.source == Source.STATE
        and form.dot is None
        and form.norm_epsilon is None
        and form.retraction in (RetractionKind.EXPONENTIAL, RetractionKind.CAYLEY)
        and not (paired or slow)
    )


def _check_tensor(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
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
    """Validate the arguments of `adpt_scan`. The kernels rely on their shapes, dtypes and devices without a check.

    Args:
        drive, state, constants, form, reset, lengths, factors: As in `adpt_scan`.

    Raises:
        InputError: The arguments are inconsistent.
    """
    if drive.dim() != 3 or constants.real.dim() != 1:
        given = tuple(drive.shape), tuple(constants.real.shape)
        raise InputError(f"adpt_scan: drive must be (batch, time, features) and real (n,); got {given}.")
    known = 0 <= form.source < len(Source) and 0 <= form.retraction < len(RetractionKind)
    if min(form.heads, form.planes) < 1 or not known or (form.dot is not None and not -1 <= form.dot <= 1):
        raise InputError(
            f"adpt_scan: heads and planes must be positive, source and retraction known, -1 <= dot <= 1; got {form}."
        )
    rotation = form.retraction in (RetractionKind.EXPONENTIAL, RetractionKind.CAYLEY)
    if (form.planes > 1 or form.whole_state) and not (form.rotates and rotation):
        raise InputError(
            f"adpt_scan: several planes, or those of the whole state, need Cayley or an exponential; got {form}."
        )
    elsewhere = form.directions_in_drive or form.dot is not None or form.norm_epsilon is not None
    if form.whole_state and (form.source != Source.STATE or elsewhere):
        raise InputError(f"adpt_scan: key and value of the whole state have no other options; got {form}.")
    if form.softness and not (form.whole_state and form.softness > 0):
        raise InputError(f"adpt_scan: a softness is positive and belongs to directions of the whole state; got {form}.")
    size, heads, dtype, device = constants.real.shape[0], form.heads, drive.dtype, drive.device
    batch, steps = drive.shape[:2]
    m, halves = size // heads, 2 * form.planes
    depth = size if form.whole_state else m
    has_weights = form.rotates and not form.directions_in_drive
    slow = constants.decay is not None
    features = size * ((1 + halves if form.directions_in_drive else 1) + form.phased) + form.beta_in_drive
    _check_tensor("drive", drive, (batch, steps, features), dtype, device)
    _check_tensor("state", state, (batch, size * (2 if slow else 1)), dtype, device)
    _check_tensor("real", constants.real, (size,), dtype, device)
    if reset is not None:
        _check_tensor("reset", reset, (batch, steps), torch.bool, device)
    if lengths is not None:
        _check_tensor("lengths", lengths, (batch,), torch.int64, device)
    if has_weights or constants.weight is not None:
        _check_tensor("weight", constants.weight, (heads, halves, m, depth), dtype, device)
    if constants.beta is not None or (form.rotates and not form.beta_in_drive):
        _check_tensor("beta", constants.beta, (heads,), dtype, device)
    if constants.imag is not None:
        _check_tensor("imag", constants.imag, (size,), dtype, device)
    if constants.bias is not None:
        _check_tensor("bias", constants.bias, (heads, halves, m), dtype, device)
    if slow:
        _check_tensor("feed_real", constants.feed_real, (size,), dtype, device)
        _check_tensor("decay", constants.decay, (size,), dtype, device)
        _check_tensor("charge", constants.charge, (size,), dtype, device)
        if constants.imag is not None:
            _check_tensor("feed_imag", constants.feed_imag, (size,), dtype, device)
    if form.norm_epsilon is not None or constants.norm_weight is not None or constants.norm_bias is not None:
        _check_tensor("norm_weight", constants.norm_weight, (halves, size), dtype, device)
        _check_tensor("norm_bias", constants.norm_bias, (halves, size), dtype, device)
    if (factors.left is None) != (factors.right is None) or (factors.outer is None) != (factors.inner is None):
        raise InputError("adpt_scan: left and right come together, as do outer and inner; got only one of a pair.")
    if (form.planes > 1 or form.whole_state) and (factors.left is not None or factors.outer is not None):
        raise InputError(f"adpt_scan: K and V of several planes, or of the whole state, have no factors; got {form}.")
    if factors.left is not None:
        shape = heads, 2, m, factors.left.shape[-1]
        _check_tensor("left", factors.left, shape, dtype, device)
        _check_tensor("right", factors.right, shape, dtype, device)
    if factors.outer is not None:
        a = factors.outer.shape[-1]
        b = m // a if a else 0
        if a * b != m:
            raise InputError(
                f"adpt_scan: outer, {a} x {a}, and inner do not make {m} x {m} matrices: choose a divisor of {m}."
            )
        _check_tensor("outer", factors.outer, (heads, 2, a, a), dtype, device)
        _check_tensor("inner", factors.inner, (heads, 2, b, b), dtype, device)
    if form.norm_epsilon is not None and (heads > 1 or not has_weights):
        raise InputError(
            f"adpt_scan: norm_epsilon={form.norm_epsilon} needs one head, with key and value computed from the state; "
            f"got {form}."
        )
    if form.beta_in_drive and heads > 1:
        raise InputError(f"adpt_scan: a β that is part of the drive needs one head; got {form}.")
    if not slow and (constants.feed_real is not None or constants.charge is not None):
        raise InputError("adpt_scan: feed_real and charge belong to a slow memory, which needs decay too.")
    if constants.feed_imag is not None and (not slow or constants.imag is None):
        raise InputError(
            "adpt_scan: feed_imag belongs to a slow memory with complex pairs: it needs decay and imag too."
        )
    if form.phased and m % 2:
        raise InputError(f"adpt_scan: a phase rotates pairs and needs an even size of each head; got {m}.")
    if size % heads or (constants.imag is not None and m % 2):
        raise InputError(
            f"adpt_scan: a state dimension of {size} cannot be divided into {heads} heads with whole complex pairs."
        )
