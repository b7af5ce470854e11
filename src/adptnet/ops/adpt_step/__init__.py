"""The step of an ADPT recurrence at many known states: Jacobians, and a pass of Newton's method over time.

These operations have no gradients: solvers and analyses call them where autograd does not record.
"""

from .cpu import Jacobians, has_kernel, newton_pass
from .device import DevicePass, Outcome, Rules
from .reference import Pass

__all__ = ["DevicePass", "Jacobians", "Outcome", "Pass", "Rules", "has_kernel", "newton_pass"]
