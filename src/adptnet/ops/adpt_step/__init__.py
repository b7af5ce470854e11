"""The step of an ADPT recurrence at many known states: Jacobians, and a pass of Newton's method along time.

Without derivatives of their own: solvers and analyses call them where none are recorded.
"""

from ..adpt_scan.form import Constants, Form, is_plain
from .cpu import Jacobians, newton_pass, ready
from .reference import Pass

__all__ = ["Jacobians", "Pass", "covers", "newton_pass", "ready"]


def covers(constants: Constants, form: Form) -> bool:
    """Whether there is a kernel for such a recurrence."""
    return is_plain(form, paired=constants.imag is not None, slow=constants.decay is not None)
