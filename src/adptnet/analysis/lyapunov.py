"""Lyapunov exponents, by QR of the running product of Jacobians (Benettin; Engelken), and what is not one.

The paper's listing (algo:stable_lyapunov_comp) is a copy of another algorithm, and its text sums the sorted singular
values of single Jacobians. That is a different quantity with the same sum; here it is `mean_log_singular_values`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cells import ADPTState
from ..errors import InputError
from ..ops.matrix_chain import matrix_chain
from ..solvers import Result, Solver
from ..solvers.parallel import Parallel
from ..solvers.system import System
from .jacobians import chunks, jacobians_at, stretches, visited
from .recompute import recomputed
from .systems import Posed, parameters_of, posed

__all__ = [
    "LyapunovSpectrum",
    "default_transient",
    "lyapunov_exponents",
    "mean_log_singular_values",
]

_MOST_BLOCKS = 32  # of the standard error
_LONGEST_INTERVAL = 64  # steps between two orthonormalisations: beyond, QR is no longer what costs
_MARGIN = 0.8  # of the steps that would just do: rates vary, and going back costs more than a QR too many
_VECTORS = 2**15  # numbers of state that are worked on at a time
_MATRICES = 2**19  # numbers of Jacobians that are made at a time: few enough to be multiplied while in the caches


@dataclasses.dataclass(frozen=True)
class LyapunovSpectrum:
    """Exponents of a trajectory, or of a batch of them, per step and in descending order.

    An exponent is -inf where a direction is lost for good, because Jacobians are singular.
    """

    exponents: Tensor  # (batch, count), or (count,) for one trajectory
    standard_error: Tensor  # likewise, from the spread between blocks of time
    blocks: Tensor  # (batch, blocks, count): the exponents of each block, whose mean `exponents` is
    window: tuple[int, int]  # the steps that count: from the first to before the second
    interval: int  # the most steps between two orthonormalisations
    final: Tensor  # (batch, n): the state after the last step
    state_size: int

    @property
    def largest(self) -> Tensor:
        """The largest exponent: above zero, nearby trajectories part (LLE in the paper)."""
        return self.exponents[..., 0]

    @property
    def dimension(self) -> Tensor:
        """The Kaplan-Yorke dimension: how many exponents, the last one in part, sum to zero."""
        self._whole("dimension")
        sums = self.exponents.cumsum(-1)
        count = (sums >= 0).long().cumprod(-1).sum(-1, keepdim=True)
        full = torch.nn.functional.pad(sums, (1, 0)).gather(-1, count)
        following = self.exponents.gather(-1, count.clamp(max=self.state_size - 1)).abs()
        part = torch.where(count < self.state_size, full / following, 0.0)
        return (count + part).squeeze(-1)

    @property
    def entropy_rate(self) -> Tensor:
        """The sum of the positive exponents: nats a step that the dynamics reveal about their start (Pesin)."""
        return self.exponents.clamp(min=0).sum(-1)

    def _whole(self, what: str) -> None:
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
        return f"exponents {shown}{more} a step over steps {self.window[0]} to {self.window[1]}{others}"


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
    """Lyapunov exponents along a trajectory (eq:lyapunov_exp), by QR.

    A random frame is carried along by the Jacobians and made orthonormal again before it loses digits: the number of
    steps between is chosen from the width of the spectrum as it is measured. Memory is that of a few Jacobians, however
    long the trajectory. Differentiable: the steps are run again when a gradient is asked for.

    Args:
        system: A layer, a cell (of this package or of `torch.nn`), or a plain function of one state (n,): f(state)
            without inputs, f(state, input) with.
        inputs: (batch, time, features) as the layer takes them, or (time, features) for one sequence; None for a system
            that is not driven.
        state: Where trajectories start: (batch, n) or an `ADPTState`, or (n,) for all of them. With one input and
            several states, each state follows that input.
        steps: How many steps; needed without inputs.
        count: How many exponents, the largest ones; all by default.
        transient: Steps at the beginning that align the frame and do not count: 10 and a tenth of the steps by default,
            at most half of them.
        solver: Finds the states all at once, `solvers.ConvDEER()` and its like; step by step if not given. Without
            gradients only.
    """
    trajectory = posed(system, inputs, state, steps)
    size = trajectory.state.shape[-1]
    count = _check_count(count, size)
    transient = check_transient(transient, trajectory.steps)
    blocks = _cut_into_blocks(transient, trajectory.steps)
    frame = random_frame(size, count).to(trajectory.state).expand(len(trajectory.state), size, count)
    tracks = _tracks_gradients(trajectory)
    carry = _Carrier(trajectory, tracks, None if solver is None else _solved(trajectory, solver, tracks))
    entering = trajectory.state
    sums = [trajectory.state.new_zeros(len(trajectory.state), count) for _ in (0, *blocks)]  # the transient, and each
    edges = [transient, *(stop for _, stop in blocks)]
    for start, stop in chunks(0, trajectory.steps, min(1024, max(16, _VECTORS // trajectory.state.numel()))):
        pieces = _pieces(start, stop, edges)
        entering, frame, growth = carry(entering, frame, [(first, last) for _, first, last in pieces])
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
        interval=carry.longest,
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
    """The mean over the steps of ln σ_i(J_t), sorted at each step: the quantity of lemma:le_exact_match.

    It is not the Lyapunov spectrum: singular vectors of successive steps need not line up. The sum is the same over the
    same window, and its first k sum to at least as much as the k largest exponents (Horn). Arguments as for
    `lyapunov_exponents`.

    Returns:
        (batch, n), descending.
    """
    trajectory = posed(system, inputs, state, steps)
    transient = check_transient(transient, trajectory.steps)
    total = trajectory.state.new_zeros(trajectory.state.shape)
    for stretch in stretches(trajectory):
        kept = stretch.jacobians[:, max(0, transient - stretch.start) :]
        total = total + torch.linalg.svdvals(kept).log().sum(1)
    mean = total / (trajectory.steps - transient)
    return mean if trajectory.batched else mean.squeeze(0)


def default_transient(steps: int) -> int:
    """10 and a tenth of the steps, as in Engelken's program, but at most half of them."""
    return min(10 + steps // 10, steps // 2)


def check_transient(transient: int | None, steps: int) -> int:
    """The transient to use, or an error if it leaves nothing to measure."""
    if transient is None:
        transient = default_transient(steps)
    if isinstance(transient, bool) or not isinstance(transient, int) or transient < 0:
        raise InputError(f"transient={transient!r}: must be a number of steps, from 0.")
    if transient >= steps:
        raise InputError(
            f"the trajectory ends after {steps} steps, within the transient of {transient}: nothing is left to "
            f"measure. Pass transient={steps // 2}, or more than {transient} steps."
        )
    return transient


class _Carrier:
    """Carries state and frame over stretches of the trajectory, and remembers how often to orthonormalise."""

    def __init__(self, trajectory: Posed, tracks: bool, states: Tensor | None):
        self.trajectory = trajectory
        self.tracks = tracks
        self.states = states  # (batch, time + 1, n), if they are known
        self.parameters = parameters_of(trajectory.cell)
        self.interval = self.longest = 1

    def __call__(self, state: Tensor, frame: Tensor, pieces: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        """The state and the frame after these successive pieces, and how much each direction grew in each of them."""
        begin, start, stop = self.interval, pieces[0][0], pieces[-1][1]

        def run(state: Tensor, frame: Tensor, drive: Tensor) -> tuple[Tensor, ...]:
            cell = self.trajectory.cell
            if self.states is None:
                states = visited(cell, cell.stepper(), state, drive, start)
            else:
                states = self.states[:, start : stop + 1]
            matrices = _Held(jacobians_at(cell, states, drive, start), stop - start, state.shape[1] * state.numel())
            self.interval, grown = begin, []
            for first, last in pieces:
                frame, growth, self.interval = _carried(matrices, first - start, last - start, frame, self.interval)
                self.longest = max(self.longest, self.interval)
                grown.append(growth)
            return states[:, -1], frame, torch.stack(grown, 1)

        arguments = (state, frame, self.trajectory.drive[:, start:stop])
        if self.tracks:
            return recomputed(run, arguments, self.parameters)
        with torch.no_grad():
            return run(*arguments)


class _Held:
    """Jacobians along a stretch, of which some neighbours are made at once."""

    def __init__(self, make: Callable[[int, int], Tensor], steps: int, numbers: int):
        self.make = make
        self.steps = steps
        self.together = max(1, _MATRICES // max(1, numbers))
        self.start = self.stop = 0
        self.matrices: Tensor

    def carried(self, frame: Tensor, start: int, stop: int) -> Tensor:
        """The frame after the steps from `start` to before `stop`."""
        while start < stop:
            if not self.start <= start < self.stop:
                self.start, self.stop = start, min(start + self.together, self.steps)
                self.matrices = self.make(self.start, self.stop)
            last = min(stop, self.stop)
            frame = matrix_chain(self.matrices[:, start - self.start : last - self.start], frame)
            start = last
        return frame


def _carried(matrices: _Held, start: int, stop: int, frame: Tensor, interval: int) -> tuple[Tensor, Tensor, int]:
    """The frame after these Jacobians, how much each direction grew, and the interval to go on with."""
    growth = frame.new_zeros(frame.shape[0], frame.shape[-1])
    at = start
    while at < stop:
        span = min(interval, stop - at)
        orthonormal, upper = torch.linalg.qr(matrices.carried(frame, at, at + span))
        stretched = _lengths(upper)
        fit = _fitting_interval(stretched, span)
        if span > 1 and fit < span:  # wider than it was so far: the small ones have lost digits, so go back
            interval = max(1, int(fit))
            continue
        frame, growth, at = orthonormal, growth + stretched.log(), at + span
        interval = max(1, min(int(_MARGIN * fit), 2 * interval, _LONGEST_INTERVAL))
    return frame, growth, interval


def _pieces(start: int, stop: int, edges: list[int]) -> list[tuple[int, int, int]]:
    """[start, stop) cut at the edges that end the blocks: which block, from where, to where."""
    pieces = []
    for block, (first, last) in enumerate(itertools.pairwise([0, *edges])):
        if max(start, first) < min(stop, last):
            pieces.append((block, max(start, first), min(stop, last)))
    return pieces


def _lengths(upper: Tensor) -> Tensor:
    """How much longer each direction became; 0 where only rounding is left of it."""
    diagonal = upper.diagonal(dim1=-2, dim2=-1).abs()
    rounding = upper.shape[-1] * torch.finfo(upper.dtype).eps * upper.detach().norm(dim=-2)
    return torch.where(diagonal > rounding, diagonal, 0.0)


def _fitting_interval(stretched: Tensor, span: int) -> float:
    """After how many steps a frame has to be made orthonormal again, judged by how it changed in `span` steps.

    The directions may then differ in length by a factor of eps^(-1/4), and lose a quarter of the digits; and no length
    may come near the end of floating point.
    """
    precision = torch.finfo(stretched.dtype)
    low, high = torch.aminmax(stretched.detach())
    if not 0 < float(low) <= float(high) < math.inf:
        return 0.0
    bottom, top = math.log(float(low)), math.log(float(high))
    width, reach = (top - bottom) / span, max(abs(bottom), abs(top)) / span
    by_digits = -0.25 * math.log(precision.eps) / max(width, 1e-9)
    by_range = 0.25 * math.log(precision.max) / max(reach, 1e-9)
    return min(by_digits, by_range)


def _cut_into_blocks(start: int, stop: int) -> list[tuple[int, int]]:
    """[start, stop) in at most 32 blocks of at least 8 steps, whose spread gives the standard error."""
    count = max(1, min(_MOST_BLOCKS, (stop - start) // 8))
    edges = [start + (stop - start) * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def random_frame(size: int, count: int) -> Tensor:
    """Orthonormal directions (size, count), the same at every call and for every trajectory."""
    drawn = torch.randn(size, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    orthonormal: Tensor = torch.linalg.qr(drawn).Q
    return orthonormal


def _tracks_gradients(trajectory: Posed) -> bool:
    """Whether a gradient can be asked for; tried out, since a function may hold parameters that we cannot see."""
    if not torch.is_grad_enabled():
        return False
    return bool(trajectory.cell.stepper()(trajectory.state, trajectory.drive[:, 0]).requires_grad)


def _solved(trajectory: Posed, solver: Solver, tracks: bool) -> Tensor:
    """The states of a parallel solver, the one that enters the first step in front."""
    if not isinstance(solver, Parallel):
        raise InputError(f"solver={solver!r} does not find all states at once. Pass solvers.ConvDEER(), or drop it.")
    if tracks:
        raise InputError("with a solver there are no gradients. Call it under torch.no_grad(), or drop solver=.")
    with torch.no_grad():
        system = System(trajectory.cell.stepper(), (trajectory.drive,), trajectory.state, trajectory.state)
        search = solver.search(trajectory.cell, system, None)
    worst = Result(int(search.results.max()))
    if worst > Result.FINISHED:
        raise InputError(f"{solver} ended as {worst.name}: these are not the states. Drop on_failure=, or solver=.")
    return torch.cat((trajectory.state.unsqueeze(1), search.states), 1)


def _check_count(count: int | None, size: int) -> int:
    if count is None:
        return size
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= size:
        raise InputError(f"count={count!r}: there are {size} exponents. Pass count from 1 to {size}, or drop it.")
    return count
