"""A check of a user's step: it must treat each row by itself and give the same result when called again."""

import dataclasses

import torch
from torch import Tensor, nn

from ..cells.base import Cell
from ..cells.wrap import FunctionCell
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

    A parallel solver calls the step with steps and sequences as rows, in other groups than a loop does. What a row
    gives may then depend on nothing but that row. Cells made of known modules only, without hooks, are not called.
    """
    if not _runs_user_code(cell) or not system.steps or not len(system.initial):
        return
    drive = system.givens[0].flatten(0, 1)
    index = torch.linspace(0, len(drive) - 1, min(ROWS, len(drive)), device=drive.device).long()
    inputs = drive.index_select(0, index)
    states = _usable_states(cell, system, inputs)
    if states is None:
        return
    together, again = (_call(system, states, inputs) for _ in range(2))
    if not torch.equal(together.nan_to_num(), again.nan_to_num()):
        raise InputError(
            "the step gave two results for the same state and input: it is random, or it keeps a state of its own. "
            "A solver that is parallel in time calls it many times for each step. Call .eval() on a module with "
            "dropout; draw noise beforehand and pass it as input; keep what changes in the state. "
            "solvers.Sequential() runs any step."
        )
    fewer = [-1, 0] if len(inputs) > 2 else [0]  # other neighbours, in another order
    if len(inputs) > 1 and not _agree(system, states, inputs, together, fewer):
        raise InputError(
            "the step gave another result for a row among other rows: it couples sequences, by a mean over the batch "
            "for example. A solver that is parallel in time needs a step that treats each row by "
            "itself. Use a LayerNorm in place of a BatchNorm, or solvers.Sequential(); if the difference is "
            "rounding that the step amplifies, pass check=False to the solver."
        )


def _runs_user_code(cell: Cell) -> bool:
    return isinstance(cell, FunctionCell) or not all(_is_known(module) for module in cell.modules())


def _is_known(module: nn.Module) -> bool:
    """Return whether a module is known to treat rows alone: no hooks, and of this package or a plain one of torch."""
    origin = type(module).__module__
    ours = origin.partition(".")[0] == "adptnet" or origin.startswith("torch.nn.utils.") or type(module) in KNOWN
    return ours and not module._forward_hooks and not module._forward_pre_hooks


def _call(system: System, states: Tensor, inputs: Tensor) -> Tensor:
    """Return f, for which rows are sequences of one step."""
    rows = dataclasses.replace(system, givens=(inputs.unsqueeze(1),), reset=None, lengths=None)
    return rows.evaluate(states.unsqueeze(1)).squeeze(1)


def _usable_states(cell: Cell, system: System, inputs: Tensor) -> Tensor | None:
    """Return random states at which the step is defined, if there are any among a few kinds."""
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(len(inputs), cell.state_size, generator=generator, device="cpu").to(system.initial)
    for states in (normal, normal.abs(), 0.1 * normal.abs().clamp(max=1.0)):
        try:
            if bool(_call(system, states, inputs).isfinite().all()):
                return states
        except AdptnetError:
            raise
        except Exception:
            continue
    return None


def _agree(system: System, states: Tensor, inputs: Tensor, together: Tensor, fewer: list[int]) -> bool:
    """Return whether rows among `fewer` others give the same but for rounding, in every channel.

    Products of other sizes are summed in another order. What that may change is found by moving the states by their
    own rounding.
    """
    rounding = torch.finfo(states.dtype).eps
    moved = (_call(system, states * (1 + rounding), inputs) - together).abs().amax(0)
    limit = 64 * (moved + rounding * together.abs().amax(0) + torch.finfo(states.dtype).tiny)
    return bool(((_call(system, states[fewer], inputs[fewer]) - together[fewer]).abs() <= limit).all())
