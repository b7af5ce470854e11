"""The step of an ADPT recurrence at many known states: Jacobians, and a pass of Newton's method over time.

These operations have no gradients: solvers and analyses call them where autograd does not record.
"""

from ..adpt_scan.form import Constants, Form, is_basic_form
from .cpu import Jacobians, has_kernel, newton_pass
from .reference import Pass

__all__ = ["Jacobians", "Pass", "has_kernel", "is_supported", "newton_pass"]


def is_supported(constants: Constants, form: Form) -> bool:
    """Return whether the kernel supports a recurrence.

    Args:
        constants: The parameters.
        form: The form of the recurrence.
    """
    return is_basic_form(form, paired=constants.imag is not None, slow=constants.decay is not None)
