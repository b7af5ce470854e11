"""Block-wise solving (alg:block_wise_deer): a stretch of time after another, each parallel in itself."""

import dataclasses

import torch
from torch import Tensor

from ..cells.base import Cell
from ..errors import InputError
from ..ops.tolerance import Tolerance
from .parallel import Parallel, Search, joined
from .policies import Policy
from .system import System
from .transitions import Transition

__all__ = ["BlockWise"]


class BlockWise(Parallel):
    """Solves one block of steps after another; the last state of a block enters the next.

    A block is short, so it takes fewer iterations, and memory is that of a block. What did not converge is dealt with
    in each block by the policy of `solver`, before the next begins. `iterations` is the most any block took.

    Args:
        solver: What solves a block.
        num_blocks: How many blocks of equal length (the last may be shorter).
        block_length: Or how many steps a block has.
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
                raise InputError(f"BlockWise({name}={value!r}): must be a whole number from 1.")
        self.solver = solver
        self.num_blocks = num_blocks
        self.block_length = block_length

    def length(self, steps: int) -> int:
        """Steps of a block."""
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
    def fixed(self) -> int | None:
        return self.solver.fixed

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        return self.solver.tolerance(dtype)

    def search(self, cell: Cell, system: System, guess: Tensor | None) -> Search:
        length, steps = self.length(system.steps), system.steps
        searches: list[Search] = []
        before, recent = system.initial, system.recent
        for start in range(0, max(1, steps), length):
            stop = min(start + length, steps)
            part = dataclasses.replace(system.part(None, start, before, stop), whole=steps, recent=recent)
            searches.append(self.solver.search(cell, part, None if guess is None else guess[:, start:stop]))
            if steps:
                before = _last(part, searches[-1].states, before)
                recent = part.recent_after(searches[-1].states, stop - start)
        return joined(searches)

    def linearise(self, cell: Cell, system: System, entering: Tensor) -> Transition:
        return self.solver.linearise(cell, system, entering)

    def iterate(self, cell: Cell, system: System, guess: Tensor | None, count: int) -> Tensor:
        length, steps = self.length(system.steps), system.steps
        blocks: list[Tensor] = []
        before = system.initial
        for start in range(0, max(1, steps), length):
            stop = min(start + length, steps)
            part = system.part(None, start, before, stop)
            blocks.append(self.solver.iterate(cell, part, None if guess is None else guess[:, start:stop], count))
            if steps:
                before = _last(part, blocks[-1], before)
        return torch.cat(blocks, 1)

    def block(self, steps: int) -> int | None:
        return self.length(steps)

    def __repr__(self) -> str:
        how = f"num_blocks={self.num_blocks}" if self.block_length is None else f"block_length={self.block_length}"
        return f"BlockWise({self.solver}, {how})"


def _last(part: System, states: Tensor, before: Tensor) -> Tensor:
    """The state at the end of a block; of a sequence that had ended, the one it ended with."""
    if part.lengths is None:
        return states[:, -1]
    index = (part.lengths.clamp(1, part.steps) - 1)[:, None, None].expand(-1, 1, states.shape[-1])
    return torch.where((part.lengths > 0).unsqueeze(-1), states.gather(1, index).squeeze(1), before)
