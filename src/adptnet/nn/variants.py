"""The paper's named variants: functions that return an `ADPTNet`, equal to the one spelled out."""

from typing import Any

from ..cells import SlowMemory
from ..recurrence.conjugates import Taylor
from ..recurrence.directions import FromInput
from .layer import ADPTNet

__all__ = ["CoupledADPTNet", "LinearADPTNet", "TaylorADPTNet"]


def TaylorADPTNet(width: int, *, order: int = 1, **axes: Any) -> ADPTNet:
    """The conjugate to first or second order in β (sec:taylor_ADPTNet): cheaper, for small β."""
    return ADPTNet(width, conjugate=Taylor(order), **axes)


def LinearADPTNet(width: int, *, direction: FromInput = FromInput(), **axes: Any) -> ADPTNet:
    """Directions from the input (sec:linear_ADPTNet): time-varying, but linear in the state."""
    return ADPTNet(width, direction=direction, **axes)


def CoupledADPTNet(width: int, *, memory: SlowMemory = SlowMemory(), **axes: Any) -> ADPTNet:
    """A slow linear memory beside the state (eq:coupled_ADPTNet)."""
    return ADPTNet(width, memory=memory, **axes)
