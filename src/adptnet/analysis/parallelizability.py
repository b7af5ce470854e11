"""A report on how well a recurrence runs in parallel over time: exponents, contraction, solver iterations, advice."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..cells import ADPTState
from ..errors import IncompatibleError, InputError
from ..solvers import (
    DEER,
    ConvDEER,
    ForwardDEER,
    Jacobi,
    KoopmanDEER,
    Newton,
    Picard,
    QuasiDEER,
    Result,
    Return,
    Solver,
)
from ..solvers.damping import Undamped
from ..solvers.linearizations import (
    ConjugateDiagonal,
    FullJacobian,
    JacobianDiagonal,
    MeanConjugate,
    MeanJacobian,
    MeanRotation,
    ZeroMatrix,
)
from ..solvers.parallel import Parallel
from .certificate import Certificate, certificate
from .cost import Cost, cost
from .lyapunov import LyapunovSpectrum, lyapunov_exponents
from .prediction import make_system, predict_iterations
from .trajectory import MapCell, Trajectory, describe, make_trajectory

__all__ = ["Parallelizability", "SolverReport", "parallelizability"]

_DENSE_LIMIT = 2**26  # Jacobian entries that DEER may hold in memory
_WORTHWHILE = 2.0  # smallest speed-up for which a parallel solver is recommended


@dataclasses.dataclass(frozen=True)
class SolverReport:
    """Iterations and cost of one solver on the given inputs."""

    name: str
    iterations: Tensor  # (batch,)
    predicted: Tensor | None  # (batch,), by linear theory; None where it does not apply
    result: Result  # the worst of the batch
    work: float  # multiply-accumulates, relative to the sequential run
    depth: float  # sequential depth in steps: iterations · (1 + log2 T); iterations for Jacobi, which has no scan
    steps: int  # T, the length of the sequences

    @property
    def converged(self) -> bool:
        """Whether every sequence converged."""
        return self.result is Result.CONVERGED

    def gain(self, processors: float = math.inf) -> float:
        """Return a rough upper bound on the speed-up over a sequential run.

        Args:
            processors: How many times the work of a single step the hardware does in parallel.
        """
        return min(self.steps / self.depth, processors / self.work)


@dataclasses.dataclass(frozen=True)
class Parallelizability:
    """The report of `parallelizability`."""

    what: str
    steps: int
    spectrum: LyapunovSpectrum
    certified: Certificate | None  # bounds for every input; None for a plain function
    measured: Certificate  # bounds along these inputs
    solvers: tuple[SolverReport, ...]
    rejected: Mapping[str, str]  # solvers that do not apply to this cell, with the reason
    best: SolverReport | None  # the converged solver with the largest speed-up
    recommendation: str

    def __str__(self) -> str:
        largest = self.spectrum.largest.detach().reshape(-1)
        lipschitz = math.inf if self.certified is None else self.certified.lipschitz
        lines = [
            f"{self.what}, {len(largest)} sequence(s) of {self.steps} steps",
            f"largest Lyapunov exponent {float(largest.max()):.4g} per step"
            + (" (chaotic)" if _is_chaotic(self.spectrum) else ""),
            f"the norm of a step is at most {self.measured.lipschitz:.4g} here, "
            + (f"{lipschitz:.4g} for any input" if lipschitz < math.inf else "with no bound known for other inputs"),
            f"{'solver':<14}{'iterations':>12}{'predicted':>11}{'work':>9}{'gain ≤':>9}",
        ]
        for report in self.solvers:
            count = (
                f"{float(report.iterations.double().mean()):.1f}" if report.converged else report.result.name.lower()
            )
            predicted = "–" if report.predicted is None else f"{float(report.predicted.double().mean()):.1f}"
            gain = f"{report.gain():.1f}×" if report.converged else "–"
            work = "–" if math.isnan(report.work) else f"{report.work:.1f}×"
            lines.append(f"{report.name:<14}{count:>12}{predicted:>11}{work:>9}{gain:>9}")
        lines += [f"{name:<14} does not apply: {why}" for name, why in self.rejected.items()]
        return "\n".join([*lines, self.recommendation])


@torch.no_grad()
def parallelizability(
    system: Any,
    inputs: Tensor | None = None,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
    solvers: Mapping[str, Solver] | None = None,
    processors: float = math.inf,
) -> Parallelizability:
    """Report whether a recurrence can run in parallel over time, and with which solver.

    The largest exponent decides whether it can work at all: below zero, errors of a guess decay; above zero, the number
    of iterations approaches the length. Each solver is then run. The reported gain is an upper bound from the number
    of operations that must run sequentially; the hardware's parallelism limits it further, see `SolverReport.gain`.

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features).
        state: Initial states.
        steps: Number of steps, for a system without inputs.
        solvers: The solvers to try, by name; by default every undamped solver of the DEER family that fits the cell.
        processors: How many times the work of a single step the hardware does in parallel, for the recommendation.
    """
    if not processors > 0:
        raise InputError(f"processors={processors}: must be above 0 (how often a step's work is done in parallel).")
    trajectory = make_trajectory(system, inputs, state, steps)
    if trajectory.steps < 4:
        raise InputError(f"{trajectory.steps} steps are too few to run in parallel. Pass at least 4.")
    size = trajectory.state.shape[-1]
    counts = None if isinstance(trajectory.cell, MapCell) else cost(trajectory.cell)
    reports, rejected = [], {}
    for name, solver in (_make_solvers(trajectory) if solvers is None else solvers).items():
        if not isinstance(solver, Parallel):
            rejected[name] = "it is not parallel in time"
            continue
        try:
            search = solver.solve_system(trajectory.cell, make_system(trajectory), None)
        except IncompatibleError as error:
            rejected[name] = str(error).split(". ")[0].split("\n")[0]
            continue
        iterations = search.outcome.iterations
        mean = float(iterations.double().mean())
        relative = math.nan if counts is None else _count_iteration_macs(solver, counts, size) / max(counts.step, 1)
        predicted = None
        if isinstance(solver, Newton) and isinstance(solver.damping, Undamped) and not _is_quadratic(solver):
            predicted = predict_iterations(system, inputs, solver, state=state, steps=steps)
        depth = mean * (1 + (math.log2(trajectory.steps) if _has_scan(solver) else 0))
        result = Result(int(search.results.max()))
        reports.append(SolverReport(name, iterations, predicted, result, mean * relative, depth, trajectory.steps))
    spectrum = lyapunov_exponents(system, inputs, state=state, steps=steps, count=1)
    certified = _certify(system)
    best = min((r for r in reports if r.converged), key=lambda r: (-r.gain(processors), r.work), default=None)
    return Parallelizability(
        what=describe(system if isinstance(trajectory.cell, MapCell) else trajectory.cell),
        steps=trajectory.steps,
        spectrum=spectrum,
        certified=certified,
        measured=certificate(system, inputs, state=state, steps=steps),
        solvers=tuple(reports),
        rejected=rejected,
        best=best,
        recommendation=_recommend(spectrum, certified, best, reports, processors),
    )


def _make_solvers(trajectory: Trajectory) -> dict[str, Solver]:
    """Return every undamped solver, with full Jacobians only where they fit into memory. Failures are reported."""
    batch, size = trajectory.state.shape
    kinds = [QuasiDEER, ForwardDEER, ConvDEER, KoopmanDEER, Jacobi, Picard]
    if batch * trajectory.steps * size**2 <= _DENSE_LIMIT:
        kinds.insert(0, DEER)
    return {kind.__name__: kind(on_failure=Return()) for kind in kinds}


def _count_iteration_macs(solver: Solver, counts: Cost, size: int) -> float:
    """Count a step, its linearization, and a work-efficient scan: three products of transitions and states per step."""
    kind = solver.linearization if isinstance(solver, Newton) else None
    if not _has_scan(solver):
        return counts.step
    diagonal = counts.step + 3.0 * size
    if isinstance(kind, FullJacobian):
        return counts.step + counts.jacobian + 2.0 * size**3 + size**2
    if isinstance(kind, JacobianDiagonal):
        return diagonal + counts.jacobian_diagonal
    if isinstance(kind, ConjugateDiagonal):
        return diagonal + (counts.conjugate_diagonal or 0)
    if isinstance(kind, MeanJacobian):  # three products with the mean, and the mean of all Jacobians
        return counts.step + counts.jacobian + 4.0 * size**2
    if isinstance(kind, MeanConjugate | MeanRotation):  # two products with the eigenvectors, and the mean
        return diagonal + 6.0 * size**2
    return diagonal


def _has_scan(solver: Solver) -> bool:
    """Return whether an iteration has a scan over time; Jacobi has none."""
    return not (isinstance(solver, Newton) and isinstance(solver.linearization, ZeroMatrix))


def _is_quadratic(solver: Newton) -> bool:
    """Return whether convergence is quadratic, which the linear theory does not describe: with the full Jacobian."""
    return isinstance(solver.linearization, FullJacobian)


def _is_chaotic(spectrum: LyapunovSpectrum) -> bool:
    """Return whether an exponent of some trajectory exceeds zero by more than twice its standard error."""
    return bool((spectrum.exponents[..., 0] > 2 * spectrum.standard_error[..., 0].nan_to_num(0.0)).any())


def _certify(system: Any) -> Certificate | None:
    try:
        return certificate(system)
    except InputError:  # a plain function
        return None


def _recommend(
    spectrum: LyapunovSpectrum,
    certified: Certificate | None,
    best: SolverReport | None,
    reports: list[SolverReport],
    processors: float,
) -> str:
    largest = float(spectrum.largest.max())
    if certified is not None and certified.contracts:
        why = "It contracts for every input, so this does not depend on the data."
    elif _is_chaotic(spectrum):
        why = f"It is chaotic here: a small error doubles every {math.log(2) / largest:.3g} steps."
    else:
        within = f"within about {-1 / largest:.3g} steps" if largest < 0 else "slowly, if at all,"
        why = f"Errors decay {within} here."
    if best is None:
        return f"Run it sequentially, solvers.Sequential(): no parallel solver converged. {why}"
    mean, gain = float(best.iterations.double().mean()), best.gain(processors)
    count = f"{mean:.0f} iteration" + ("" if f"{mean:.0f}" == "1" else "s")
    if gain < _WORTHWHILE:
        return (
            f"Run it sequentially, solvers.Sequential(): {best.name} needs {count} for {best.steps} steps, a gain of "
            f"{gain:.1f} at most. {why}"
        )
    cheaper = [r for r in reports if r.converged and r.gain(processors) >= _WORTHWHILE and r.work < best.work / 2]
    other = min(cheaper, key=lambda r: r.work, default=None)
    instead = "" if other is None else f" solvers.{other.name}() does {other.work / best.work:.0%} of its work."
    room = "" if math.isnan(best.work) else f", with hardware that does {best.work:.0f} times a step's work in parallel"
    return (
        f"Run it in parallel, solvers.{best.name}(): about {count} instead of {best.steps} steps, up to "
        f"{gain:.0f} times faster{room}.{instead} {why}"
    )
