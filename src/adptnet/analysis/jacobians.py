"""Jacobians along a trajectory and their products, computed in chunks of time."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTState, Cell
from ..cells.structure import make_jacobian_chunks, make_step
from ..errors import InputError, NonFiniteError
from .trajectory import Trajectory, make_trajectory

__all__ = ["JacobianChunk", "iterate_chunks", "jacobians", "propagators"]

Step = Callable[[Tensor, Tensor], Tensor]

_BUDGET = 2**20  # matrix entries of a chunk; automatic differentiation needs a few times as much memory


class JacobianChunk(NamedTuple):
    """Successive steps of a trajectory with their Jacobians."""

    start: int  # index of the first step
    entering: Tensor  # (batch, time, n): the state before each step
    drive: Tensor  # (batch, time, features)
    jacobians: Tensor  # (batch, time, n, n)


def jacobians(
    system: Any,
    inputs: Tensor | None = None,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
) -> Tensor:
    """Return the Jacobians J_t = dx_t / dx_{t-1} at every step of a trajectory (eq:J).

    They are computed in closed form where the cell has one, by automatic differentiation otherwise. Computation is in
    chunks of time, so that only the result itself is large. `lyapunov_exponents` and `mean_log_singular_values` never
    hold all Jacobians.

    Args:
        system: A layer, a cell, or a function: f(state) without inputs, f(state, input) with.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        state: Initial states; the cell's initial state by default.
        steps: Number of steps, for a system without inputs.

    Returns:
        (batch, time, n, n), or (time, n, n) for one sequence.
    """
    trajectory = make_trajectory(system, inputs, state, steps)
    matrices = torch.cat([chunk.jacobians for chunk in iterate_chunks(trajectory)], 1)
    return matrices if trajectory.batched else matrices.squeeze(0)


def propagators(
    system: Any,
    inputs: Tensor | None = None,
    *,
    span: int,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
) -> Tensor:
    """Return the products of `span` successive Jacobians, J_{t+span-1} … J_t, for every t (eq:long_term_jacobian).

    Args:
        system: A layer, a cell or a function, as for `jacobians`.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        span: Number of factors, from 1 to the number of steps.
        state: Initial states; the cell's initial state by default.
        steps: Number of steps, for a system without inputs.

    Returns:
        (batch, time - span + 1, n, n), or without batch for one sequence.
    """
    matrices = jacobians(system, inputs, state=state, steps=steps)
    if not isinstance(span, int) or not 1 <= span <= matrices.shape[-3]:
        raise InputError(f"span={span!r}: must be from 1 to the {matrices.shape[-3]} steps of the trajectory.")
    return multiply_windows(matrices, span)


def multiply_windows(matrices: Tensor, span: int) -> Tensor:
    """Return the product of every `span` consecutive matrices of (..., time, n, n), later ones on the left.

    The products are computed by repeated squaring.

    Args:
        matrices: (..., time, n, n).
        span: Number of factors, from 1 to the number of matrices.

    Returns:
        (..., time - span + 1, n, n).
    """
    power, width, product, taken = matrices, 1, None, 0
    while True:
        if span & width:  # this power of two is a factor, to the left of those already multiplied
            count = matrices.shape[-3] - taken - width + 1
            later = power[..., taken : taken + count, :, :]
            product = later if product is None else later @ product[..., :count, :, :]
            taken += width
        width *= 2
        if width > span:
            assert product is not None
            return product
        half = width // 2
        power = power[..., half:, :, :] @ power[..., : power.shape[-3] - half, :, :]


def _chunk_length(batch: int, size: int) -> int:
    """Return the number of steps per chunk: as many as fit into `_BUDGET` matrix entries, at least 16, at most 256."""
    return min(256, max(16, _BUDGET // max(1, batch * size**2)))


def iterate_chunks(trajectory: Trajectory) -> Iterator[JacobianChunk]:
    """Run the trajectory and yield it in chunks, with the Jacobians of each.

    Args:
        trajectory: The trajectory to run.

    Raises:
        NonFiniteError: A state or a Jacobian is not finite; the message names the first step.
    """
    step = make_step(trajectory.cell)
    state = trajectory.state
    length = _chunk_length(len(state), state.shape[-1])
    for start, stop in split_range(0, trajectory.steps, length):
        chunk, state = _run_chunk(trajectory.cell, step, state, trajectory.drive[:, start:stop], start)
        yield chunk


def split_range(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """Split [start, stop) into intervals of at most `length`.

    Args:
        start: The first index.
        stop: One past the last index.
        length: The largest length of an interval.

    Returns:
        (start, stop) of each interval, in order.
    """
    return [(at, min(at + length, stop)) for at in range(start, stop, length)]


def _run_chunk(cell: Cell, step: Step, state: Tensor, drive: Tensor, start: int) -> tuple[JacobianChunk, Tensor]:
    """Run the steps of `drive`, which begin at step `start`; return their chunk and the state after the last one."""
    states = run_states(cell, step, state, drive, start)
    matrices = make_jacobian_function(cell, states, drive, start)(0, drive.shape[1])
    return JacobianChunk(start, states[:, :-1], drive, matrices), states[:, -1]


def run_states(cell: Cell, step: Step, state: Tensor, drive: Tensor, start: int) -> Tensor:
    """Run the steps of `drive` and return their states, the initial state first: (batch, time + 1, n).

    Args:
        cell: The cell.
        step: The step function of `cell`.
        state: The initial states, (batch, n).
        drive: (batch, time, features).
        start: Index of the first step, for the error message.

    Raises:
        NonFiniteError: A state is not finite; the message names the step.
    """
    scan = None if torch.is_grad_enabled() else cell.structure().scan
    states = None if scan is None else scan(drive, state)
    if states is None:
        by_step = [state]
        for row in drive.unbind(1):
            by_step.append(step(by_step[-1], row))
        states = torch.stack(by_step[1:], 1)
    _check(
        states, start, "the state is not finite after", "The trajectory diverges: check the step, or start elsewhere."
    )
    return torch.cat((state.unsqueeze(1), states), 1)


def make_jacobian_function(cell: Cell, states: Tensor, drive: Tensor, start: int) -> Callable[[int, int], Tensor]:
    """Return a function of (first, last) that computes the Jacobians of these steps along known states.

    Args:
        cell: The cell.
        states: (batch, time + 1, n), the initial state first.
        drive: (batch, time, features).
        start: Index of the first step, for messages.
    """
    with torch.set_grad_enabled(states.requires_grad):  # no autograd graph unless one is needed
        of_steps = make_jacobian_chunks(cell, states[:, :-1], drive)

    def matrices(first: int, last: int) -> Tensor:
        with torch.set_grad_enabled(states.requires_grad):
            values = of_steps(first, last)
        advice = "The step is not differentiable at that state."
        _check(values, start + first, "the Jacobian is not finite at", advice)
        return values

    return matrices


def _check(values: Tensor, start: int, what: str, advice: str) -> None:
    if bool(values.detach().sum().isfinite()):  # one pass; if the sum overflows, the entries are checked below
        return
    finite = values.detach().isfinite().flatten(2).all(-1)
    if not bool(finite.all()):
        step = int((~finite).any(0).nonzero()[0, 0])
        sequence = int((~finite[:, step]).nonzero()[0, 0])
        raise NonFiniteError(f"{what} step {start + step} of sequence {sequence} (both counted from 0). {advice}")
