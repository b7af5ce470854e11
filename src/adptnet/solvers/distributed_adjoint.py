"""Gradient of a solve over ranks: the backward pass of `adjoints.Implicit`, entered by all ranks together."""

from typing import Any

import torch
from torch import Tensor

from ..errors import DistributedError, IncompatibleError
from .adjoints import evaluate_steps
from .gradient_solve import Backward
from .parallel import full_precision
from .ranks import Ranks
from .system import System

__all__ = ["attach"]


def attach(
    backward: Backward, ranks: Ranks, system: System, states: Tensor, final: Tensor, token: int
) -> tuple[Tensor, Tensor]:
    """Return `states` and `final` with their gradient.

    Args:
        backward: The backward pass of this rank.
        ranks: The processes.
        system: The equations of this rank, in tensors that may carry a graph.
        states: (batch, time, n), the solution on this rank, without a graph.
        final: (batch, n), the last state of the last rank.
        token: A number that identifies this solve, the same on all ranks.
    """
    # Every rank must take part in backward, even if nothing on it requires a gradient.
    participate = torch.zeros((), requires_grad=True)
    attached: tuple[Tensor, Tensor] = _Attach.apply(  # type: ignore[no-untyped-call]
        states, final, participate, (backward, ranks, token), *evaluate_steps(system, states)
    )
    return attached


class _Attach(torch.autograd.Function):
    """The identity on `states` and `final`. Backward passes g on to f at the states, the last inputs."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, final: Tensor, participate: Tensor, solve: tuple[Any, ...], *values: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.solve = solve
        ctx.lengths = [part.shape[1] for part in values]
        ctx.save_for_backward(states)
        return states.view_as(states), final.view_as(final)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise IncompatibleError(
                "TimeParallel does not support double backward. Drop create_graph=True, or solve on one rank."
            )
        (states,) = ctx.saved_tensors
        backward, ranks, token = ctx.solve
        if any(int(other) != token for other in ranks.all_gather(torch.tensor(token, device=states.device))):
            raise DistributedError(
                "the ranks call backward through different solves. Call backward on every rank once per loss, through "
                "the same solve; on a rank without a loss: (0 * solution.states).sum().backward()."
            )
        gradient, final_gradient = gradients
        total = ranks.all_sum(final_gradient)  # each rank may have a loss of the final state
        if ranks.rank == ranks.size - 1:
            gradient = gradient.clone()
            gradient[:, -1] += total
        with full_precision():
            g = backward.solve(gradient, states)
        return None, None, None, None, *g.split(ctx.lengths, 1)
