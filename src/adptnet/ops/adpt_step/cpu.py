"""The kernel of `adpt_step`: its arguments as the C++ program takes them, and the memory it works in."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .. import _buffers, _build
from ..adpt_scan.form import Constants, Form
from ..tolerance import HALF_LIFE, Tolerance
from .reference import Pass

__all__ = ["Jacobians", "newton_pass", "ready"]

_NAMES = {torch.float32: "float", torch.float64: "double"}
TILE = 16  # steps whose projections are one product
LEAST = 1 << 20  # products that are worth a thread

_NUMBERS = "batch steps size form threads tile packed diagonal sweep states_batch drive_batch"
_TOLERANCES = "relative absolute decay"
_POINTERS = (
    "real weight bias beta drive initial fresh reset recent states next residual excess scale move jacobians workspace"
)


class _Step(ctypes.Structure):
    """`struct Step` of kernel.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS.split(" ")),
        *((name, ctypes.c_double) for name in _TOLERANCES.split(" ")),
        *((name, ctypes.c_void_p) for name in _POINTERS.split(" ")),
    )


def ready(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for `dtype`; builds it at the first question."""
    return dtype in _NAMES and _build.wanted() and _build.load("adpt_step", _NAMES[dtype]) is not None


class Jacobians:
    """The derivative of the step at states (batch, time, n), some steps at a time."""

    def __init__(self, states: Tensor, constants: Constants, form: Form):
        self.states = states if _rows_follow(states) else states.contiguous()
        self.call = _Call(self.states, constants, form)

    def __call__(self, start: int, stop: int) -> Tensor:
        """(batch, stop - start, n, n)."""
        batch, _, size = self.states.shape
        part = self.states[:, start:stop]
        found = _buffers.empty(batch, stop - start, size, size, dtype=part.dtype)
        if found.numel():
            self.call.step.steps = stop - start
            self.call.set(states=part, jacobians=found)
            self.call.run(tasks=batch * -(-(stop - start) // TILE), work=found.numel() * 13)
        return found


def newton_pass(
    states: Tensor,
    drive: Tensor,
    initial: Tensor,
    fresh: Tensor,
    reset: Tensor | None,
    constants: Constants,
    form: Form,
    *,
    diagonal: bool,
    tolerance: Tolerance,
    recent: Tensor | None = None,
    tiles: int | None = None,
) -> Pass:
    """As `reference.newton_pass`."""
    batch, steps, size = states.shape
    following = _buffers.empty(batch, steps, size, dtype=states.dtype)
    residual, excess, scale, move = (states.new_empty(batch, steps) for _ in range(4))
    if states.numel():
        call = _Call(states, constants, form)
        if tiles is not None:
            call.step.tile, call.step.sweep = tiles, True
        call.step.diagonal = diagonal
        call.step.relative, call.step.decay = tolerance.relative, 0.5 ** (1 / HALF_LIFE)
        call.step.absolute = tolerance.floor(states.dtype)
        drive = drive if _rows_follow(drive) else drive.contiguous()
        call.step.drive_batch = drive.stride(0)
        call.set(drive=drive, initial=initial.contiguous(), next=following)
        call.set(residual=residual, excess=excess, scale=scale, move=move)
        if reset is not None:
            call.set(reset=reset.contiguous(), fresh=fresh.contiguous())
        if recent is not None:
            call.set(recent=recent.contiguous())
        call.run(tasks=batch, work=batch * steps * 2 * size * size)
    return Pass(following, residual, excess, scale, move)


def _rows_follow(values: Tensor) -> bool:
    """Whether the steps of a sequence lie one after another."""
    return values.stride(2) == 1 and values.stride(1) == values.shape[2]


class _Call:
    """A `struct Step` and the tensors it points to."""

    def __init__(self, states: Tensor, constants: Constants, form: Form):
        self.library = _declared(_build.load("adpt_step", _NAMES[states.dtype]))
        assert _rows_follow(states)
        assert constants.weight is not None
        assert constants.beta is not None
        batch, steps, size = states.shape
        self.step = _Step(batch=batch, steps=steps, size=size, form=int(form.retracted), tile=TILE)
        self.step.states_batch = states.stride(0)
        self.held: dict[str, Tensor] = {}
        self.set(states=states, real=constants.real.contiguous(), weight=constants.weight.contiguous())
        self.set(beta=constants.beta.contiguous())
        if constants.bias is not None:
            self.set(bias=constants.bias.contiguous())

    def set(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.held[name] = tensor
            setattr(self.step, name, tensor.data_ptr())

    def run(self, *, tasks: int, work: int) -> None:
        self.step.threads = max(1, min(torch.get_num_threads(), tasks, work // LEAST))
        needed = self.library.adpt_step_workspace(ctypes.byref(self.step))
        if "workspace" not in self.held or self.held["workspace"].numel() < needed:
            self.set(workspace=_buffers.empty(needed, dtype=torch.uint8))
            self.step.packed = False
        self.library.adpt_step_run(ctypes.byref(self.step))
        self.step.packed = True


@functools.cache
def _declared(library: Any) -> Any:
    for function in (library.adpt_step_workspace, library.adpt_step_run):
        function.argtypes = [ctypes.POINTER(_Step)]
    for function in (library.adpt_step_workspace, library.adpt_step_layout):
        function.restype = ctypes.c_int64
    library.adpt_step_run.restype = None
    assert library.adpt_step_layout() == ctypes.sizeof(_Step)
    return library
