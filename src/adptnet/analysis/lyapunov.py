"""Lyapunov exponents by QR of the running product of Jacobians (Benettin; Engelken), and mean log singular values.

The paper's listing (algo:stable_lyapunov_comp) is a copy of another algorithm. Its text averages ln σ_i(J_t), of the
sorted singular values of the individual Jacobians, over time. That is a different quantity, here
`mean_log_singular_values`; only its sum over i equals that of the exponents.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cells import ADPTState
from ..cells.structure import make_step
from ..errors import InputError
from ..ops.matrix_chain import matrix_chain
from ..solvers import Result, Solver
from ..solvers.parallel import Parallel
from ..solvers.system import System
from .jacobians import iterate_chunks, make_jacobian_function, run_states, split_range
from .recompute import run_recomputed
from .trajectory import Trajectory, list_parameters, make_trajectory

__all__ = [
    "LyapunovSpectrum",
    "default_transient",
    "lyapunov_exponents",
    "mean_log_singular_values",
]

_MAX_BLOCKS = 32  # of time, for the standard error
_MAX_INTERVAL = 64  # steps between two orthonormalizations: beyond it QR no longer dominates the cost
_MARGIN = 0.8  # fraction of the longest safe interval: growth rates vary, and redoing steps costs more than one more QR
_STATE_ENTRIES = 2**15  # processed at a time
_JACOBIAN_ENTRIES = 2**19  # computed at a time: few enough to stay in cache until they are multiplied


@dataclasses.dataclass(frozen=True)
class LyapunovSpectrum:
    """Lyapunov exponents of a trajectory, or of a batch of trajectories, per step and in descending order.

    An exponent is -inf where singular Jacobians annihilate a direction.
    """

    exponents: Tensor  # (batch, count), or (count,) for one trajectory
    standard_error: Tensor  # same shape, estimated from the spread between blocks of time
    # (batch, blocks, count), or (blocks, count) for one trajectory: the exponents of each block; `exponents` is their
    # mean weighted by length
    blocks: Tensor
    window: tuple[int, int]  # the steps that are averaged: [first, last)
    interval: int  # largest interval chosen between two orthonormalizations, in steps
    final: Tensor  # (batch, n), or (n,): the state after the last step
    state_size: int

    @property
    def largest(self) -> Tensor:
        """Largest exponent (LLE in the paper). Above zero, nearby trajectories diverge."""
        return self.exponents[..., 0]

    @property
    def dimension(self) -> Tensor:
        """Kaplan-Yorke dimension.

        It is the number of leading exponents whose sum is zero, the last one counted fractionally.
        """
        self._require_all("dimension")
        sums = self.exponents.cumsum(-1)
        count = (sums >= 0).long().cumprod(-1).sum(-1, keepdim=True)
        full = torch.nn.functional.pad(sums, (1, 0)).gather(-1, count)
        following = self.exponents.gather(-1, count.clamp(max=self.state_size - 1)).abs()
        part = torch.where(count < self.state_size, full / following, 0.0)
        return (count + part).squeeze(-1)

    @property
    def entropy_rate(self) -> Tensor:
        """Kolmogorov-Sinai (metric) entropy rate in nats per step: the sum of positive exponents (Pesin's formula)."""
        if bool((self.exponents[..., -1] > 0).any()):  # then exponents omitted by `count` may be positive too
            self._require_all("entropy_rate")
        return self.exponents.clamp(min=0).sum(-1)

    def _require_all(self, what: str) -> None:
        if self.exponents.shape[-1] < self.state_size:
            raise InputError(
                f"{what} needs all {self.state_size} exponents; there are {self.exponents.shape[-1]}. Drop count=."
            )

    def __str__(self) -> str:
        first = self.exponents.detach().reshape(-1, self.exponents.shape[-1])
        error = self.standard_error.detach().reshape(first.shape)
        shown = ", ".join(
            f"{a:.4g} ± {e:.1g}" for a, e in zip(first[0, :4].tolist(), error[0, :4].tolist(), strict=True)
        )
        more = f", … {first[0, -1]:.4g}" if first.shape[-1] > 4 else ""
        others = f" (the first of {len(first)} trajectories)" if len(first) > 1 else ""
        return f"exponents {shown}{more} per step over steps {self.window[0]} to {self.window[1]}{others}"


def lyapunov_exponents(
    system: Any,
    inputs: Tensor | None = None,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
    count: int | None = None,
    transient: int | None = None,
    solver: Solver | None = None,
) -> LyapunovSpectrum:
    """Compute the Lyapunov exponents along a trajectory (eq:lyapunov_exp) by QR.

    The Jacobians propagate a random orthonormal frame, which is orthonormalized again by QR before its columns become
    numerically dependent. The number of steps in between adapts to the measured width of the spectrum. Memory is that
    of a few Jacobians for any length; with `solver`, also that of all states. The result is differentiable: the
    backward pass runs the steps again.

    Args:
        system: A layer, a cell (of this package or of `torch.nn`), or a plain function of one state (n,): f(state)
            without inputs, f(state, input) with.
        inputs: (batch, time, features) as the layer takes them, or (time, features) for one sequence; None for an
            autonomous system.
        state: Initial states: (batch, n) or an `ADPTState`, or (n,) for all trajectories. With one input sequence and
            several states, every trajectory has that input.
        steps: Number of steps; required without inputs.
        count: Number of exponents, the largest ones; all by default.
        transient: Number of initial steps to discard, in which the frame aligns. By default 10 plus a tenth of the
            steps, at most half of them.
        solver: A parallel-in-time solver for the states, such as `solvers.ConvDEER()`; sequential by default. It
            cannot be combined with gradients.

    Raises:
        InputError: Arguments that do not fit together.
        NonFiniteError: Inputs, a state or a Jacobian are not finite.
    """
    trajectory = make_trajectory(system, inputs, state, steps)
    size = trajectory.state.shape[-1]
    count = _check_count(count, size)
    transient = check_transient(transient, trajectory.steps)
    blocks = _cut_into_blocks(transient, trajectory.steps)
    frame = random_frame(size, count).to(trajectory.state).expand(len(trajectory.state), size, count)
    needs_grad = _needs_grad(trajectory)
    states = None if solver is None else _solve_states(trajectory, solver, needs_grad)
    propagate = _FramePropagator(trajectory, needs_grad, states)
    entering = trajectory.state
    sums = [trajectory.state.new_zeros(len(trajectory.state), count) for _ in (0, *blocks)]  # transient, blocks
    edges = [transient, *(stop for _, stop in blocks)]
    for start, stop in split_range(0, trajectory.steps, min(1024, max(16, _STATE_ENTRIES // trajectory.state.numel()))):
        pieces = _split_at_edges(start, stop, edges)
        entering, frame, growth = propagate(entering, frame, [(first, last) for _, first, last in pieces])
        for (block, _, _), grown in zip(pieces, growth.unbind(1), strict=True):
            sums[block] = sums[block] + grown
    rates = torch.stack([s / (stop - start) for s, (start, stop) in zip(sums[1:], blocks, strict=True)], 1)
    counted = trajectory.steps - transient
    exponents, order = (torch.stack(sums[1:], 1).sum(1) / counted).sort(-1, descending=True)
    rates = rates.gather(-1, order.unsqueeze(1).expand_as(rates))
    error = rates.detach().std(1) / math.sqrt(len(blocks)) if len(blocks) > 1 else torch.full_like(exponents, math.nan)
    return LyapunovSpectrum(
        exponents=exponents if trajectory.batched else exponents.squeeze(0),
        standard_error=error if trajectory.batched else error.squeeze(0),
        blocks=rates if trajectory.batched else rates.squeeze(0),
        window=(transient, trajectory.steps),
        interval=propagate.longest,
        final=entering if trajectory.batched else entering.squeeze(0),
        state_size=size,
    )


def mean_log_singular_values(
    system: Any,
    inputs: Tensor | None = None,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
    transient: int | None = None,
) -> Tensor:
    """Return the mean over the steps of ln σ_i(J_t), sorted at each step: the quantity of lemma:le_exact_match.

    It is not the Lyapunov spectrum, because singular vectors of successive steps need not align. Over the same window
    the sum over i is the same, and the sum of the first k is at least that of the k largest exponents (Horn).

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features) for one sequence; None for an autonomous system.
        state: Initial states.
        steps: Number of steps, for a system without inputs.
        transient: Number of initial steps to discard; by default that of `lyapunov_exponents`.

    Returns:
        (batch, n), descending; (n,) for one sequence.
    """
    trajectory = make_trajectory(system, inputs, state, steps)
    transient = check_transient(transient, trajectory.steps)
    total = trajectory.state.new_zeros(trajectory.state.shape)
    for chunk in iterate_chunks(trajectory):
        kept = chunk.jacobians[:, max(0, transient - chunk.start) :]
        total = total + torch.linalg.svdvals(kept).log().sum(1)
    mean = total / (trajectory.steps - transient)
    return mean if trajectory.batched else mean.squeeze(0)


def default_transient(steps: int) -> int:
    """Return 10 plus a tenth of the steps, as in Engelken's code, but at most half of them.

    Args:
        steps: Number of steps of the trajectory.
    """
    return min(10 + steps // 10, steps // 2)


def check_transient(transient: int | None, steps: int) -> int:
    """Return the transient to use, the default for None; raise `InputError` if it leaves nothing to measure.

    Args:
        transient: Number of initial steps to leave out; None for the default.
        steps: Number of steps of the trajectory.
    """
    if transient is None:
        transient = default_transient(steps)
    if isinstance(transient, bool) or not isinstance(transient, int) or transient < 0:
        raise InputError(f"transient={transient!r}: must be a number of steps, an integer >= 0.")
    if transient >= steps:
        raise InputError(
            f"the trajectory ends after {steps} steps, within the transient of {transient}: nothing is left to "
            f"measure. Pass transient={steps // 2}, or more than {transient} steps."
        )
    return transient


class _FramePropagator:
    """Propagates state and frame along the trajectory and adapts the interval between orthonormalizations."""

    def __init__(self, trajectory: Trajectory, needs_grad: bool, states: Tensor | None):
        self.trajectory = trajectory
        self.needs_grad = needs_grad
        self.states = states  # (batch, time + 1, n), or None to run the cell
        self.parameters = list_parameters(trajectory.cell)
        self.interval = self.longest = 1

    def __call__(self, state: Tensor, frame: Tensor, pieces: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Return the state and the frame after these pieces, and the log growth of each direction in each piece.

        `pieces` are consecutive intervals of steps [first, last), none of which crosses the end of a block.
        """
        initial_interval, start, stop = self.interval, pieces[0][0], pieces[-1][1]

        def run(state: Tensor, frame: Tensor, drive: Tensor) -> tuple[Tensor, ...]:
            cell = self.trajectory.cell
            if self.states is None:
                states = run_states(cell, make_step(cell), state, drive, start)
            else:
                states = self.states[:, start : stop + 1]
            matrices = _LazyJacobians(
                make_jacobian_function(cell, states, drive, start), stop - start, state.shape[1] * state.numel()
            )
            self.interval, grown = initial_interval, []  # the backward pass runs it again, with the same intervals
            for first, last in pieces:
                frame, growth, self.interval = _propagate_frame(
                    matrices, first - start, last - start, frame, self.interval
                )
                self.longest = max(self.longest, self.interval)
                grown.append(growth)
            return states[:, -1], frame, torch.stack(grown, 1)

        arguments = (state, frame, self.trajectory.drive[:, start:stop])
        if self.needs_grad:
            return run_recomputed(run, arguments, self.parameters)
        with torch.no_grad():
            return run(*arguments)


class _LazyJacobians:
    """Jacobians along a chunk, computed for several neighbouring steps at a time."""

    def __init__(self, make: Callable[[int, int], Tensor], steps: int, entries_per_step: int):
        self.make = make
        self.steps = steps
        self.steps_at_once = max(1, _JACOBIAN_ENTRIES // max(1, entries_per_step))
        self.start = self.stop = 0
        self.matrices: Tensor

    def apply(self, frame: Tensor, start: int, stop: int) -> Tensor:
        """Return the frame after the steps [start, stop)."""
        while start < stop:
            if not self.start <= start < self.stop:
                self.start, self.stop = start, min(start + self.steps_at_once, self.steps)
                self.matrices = self.make(self.start, self.stop)
            last = min(stop, self.stop)
            frame = matrix_chain(self.matrices[:, start - self.start : last - self.start], frame)
            start = last
        return frame


def _propagate_frame(
    matrices: _LazyJacobians, start: int, stop: int, frame: Tensor, interval: int
) -> tuple[Tensor, Tensor, int]:
    """Return the frame after the steps [start, stop), the log growth of each direction, and the next interval."""
    growth = frame.new_zeros(frame.shape[0], frame.shape[-1])
    at = start
    while at < stop:
        span = min(interval, stop - at)
        orthonormal, upper = torch.linalg.qr(matrices.apply(frame, at, at + span))
        factors = _growth_factors(upper)
        safe = _longest_safe_interval(factors, span)
        if span > 1 and safe < span:  # the spectrum became wider and small directions lost digits: redo these steps
            interval = max(1, int(safe))
            continue
        frame, growth, at = orthonormal, growth + factors.log(), at + span
        interval = max(1, min(int(_MARGIN * safe), 2 * interval, _MAX_INTERVAL))
    return frame, growth, interval


def _split_at_edges(start: int, stop: int, edges: list[int]) -> list[tuple[int, int, int]]:
    """Split [start, stop) at the ends of the blocks; return (block, start, stop) of each piece.

    Block 0 is the transient.
    """
    pieces = []
    for block, (first, last) in enumerate(itertools.pairwise([0, *edges])):
        if max(start, first) < min(stop, last):
            pieces.append((block, max(start, first), min(stop, last)))
    return pieces


def _growth_factors(upper: Tensor) -> Tensor:
    """Return |R_ii|, the growth factor of each direction; 0 where it is below rounding error."""
    diagonal = upper.diagonal(dim1=-2, dim2=-1).abs()
    rounding = upper.shape[-1] * torch.finfo(upper.dtype).eps * upper.detach().norm(dim=-2)
    return torch.where(diagonal > rounding, diagonal, 0.0)


def _longest_safe_interval(factors: Tensor, span: int) -> float:
    """Estimate after how many steps the frame must be orthonormalized, from its growth factors over `span` steps.

    Within that interval the lengths of the directions differ by a factor of at most eps^(-1/4), so that they lose at
    most a quarter of the digits, and no length comes near overflow or underflow.
    """
    precision = torch.finfo(factors.dtype)
    low, high = torch.aminmax(factors.detach())
    if not 0 < float(low) <= float(high) < math.inf:
        return 0.0
    bottom, top = math.log(float(low)), math.log(float(high))
    width, reach = (top - bottom) / span, max(abs(bottom), abs(top)) / span
    by_digits = -0.25 * math.log(precision.eps) / max(width, 1e-9)
    by_range = 0.25 * math.log(precision.max) / max(reach, 1e-9)
    return min(by_digits, by_range)


def _cut_into_blocks(start: int, stop: int) -> list[tuple[int, int]]:
    """Split [start, stop) into at most 32 blocks of at least 8 steps; their spread gives the standard error."""
    count = max(1, min(_MAX_BLOCKS, (stop - start) // 8))
    edges = [start + (stop - start) * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def random_frame(size: int, count: int) -> Tensor:
    """Return orthonormal directions (size, count), the same at every call and for every trajectory.

    Args:
        size: State dimension.
        count: Number of directions.
    """
    drawn = torch.randn(size, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    orthonormal: Tensor = torch.linalg.qr(drawn).Q
    return orthonormal


def _needs_grad(trajectory: Trajectory) -> bool:
    """Return whether the states require a gradient.

    One step is run to find out, because a plain function may hold parameters that cannot be listed.
    """
    if not torch.is_grad_enabled():
        return False
    return bool(make_step(trajectory.cell)(trajectory.state, trajectory.drive[:, 0]).requires_grad)


def _solve_states(trajectory: Trajectory, solver: Solver, needs_grad: bool) -> Tensor:
    """Return the states found by a parallel solver, the initial state first."""
    if not isinstance(solver, Parallel):
        raise InputError(f"solver={solver!r} is not parallel in time. Pass solvers.ConvDEER(), or drop it.")
    if needs_grad:
        raise InputError("gradients are not supported with solver=. Call it under torch.no_grad(), or drop solver=.")
    with torch.no_grad():
        system = System(make_step(trajectory.cell), (trajectory.drive,), trajectory.state, trajectory.state)
        search = solver.solve_system(trajectory.cell, system, None)
    worst = Result(int(search.results.max()))
    if worst > Result.FINISHED:
        raise InputError(
            f"{solver} ended with {worst.name} and did not find the states. Pass a solver with the default "
            "on_failure=solvers.Finish(), or drop solver=."
        )
    return torch.cat((trajectory.state.unsqueeze(1), search.states), 1)


def _check_count(count: int | None, size: int) -> int:
    if count is None:
        return size
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= size:
        raise InputError(f"count={count!r}: there are {size} exponents. Pass count from 1 to {size}, or drop it.")
    return count
