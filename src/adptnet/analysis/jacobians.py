"""Jacobians along a trajectory, and their products."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTState, Cell
from ..errors import InputError, NonFiniteError
from .systems import Posed, posed

__all__ = ["Stretch", "chunk_length", "jacobians", "propagators", "stretches"]

Step = Callable[[Tensor, Tensor], Tensor]

_BUDGET = 2**20  # numbers of Jacobians in memory at a time; automatic differentiation needs a few times as much


class Stretch(NamedTuple):
    """Some successive steps of a trajectory."""

    start: int
    entering: Tensor  # (batch, time, n): the state that enters each step
    drive: Tensor  # (batch, time, features)
    jacobians: Tensor  # (batch, time, n, n)


def jacobians(
    system: Any,
    inputs: Tensor | None = None,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
) -> Tensor:
    """J_t = dx_t / dx_{t-1} at every step of a trajectory (eq:J), (batch, time, n, n).

    In closed form where the cell has one, by automatic differentiation otherwise; computed in chunks, so that only the
    result itself is large. Exponents and singular values have functions of their own that never hold all of it.

    Args:
        system: A layer, a cell, or a function: f(state) without inputs, f(state, input) with.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        state: Where trajectories start; the cell's initial state if not given.
        steps: How many steps, for a system without inputs.
    """
    trajectory = posed(system, inputs, state, steps)
    whole = torch.cat([stretch.jacobians for stretch in stretches(trajectory)], 1)
    return whole if trajectory.batched else whole.squeeze(0)


def propagators(
    system: Any,
    inputs: Tensor | None = None,
    *,
    span: int,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
) -> Tensor:
    """Products of `span` successive Jacobians, J_{t+span-1} … J_t, for every t where they fit (eq:long_term_jacobian).

    Returns:
        (batch, time - span + 1, n, n).
    """
    matrices = jacobians(system, inputs, state=state, steps=steps)
    if not isinstance(span, int) or not 1 <= span <= matrices.shape[-3]:
        raise InputError(f"span={span!r}: must be from 1 to the {matrices.shape[-3]} steps of the trajectory.")
    return windowed_products(matrices, span)


def windowed_products(matrices: Tensor, span: int) -> Tensor:
    """Products of every `span` neighbours of (..., time, n, n), later ones to the left, by doubling."""
    power, width, product, taken = matrices, 1, None, 0
    while True:
        if span & width:  # this power of two takes part; it comes after what is taken already
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


def chunk_length(batch: int, size: int) -> int:
    """How many steps' Jacobians are held at a time: what matters is memory for large states, overhead for small."""
    return min(256, max(16, _BUDGET // max(1, batch * size**2)))


def stretches(trajectory: Posed, limits: list[tuple[int, int]] | None = None) -> Iterator[Stretch]:
    """The trajectory in chunks, with the Jacobians of each. Raises at the first step that is not finite.

    Args:
        trajectory: What to follow.
        limits: Where chunks begin and end, in order and without gaps; chosen by memory if not given.
    """
    step = trajectory.cell.stepper()
    state = trajectory.state
    if limits is None:
        limits = chunks(0, trajectory.steps, chunk_length(len(state), state.shape[-1]))
    for start, stop in limits:
        stretch, state = advance(trajectory.cell, step, state, trajectory.drive[:, start:stop], start)
        yield stretch


def chunks(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """[start, stop) cut into pieces of at most `length`."""
    return [(at, min(at + length, stop)) for at in range(start, stop, length)]


def advance(cell: Cell, step: Step, state: Tensor, drive: Tensor, start: int) -> tuple[Stretch, Tensor]:
    """The steps of `drive` from `state`, the first one being `start`: their stretch, and the state after the last."""
    states = visited(cell, step, state, drive, start)
    matrices = jacobians_at(cell, states, drive, start)(0, drive.shape[1])
    return Stretch(start, states[:, :-1], drive, matrices), states[:, -1]


def visited(cell: Cell, step: Step, state: Tensor, drive: Tensor, start: int) -> Tensor:
    """The states of the steps of `drive`, with the one that enters the first: (batch, time + 1, n)."""
    states = None if torch.is_grad_enabled() else cell.scan(drive, state)
    if states is None:
        each = [state]
        for row in drive.unbind(1):
            each.append(step(each[-1], row))
        states = torch.stack(each[1:], 1)
    _check(states, start, "the state is not finite after", "It escapes: check the step, or start elsewhere.")
    return torch.cat((state.unsqueeze(1), states), 1)


def jacobians_at(cell: Cell, states: Tensor, drive: Tensor, start: int) -> Callable[[int, int], Tensor]:
    """The Jacobians along known states, (batch, time + 1, n), of the steps from one to before another."""
    with torch.set_grad_enabled(states.requires_grad):  # no graph where nothing asked for one
        of_steps = cell.jacobians(states[:, :-1], drive)

    def matrices(first: int, last: int) -> Tensor:
        with torch.set_grad_enabled(states.requires_grad):
            found = of_steps(first, last)
        advice = "The step has no derivative at the state it meets there."
        _check(found, start + first, "the Jacobian is not finite at", advice)
        return found

    return matrices


def _check(values: Tensor, start: int, what: str, advice: str) -> None:
    if bool(values.detach().sum().isfinite()):  # one pass; an overflow of the sum is looked into below
        return
    finite = values.detach().isfinite().flatten(2).all(-1)
    if not bool(finite.all()):
        step = int((~finite).any(0).nonzero()[0, 0])
        sequence = int((~finite[:, step]).nonzero()[0, 0])
        raise NonFiniteError(f"{what} step {start + step} of sequence {sequence} (both counted from 0). {advice}")
