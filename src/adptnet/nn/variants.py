"""Constructors of the paper's named variants. Each returns an `ADPTNet` with the component of that variant."""

from typing import Any

from ..cells import SlowMemory
from ..recurrence.conjugates import Taylor
from ..recurrence.directions import FromInput
from .adpt_layer import ADPTNet

__all__ = ["CoupledADPTNet", "LinearADPTNet", "TaylorADPTNet"]


def TaylorADPTNet(width: int, *, order: int = 1, **axes: Any) -> ADPTNet:
    """Return an `ADPTNet` with M expanded in β (sec:taylor_ADPTNet): cheaper, for small β.

    Args:
        width: Features in and out.
        order: Order of the Taylor expansion, 1 or 2.
        axes: Other arguments of `ADPTNet`.
    """
    return ADPTNet.paper(width, conjugate=Taylor(order), **axes)


def LinearADPTNet(width: int, *, direction: FromInput = FromInput(), **axes: Any) -> ADPTNet:
    """Return an `ADPTNet` with directions from the input (sec:linear_ADPTNet): time-varying, but linear in the state.

    Args:
        width: Features in and out.
        direction: The directions.
        axes: Other arguments of `ADPTNet`.
    """
    return ADPTNet.paper(width, direction=direction, **axes)


def CoupledADPTNet(width: int, *, memory: SlowMemory = SlowMemory(), **axes: Any) -> ADPTNet:
    """Return an `ADPTNet` coupled to a slow linear memory (eq:coupled_ADPTNet).

    Args:
        width: Features in and out.
        memory: The slow memory.
        axes: Other arguments of `ADPTNet`.
    """
    return ADPTNet.paper(width, memory=memory, **axes)
