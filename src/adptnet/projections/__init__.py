"""Projections: what K, V, B and the read-out are."""

from .base import Projection, ProjectionSpec
from .dense import Dense, Orthogonal
from .expand import Expand

__all__ = ["Dense", "Expand", "Orthogonal", "Projection", "ProjectionSpec"]
