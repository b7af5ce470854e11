"""Block-wise solving (alg:block_wise_deer): blocks of time in sequence, each solved in parallel over time."""

import dataclasses

import torch
from torch import Tensor

from ..cells.base import Cell
from ..errors import InputError
from ..ops.tolerance import Tolerance
from .parallel import Parallel, join_blocks
from .policies import Policy, SystemSolution
from .system import System
from .transitions import Transition

__all__ = ["BlockWise"]


class BlockWise(Parallel):
    """Solve one block of steps after another; the last state of a block enters the next.

    A short block takes fewer iterations, and transitions are stored for one block only. The failure policy of `solver`
    is applied to each block before the next begins. `iterations` is the maximum over the blocks.

    Args:
        solver: The parallel-in-time solver of a block.
        num_blocks: The number of blocks of equal length (the last may be shorter).
        block_length: The number of steps per block, as an alternative to `num_blocks`.
    """

    def __init__(self, solver: Parallel, num_blocks: int | None = None, *, block_length: int | None = None):
        if not isinstance(solver, Parallel):
            raise InputError(
                f"BlockWise({solver!r}): needs a solver that is parallel in time. Pass solvers.ConvDEER()."
            )
        if (num_blocks is None) == (block_length is None):
            raise InputError("BlockWise: pass one of num_blocks= and block_length=, for instance num_blocks=8.")
        for name, value in {"num_blocks": num_blocks, "block_length": block_length}.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"BlockWise({name}={value!r}): must be an integer >= 1.")
        self.solver = solver
        self.num_blocks = num_blocks
        self.block_length = block_length

    def steps_per_block(self, steps: int) -> int:
        if self.block_length is not None:
            return self.block_length
        assert self.num_blocks is not None
        return max(1, -(-steps // self.num_blocks))

    @property
    def on_failure(self) -> Policy:  # type: ignore[override]
        return self.solver.on_failure

    @property
    def check(self) -> bool:  # type: ignore[override]
        return self.solver.check

    @property
    def fixed_iterations(self) -> int | None:  # type: ignore[override]
        return self.solver.fixed_iterations

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        return self.solver.tolerance(dtype)

    def solve_system(self, cell: Cell, system: System, guess: Tensor | None) -> SystemSolution:
        length, steps = self.steps_per_block(system.steps), system.steps
        blocks: list[SystemSolution] = []
        before, recent = system.initial, system.recent_scale
        for start in range(0, max(1, steps), length):
            stop = min(start + length, steps)
            part = dataclasses.replace(system.part(None, start, before, stop), total_steps=steps, recent_scale=recent)
            blocks.append(self.solver.solve_system(cell, part, None if guess is None else guess[:, start:stop]))
            if steps:
                before = _last_state(part, blocks[-1].states, before)
                recent = part.recent_scale_after(blocks[-1].states, stop - start)
        return join_blocks(blocks)

    def linearize(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        return self.solver.linearize(cell, system, entering)

    def iterate(self, cell: Cell, system: System, guess: Tensor | None, count: int) -> Tensor:
        length, steps = self.steps_per_block(system.steps), system.steps
        blocks: list[Tensor] = []
        before = system.initial
        for start in range(0, max(1, steps), length):
            stop = min(start + length, steps)
            part = system.part(None, start, before, stop)
            blocks.append(self.solver.iterate(cell, part, None if guess is None else guess[:, start:stop], count))
            if steps:
                before = _last_state(part, blocks[-1], before)
        return torch.cat(blocks, 1)

    def __repr__(self) -> str:
        how = f"num_blocks={self.num_blocks}" if self.block_length is None else f"block_length={self.block_length}"
        return f"BlockWise({self.solver}, {how})"


def _last_state(part: System, states: Tensor, before: Tensor) -> Tensor:
    """Return the state at the end of a block, (batch, n); `before` for sequences that ended in an earlier block."""
    if part.lengths is None:
        return states[:, -1]
    index = (part.lengths.clamp(1, part.steps) - 1)[:, None, None].expand(-1, 1, states.shape[-1])
    return torch.where((part.lengths > 0).unsqueeze(-1), states.gather(1, index).squeeze(1), before)
