"""The rotation of a plane, in O(n). The derivation is in the README beside this file."""

from .rotation import PlaneRotation, cayley, exponential, plane_rotation, skew
from .turn import turned

__all__ = ["PlaneRotation", "cayley", "exponential", "plane_rotation", "skew", "turned"]
