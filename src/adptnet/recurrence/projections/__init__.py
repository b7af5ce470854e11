"""Projections: the linear maps K, V, B and the read-out."""

from .base import Projection, ProjectionSpec
from .dense import Dense, Orthogonal
from .expand import Expand
from .factored import Kronecker, LowParam, LowRank
from .identity import Identity

__all__ = [
    "Dense",
    "Expand",
    "Identity",
    "Kronecker",
    "LowParam",
    "LowRank",
    "Orthogonal",
    "Projection",
    "ProjectionSpec",
]
