"""Checks of tensors that users pass: dtype, lengths, resets, finite values. Every module uses these checks."""

import torch
from torch import Tensor, nn

from ._dtype import compute_dtype
from .errors import IncompatibleError, InputError, NonFiniteError
from .ops._torch_state import has_values

__all__ = [
    "check_dtype",
    "check_finite",
    "check_lengths",
    "check_not_nested",
    "check_precision",
    "check_reset",
    "make_validity_mask",
    "mark_finite",
]


def make_validity_mask(lengths: Tensor, steps: int) -> Tensor:
    """Return a (batch, steps) mask, True at the steps before the end of each sequence.

    Args:
        lengths: (batch,) true lengths.
        steps: The padded length.
    """
    return torch.arange(steps, device=lengths.device) < lengths.unsqueeze(-1)


def mark_finite(values: Tensor) -> Tensor:
    """Return whether the entries of each step are finite, (...).

    Args:
        values: (..., n), n >= 1, floating point.
    """
    return values.amax(-1).isfinite() & values.amin(-1).isfinite()  # ten times faster than isfinite of every element


def check_not_nested(inputs: object) -> None:
    """Raise `InputError` on a nested tensor, with the padded form to pass instead.

    Args:
        inputs: The inputs of a layer or solver.
    """
    if isinstance(inputs, Tensor) and inputs.is_nested:
        raise InputError(
            "x is a nested tensor; sequences of different lengths are passed padded, with their lengths: "
            "torch.nested.to_padded_tensor(x, 0.0), lengths=torch.tensor([len(row) for row in x.unbind()])."
        )


def check_dtype(inputs: Tensor, cell_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the state for these inputs.

    Args:
        inputs: The inputs of a cell.
        cell_dtype: The dtype in which the cell computes; None if it has no parameters and follows its inputs.

    Raises:
        InputError: The inputs are not floating point, or have a higher precision than the cell computes in.
    """
    if not inputs.is_floating_point():
        raise InputError(f"inputs are {inputs.dtype}; a recurrence needs floating point. Pass inputs.float().")
    dtype = cell_dtype or compute_dtype(inputs.dtype)
    if torch.promote_types(inputs.dtype, dtype) != dtype:
        raise InputError(
            f"inputs are {inputs.dtype} but the cell computes in {dtype}: precision would be lost. "
            f"Call .to({inputs.dtype}) on the layer, or pass inputs.to({dtype})."
        )
    return dtype


def check_lengths(lengths: Tensor | None, batch: int, steps: int, device: torch.device) -> Tensor | None:
    """Return lengths as int64 on `device`; None if there are none.

    Args:
        lengths: (batch,) true lengths of right-padded sequences.
        batch: The number of sequences.
        steps: The padded length.
        device: The device of the inputs.

    Raises:
        InputError: Wrong dtype or shape, or a length outside 1 ... `steps`; the message names the first one.
    """
    if lengths is None:
        return None
    lengths = torch.as_tensor(lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise InputError(f"lengths are {lengths.dtype}; they count steps. Pass lengths.long().")
    lengths = lengths.to(device=device, dtype=torch.int64)
    if lengths.shape != (batch,):
        raise InputError(f"lengths have shape {tuple(lengths.shape)}; {batch} sequences need {(batch,)}.")
    wrong = (lengths < 1) | (lengths > steps)
    if has_values(wrong) and bool(wrong.any()):
        i = int(wrong.nonzero()[0, 0])
        raise InputError(
            f"lengths[{i}] = {int(lengths[i])}; a length must be between 1 and the padded length {steps}. "
            + ("Drop empty sequences from the batch." if int(lengths[i]) < 1 else "Pad the inputs to the longest.")
        )
    return lengths


def check_reset(reset: Tensor | None, batch: int, steps: int) -> Tensor | None:
    """Return `reset` as a tensor; None if there is none.

    Args:
        reset: (batch, steps) bool, True where a sequence begins.
        batch: The number of sequences.
        steps: The length of the sequences.

    Raises:
        InputError: Wrong dtype or shape.
    """
    if reset is None:
        return None
    reset = torch.as_tensor(reset)
    if reset.dtype != torch.bool or reset.shape != (batch, steps):
        raise InputError(
            f"reset is {reset.dtype} of shape {tuple(reset.shape)}; it must be torch.bool of shape {(batch, steps)}, "
            "True where a sequence begins. Pass reset.bool()."
        )
    return reset


def check_finite(finite: Tensor, subject: str, advice: str) -> None:
    """Raise `NonFiniteError` that names the first step that is not finite.

    Args:
        finite: (batch, time) or (time,) bool: whether all features of a step are finite.
        subject: The beginning of the message, such as "x is".
        advice: What to do about it, a sentence.
    """
    if not bool(finite.all()):
        where = tuple(int(i) for i in (~finite).nonzero()[0])
        place = f"sequence {where[0]}, step {where[1]}" if len(where) == 2 else f"step {where[0]}"
        raise NonFiniteError(
            f"{subject} not finite: first at {place}; {int((~finite).sum())} of {finite.numel()} steps hold NaN or "
            f"infinity. {advice}"
        )


def check_precision(cell: nn.Module) -> None:
    """Raise `IncompatibleError` if a parameter has half precision.

    Args:
        cell: A cell that wraps a module or function of the user.
    """
    for name, parameter in cell.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise IncompatibleError(
                f"{name} is {parameter.dtype}; a wrapped cell runs in the dtype of its weights, and a state needs at "
                "least float32. Call .float() on the cell."
            )
