"""Spectra: the timescales of the state. Each is a spec whose `build` makes the module that holds the eigenvalues Λ̄."""

from .base import BlockDiagonal, Spectrum, SpectrumSpec
from .continuous import Linspace, LogUniformDecay, LRURing, S4DInv, S4DLin, S4DReal, UniformDecay
from .exponents import FromExponents
from .timescales import Timescales
from .wrappers import ContinuousPM, Negative, Sparse

__all__ = [
    "BlockDiagonal",
    "ContinuousPM",
    "FromExponents",
    "LRURing",
    "Linspace",
    "LogUniformDecay",
    "Negative",
    "S4DInv",
    "S4DLin",
    "S4DReal",
    "Sparse",
    "Spectrum",
    "SpectrumSpec",
    "Timescales",
    "UniformDecay",
]
