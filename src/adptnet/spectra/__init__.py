"""Spectra: which timescales the state has. Each is a spec whose `build` makes the eigenvalues Λ̄."""

from .base import BlockDiagonal, Spectrum, SpectrumSpec
from .continuous import Linspace, S4DInv, S4DReal
from .wrappers import Negative, Sparse

__all__ = ["BlockDiagonal", "Linspace", "Negative", "S4DInv", "S4DReal", "Sparse", "Spectrum", "SpectrumSpec"]
