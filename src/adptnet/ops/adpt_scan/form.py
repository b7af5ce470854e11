"""What an ADPT recurrence is made of, in tensors and numbers: the arguments of the operation."""

import enum
from typing import NamedTuple

from torch import Tensor

__all__ = ["PLAIN", "Constants", "Form", "Retracted", "Source"]


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
    source: int = Source.STATE
    spike: float = 0.0
    retracted: int = Retracted.EXPONENTIAL
    dot: float | None = None  # of key and value, where it is fixed
    aware: bool = False  # the drive is turned with the state


PLAIN = Form()


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
