"""Short calls of a whole layer on CPUs: one compiled call without gradients, one autograd function with gradients."""

from .cpu import LayerCall, has_kernel
from .form import Evaluated, GateWeights, LayerVectors, LayerWeights, LinearizedVectors, VectorSource
from .training import TrainingCall

__all__ = [
    "Evaluated",
    "GateWeights",
    "LayerCall",
    "LayerVectors",
    "LayerWeights",
    "LinearizedVectors",
    "TrainingCall",
    "VectorSource",
    "has_kernel",
]
