"""The step of an ADPT recurrence at many known states: Jacobians, and a pass of Newton's method along time.

Without derivatives of their own: solvers and analyses call them where none are recorded.
"""

from ..adpt_scan.form import is_plain as covers
from .cpu import Jacobians, newton_pass, ready
from .reference import Pass

__all__ = ["Jacobians", "Pass", "covers", "newton_pass", "ready"]
