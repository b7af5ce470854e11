"""A short call of a whole layer in one compiled call: drive, recurrence and read-out. Forward only, on CPUs."""

from .cpu import LayerCall, has_kernel
from .form import LayerVectors, LayerWeights

__all__ = ["LayerCall", "LayerVectors", "LayerWeights", "has_kernel"]
