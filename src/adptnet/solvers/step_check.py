"""Check that the step of a user's cell treats rows independently and is deterministic."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..cells.base import Cell
from ..cells.function_cell import FunctionCell
from ..errors import AdptnetError, InputError
from .system import System

__all__ = ["check_step"]

ROWS = 4
KNOWN = {
    nn.GRUCell,
    nn.Identity,
    nn.LSTMCell,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleDict,
    nn.ModuleList,
    nn.ParameterList,
    nn.RNNCell,
}


@torch.no_grad()
def check_step(cell: Cell, system: System) -> None:
    """Raise `InputError` if the step couples rows, is random, or keeps a state of its own.

    A parallel solver calls the step with steps and sequences as rows, batched differently from a sequential loop. The
    result of a row must therefore depend on that row only. Cells that consist of known modules without hooks are not
    called. Buffers of the cell are unchanged afterwards.

    Args:
        cell: The cell.
        system: Its equations.
    """
    if not _runs_user_code(cell) or not system.steps or not len(system.initial):
        return
    drive = system.step_inputs[0].flatten(0, 1)
    index = torch.linspace(0, len(drive) - 1, min(ROWS, len(drive)), device=drive.device).long()
    inputs = drive.index_select(0, index)
    with _buffers_restored(cell):
        states = _usable_states(cell, system, inputs)
        if states is not None:
            _compare_calls(system, states, inputs)


@contextmanager
def _buffers_restored(cell: Cell) -> Iterator[None]:
    """Context manager that restores buffers, such as the running statistics of a batch norm in training mode."""
    before = [(buffer, buffer.clone()) for buffer in cell.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _compare_calls(system: System, states: Tensor, inputs: Tensor) -> None:
    """Raise `InputError` unless calls with the same rows, and with other rows beside them, give the same result."""
    expected, again = (_call_step(system, states, inputs) for _ in range(2))
    if not torch.equal(expected.nan_to_num(), again.nan_to_num()):
        raise InputError(
            "the step gave two results for the same state and input: it is random, or it keeps a state of its own. "
            "A parallel-in-time solver calls it several times for each step. Call .eval() on a module with dropout; "
            "draw noise beforehand and pass it as input; keep everything that changes in the hidden state. "
            "solvers.Sequential() runs any step."
        )
    rows = [-1, 0] if len(inputs) > 2 else [0]  # a smaller batch in another order
    if len(inputs) > 1 and not _matches_in_other_batch(system, states, inputs, expected, rows):
        raise InputError(
            "the result of the step for a row depends on the other rows: it couples sequences, for example by a mean "
            "over the batch. A parallel-in-time solver needs a step that treats rows independently. Use a LayerNorm in "
            "place of a BatchNorm, or solvers.Sequential(). If the difference is rounding error that the step "
            "amplifies, pass check=False to the solver."
        )


def _runs_user_code(cell: Cell) -> bool:
    """Return whether the step may call code from outside this package and torch."""
    return isinstance(cell, FunctionCell) or not all(_is_known(module) for module in cell.modules())


def _is_known(module: nn.Module) -> bool:
    """Return whether a module, of this package or of torch and without hooks, treats rows independently."""
    origin = type(module).__module__
    ours = origin.partition(".")[0] == "adptnet" or origin.startswith("torch.nn.utils.") or type(module) in KNOWN
    return ours and not module._forward_hooks and not module._forward_pre_hooks


def _call_step(system: System, states: Tensor, inputs: Tensor) -> Tensor:
    """Evaluate f at rows, as sequences of one step."""
    rows = dataclasses.replace(system, step_inputs=(inputs.unsqueeze(1),), reset=None, lengths=None)
    return rows.evaluate(states.unsqueeze(1)).squeeze(1)


def _usable_states(cell: Cell, system: System, inputs: Tensor) -> Tensor | None:
    """Return random states at which the step is finite; None if it is not for any of three distributions."""
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(len(inputs), cell.state_size, generator=generator, device="cpu").to(system.initial)
    for states in (normal, normal.abs(), 0.1 * normal.abs().clamp(max=1.0)):
        try:
            if bool(_call_step(system, states, inputs).isfinite().all()):
                return states
        except AdptnetError:
            raise
        except Exception:
            continue
    return None


def _matches_in_other_batch(system: System, states: Tensor, inputs: Tensor, expected: Tensor, rows: list[int]) -> bool:
    """Return whether a batch of only `rows` gives the same results, up to rounding, in every channel.

    Matrix products of another size are summed in another order. The rounding error that this may cause is estimated by
    perturbing the states by their own rounding error.
    """
    rounding = torch.finfo(states.dtype).eps
    change = (_call_step(system, states * (1 + rounding), inputs) - expected).abs().amax(0)
    limit = 64 * (change + rounding * expected.abs().amax(0) + torch.finfo(states.dtype).tiny)
    return bool(((_call_step(system, states[rows], inputs[rows]) - expected[rows]).abs() <= limit).all())
