"""Rotations in a plane, applied in O(n). The README beside this file has the derivation."""

from .apply import rotate
from .rotation import PlaneRotation, cayley, exponential, plane_rotation, skew

__all__ = ["PlaneRotation", "cayley", "exponential", "plane_rotation", "rotate", "skew"]
