"""The rotation of a plane, in O(n). The derivation is in the README beside this file."""

from .reference import PlaneRotation, cayley, exponential, plane_rotation, skew

__all__ = ["PlaneRotation", "cayley", "exponential", "plane_rotation", "skew"]
