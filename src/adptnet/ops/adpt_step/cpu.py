"""The CPU kernel of `adpt_step`: the ctypes structure of a call, and its memory."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _backends, _buffers, _build
from .._structures import read_structure
from ..adpt_scan.form import Constants, Form
from ..tolerance import HALF_LIFE, Tolerance
from .reference import Pass

__all__ = ["Jacobians", "has_kernel", "newton_pass"]

_SCALARS = {torch.float32: "float", torch.float64: "double"}
TILE = 16  # steps whose projections are one product
MIN_WORK_PER_THREAD = 1 << 20  # multiplications


@functools.cache
def _mirror() -> Any:
    """Return the ctypes mirror of `struct Step` in csrc/kernel.cpp."""
    return read_structure(Path(__file__).parent / "csrc" / "kernel.cpp", "Step")


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for `dtype`. The first call builds it.

    Args:
        dtype: The dtype of the states.
    """
    return _backends.choose_cpu("adpt_step", dtype).is_kernel


class Jacobians:
    """The Jacobians of the step at given states, computed for a range of steps at a time.

    Args:
        states: (batch, time, n).
        constants: The parameters.
        form: The form of the recurrence.
    """

    def __init__(self, states: Tensor, constants: Constants, form: Form):
        self.states = states if _has_contiguous_rows(states) else states.contiguous()
        self.call = _Call(self.states, constants, form)

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the Jacobians at the states `start` to `stop` - 1, (batch, stop - start, n, n).

        Args:
            start, stop: The range of steps.
        """
        batch, _, size = self.states.shape
        part = self.states[:, start:stop]
        jacobians = _buffers.empty(batch, stop - start, size, size, dtype=part.dtype)
        if jacobians.numel():
            self.call.step.steps = stop - start
            self.call.set(states=part, jacobians=jacobians)
            self.call.run(tasks=batch * -(-(stop - start) // TILE), work=jacobians.numel() * 13)
        return jacobians


def newton_pass(
    states: Tensor,
    drive: Tensor,
    initial: Tensor,
    reset_state: Tensor,
    reset: Tensor | None,
    constants: Constants,
    form: Form,
    *,
    diagonal: bool,
    tolerance: Tolerance,
    recent: Tensor | None = None,
    tiles: int | None = None,
    complete: bool = False,
) -> Pass:
    """Run `reference.newton_pass` by the kernel.

    Args:
        states, drive, initial, reset_state, reset, tolerance, recent, tiles: As in `reference.newton_pass`.
        constants, form: As in `adpt_scan`; they replace `step` and `shift`, which is Λ̄.
        diagonal: Whether the transition is diag(M), as in Forward-DEER, instead of Λ̄, as in Conv-DEER.
        complete: Whether to return the transition and the tolerances as well.
    """
    batch, steps, size = states.shape
    updated = _buffers.empty(batch, steps, size, dtype=states.dtype)
    residual, excess, scale, move = (states.new_empty(batch, steps) for _ in range(4))
    allowed = states.new_empty(batch, steps, size) if complete else None
    transition = torch.empty_like(allowed) if allowed is not None and diagonal else None
    if states.numel():
        call = _Call(states, constants, form)
        if tiles is not None:
            call.step.tile, call.step.sweep = tiles, True
        call.step.diagonal = diagonal
        call.step.relative, call.step.scale_decay = tolerance.relative, 0.5 ** (1 / HALF_LIFE)
        call.step.absolute = tolerance.floor(states.dtype)
        drive = drive if _has_contiguous_rows(drive) else drive.contiguous()
        call.step.drive_batch = drive.stride(0)
        call.set(drive=drive, initial=initial.contiguous(), updated=updated)
        call.set(residual=residual, excess=excess, scale=scale, move=move)
        if allowed is not None:
            call.set(allowed=allowed)
        if transition is not None:
            call.set(transition=transition)
        if reset is not None:
            call.set(reset=reset.contiguous(), reset_state=reset_state.contiguous())
        if recent is not None:
            call.set(recent_scale=recent.contiguous())
        call.run(tasks=batch, work=batch * steps * 2 * size * size)
    if complete and not diagonal:
        transition = constants.real.expand(1, 1, size)
    return Pass(updated, residual, excess, scale, move, transition, allowed)


def _has_contiguous_rows(values: Tensor) -> bool:
    """Return whether the steps of each sequence are contiguous in memory."""
    return values.stride(2) == 1 and values.stride(1) == values.shape[2]


class _Call:
    """A `struct Step` and the tensors that it points to, which it keeps alive."""

    def __init__(self, states: Tensor, constants: Constants, form: Form):
        self.library = _declare_functions(_build.load("adpt_step", _SCALARS[states.dtype]))
        assert _has_contiguous_rows(states)
        assert constants.weight is not None
        assert constants.beta is not None
        batch, steps, size = states.shape
        self.step = _mirror()(batch=batch, steps=steps, size=size, retraction=int(form.retraction), tile=TILE)
        self.step.states_batch = states.stride(0)
        self.tensors: dict[str, Tensor] = {}
        self.set(states=states, real=constants.real.contiguous(), weight=constants.weight.contiguous())
        self.set(beta=constants.beta.contiguous())
        if constants.bias is not None:
            self.set(bias=constants.bias.contiguous())

    def set(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.tensors[name] = tensor
            setattr(self.step, name, tensor.data_ptr())

    def run(self, *, tasks: int, work: int) -> None:
        self.step.threads = max(1, min(torch.get_num_threads(), tasks, work // MIN_WORK_PER_THREAD))
        needed = self.library.adpt_step_workspace(ctypes.byref(self.step))
        if "workspace" not in self.tensors or self.tensors["workspace"].numel() < needed:
            self.set(workspace=_buffers.empty(needed, dtype=torch.uint8))
            self.step.packed = False
        self.library.adpt_step_run(ctypes.byref(self.step))
        self.step.packed = True


@functools.cache
def _declare_functions(library: Any) -> Any:
    for function in (library.adpt_step_workspace, library.adpt_step_run):
        function.argtypes = [ctypes.POINTER(_mirror())]
    for function in (library.adpt_step_workspace, library.adpt_step_layout):
        function.restype = ctypes.c_int64
    library.adpt_step_run.restype = None
    assert library.adpt_step_layout() == ctypes.sizeof(_mirror())
    return library
