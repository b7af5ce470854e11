"""Conjugates: how M = Q Λ̄ Q' acts on the state.

specs       the choices: `Exact`, `Product`, `Taylor`, `Diagonal`, `Stateful`
operators   M as an operator whose matrix is not formed: `mv`, `diagonal`, `blocks`, `dense`
blocks      matrices in place of Λ̄, and helpers for block-diagonal matrices
"""

from .blocks import Eigen, RotatedBlocks, block_diagonal, nearest_blocks, scaled_skew
from .operators import (
    Conjugate,
    MultiHeadConjugate,
    PhasedConjugate,
    RotatedConjugate,
    StaticConjugate,
    TaylorConjugate,
)
from .specs import ConjugateSpec, Diagonal, Exact, Product, Stateful, Taylor

__all__ = [
    "Conjugate",
    "ConjugateSpec",
    "Diagonal",
    "Eigen",
    "Exact",
    "MultiHeadConjugate",
    "PhasedConjugate",
    "Product",
    "RotatedBlocks",
    "RotatedConjugate",
    "Stateful",
    "StaticConjugate",
    "Taylor",
    "TaylorConjugate",
    "block_diagonal",
    "nearest_blocks",
    "scaled_skew",
]
