"""The whole ADPT recurrence as one operation, forward and backward. The README beside this file has the derivation."""

import torch
from torch import Tensor

from ...errors import InputError
from .. import _backends, _gpu
from .._torch_state import can_bypass_dispatcher, is_transformed
from . import _autograd, cpu, reference
from .dispatch import choose, choose_step, explain_unsupported_gpu
from .form import DEFAULT_FORM, DENSE, Constants, Factors, Form, RetractionKind, Source, check, encode_form

__all__ = [
    "DENSE",
    "Constants",
    "Factors",
    "Form",
    "RetractionKind",
    "Source",
    "adpt_scan",
    "choose",
    "choose_step",
    "explain_unsupported_gpu",
]


def adpt_scan(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form = DEFAULT_FORM,
    *,
    reset: Tensor | None = None,
    lengths: Tensor | None = None,
    factors: Factors = DENSE,
    lean: bool = False,
) -> Tensor:
    """Return all states of the recurrence, (batch, time, width); see `reference.adpt_scan`.

    Args:
        drive, state, constants, form, reset, lengths: As in `reference.adpt_scan`.
        factors: Factors of K and V, which the kernel multiplies with instead of the matrices.
        lean: Save only the states for the backward and recompute the projections K x and V x; otherwise they are saved
            too, which is faster and takes three times the memory.

    Raises:
        InputError: The arguments are inconsistent.
    """
    # Not part of `check`: whether a tensor requires a gradient is not part of the call signature.
    if form.linear and (constants.beta is None or constants.beta.requires_grad):
        raise InputError(f"adpt_scan: linear=True needs a β that is fixed at zero; got {form}, beta={constants.beta}.")
    inputs = (drive, state, *constants, reset, lengths, *factors)
    present = [t for t in inputs if t is not None]
    leaves = inputs[: _autograd.LEAF_COUNT]
    recorded = torch.is_grad_enabled() and True in [t.requires_grad for t in leaves if t is not None]
    save = recorded and not lean
    states: Tensor
    direct = can_bypass_dispatcher(*present) and _gpu.is_cpu(drive.device) and False not in [t.is_cpu for t in present]
    if direct and cpu.has_kernel(drive.dtype):
        plan = cpu.make_plan(inputs, form)
        if recorded:
            states = _autograd.CpuScan.apply((plan, inputs, save), *present)  # type: ignore[no-untyped-call]
        else:
            states, _ = cpu.forward(plan, inputs, save)
        return states
    check(drive, state, constants, form, reset, lengths, factors)
    if is_transformed(*present):
        _backends.log_fallback(_backends.TRANSFORMED.reason)
    elif not direct:
        _autograd.register_flop_formulas()
        states, _ = _autograd.scan(*inputs, encode_form(form), save)
        return states
    return reference.adpt_scan(drive, state, constants, form, reset=reset, lengths=lengths)
