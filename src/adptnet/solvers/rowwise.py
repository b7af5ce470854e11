"""A check of a user's step: it must treat each row by itself and give the same result when called again."""

import dataclasses

import torch
from torch import Tensor

from ..cells.base import Cell
from ..cells.wrap import FunctionCell
from ..errors import InputError
from ..system import System

__all__ = ["check_step"]

ROWS = 4


@torch.no_grad()
def check_step(cell: Cell, system: System) -> None:
    """Raise `InputError` if the step couples rows, is random, or keeps a state of its own.

    A parallel solver calls the step with steps and sequences as rows, in other groups than a loop does. What a row
    gives may then depend on nothing but that row. Cells of this package are known to be so and are not called.
    """
    if not _is_from_outside(cell) or not system.steps or not len(system.initial):
        return
    drive = system.givens[0].flatten(0, 1)
    index = torch.linspace(0, len(drive) - 1, min(ROWS, len(drive)), device=drive.device).long()
    inputs = drive.index_select(0, index)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(len(inputs), cell.state_size, generator=generator).to(system.initial)
    together, again = (_call(system, states, inputs) for _ in range(2))
    if not torch.equal(together.nan_to_num(), again.nan_to_num()):
        raise InputError(
            "the step gave two results for the same state and input: it is random, or it keeps a state of its own. "
            "A solver that is parallel in time calls it many times for each step. Call .eval() on a module with "
            "dropout; draw noise beforehand and pass it as input; keep what changes in the state. "
            "solvers.Sequential() runs any step."
        )
    fewer = [-1, 0] if len(inputs) > 2 else [0]  # other neighbours, in another order
    if len(inputs) > 1 and not _agree(together[fewer], _call(system, states[fewer], inputs[fewer])):
        raise InputError(
            "the step gave another result for a row among other rows: it couples sequences, by a mean over the batch "
            "for example. A solver that is parallel in time needs a step that treats each row by "
            "itself. Use a LayerNorm in place of a BatchNorm, or solvers.Sequential(); if the difference is "
            "rounding that the step amplifies, pass check=False to the solver."
        )


def _is_from_outside(cell: Cell) -> bool:
    return isinstance(cell, FunctionCell) or type(cell).__module__.partition(".")[0] != "adptnet"


def _call(system: System, states: Tensor, inputs: Tensor) -> Tensor:
    """Return f, for which rows are sequences of one step."""
    rows = dataclasses.replace(system, givens=(inputs.unsqueeze(1),), reset=None, lengths=None)
    return rows.evaluate(states.unsqueeze(1)).squeeze(1)


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return whether two results are equal but for rounding: products of other sizes are summed in another order."""
    if not (one.isfinite().all() and other.isfinite().all()):
        return True  # nothing to compare at these states
    scale = max(1.0, float(one.abs().max()))
    return bool((one - other).abs().max() <= torch.finfo(one.dtype).eps ** 0.5 * scale)
