"""Is my RNN parallelisable? One report: exponents, contraction, iterations of each solver, gain, and advice."""

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
from ..solvers.linearisations import (
    ConjugateDiagonal,
    FullJacobian,
    JacobianDiagonal,
    MeanConjugate,
    MeanRotation,
    Nothing,
)
from ..solvers.parallel import Parallel
from .bounds import Certificate, certificate
from .cost import Cost, cost
from .lyapunov import LyapunovSpectrum, lyapunov_exponents
from .prediction import equations, predicted_iterations
from .systems import MapCell, Posed, describe, posed

__all__ = ["Parallelisability", "SolverReport", "parallelisability"]

_DENSE_LIMIT = 2**26  # numbers of Jacobians that DEER holds at once
_WORTHWHILE = 2.0  # a gain in depth below this is not worth a solver


@dataclasses.dataclass(frozen=True)
class SolverReport:
    """What one solver does with these inputs."""

    name: str
    iterations: Tensor  # (batch,)
    predicted: Tensor | None  # (batch,), by the linear theory; None where it does not apply
    result: Result  # the worst of the batch
    work: float  # multiply-accumulates, in units of the sequential run's
    depth: float  # steps one after another, in units of a sequential step: iterations · (1 + log2 T), Jacobi's without
    # the scan: iterations
    steps: int

    @property
    def converged(self) -> bool:
        return self.result is Result.CONVERGED

    def gain(self, processors: float = math.inf) -> float:
        """How much faster than step by step, if `processors` times as much can be done at once: a rough upper limit."""
        return min(self.steps / self.depth, processors / self.work)


@dataclasses.dataclass(frozen=True)
class Parallelisability:
    """The report of `parallelisability`."""

    what: str
    steps: int
    spectrum: LyapunovSpectrum
    certified: Certificate | None  # for every input; None for a plain function
    measured: Certificate  # along these inputs
    solvers: tuple[SolverReport, ...]
    refused: Mapping[str, str]  # solvers that cannot be used, and why
    best: SolverReport | None  # the one with the fewest steps after one another
    recommendation: str

    def __str__(self) -> str:
        largest = self.spectrum.largest.detach().reshape(-1)
        ever = math.inf if self.certified is None else self.certified.lipschitz
        lines = [
            f"{self.what}, {len(largest)} sequence(s) of {self.steps} steps",
            f"largest Lyapunov exponent {float(largest.max()):.4g} a step"
            + (" (chaotic)" if _chaotic(self.spectrum) else ""),
            f"a step stretches by at most {self.measured.lipschitz:.4g} here, "
            + (f"{ever:.4g} for any input" if ever < math.inf else "with no limit that is known for other inputs"),
            f"{'solver':<14}{'iterations':>12}{'predicted':>11}{'work':>9}{'gain ≤':>9}",
        ]
        for each in self.solvers:
            found = f"{float(each.iterations.double().mean()):.1f}" if each.converged else each.result.name.lower()
            predicted = "–" if each.predicted is None else f"{float(each.predicted.double().mean()):.1f}"
            gain = f"{each.gain():.1f}×" if each.converged else "–"
            work = "–" if math.isnan(each.work) else f"{each.work:.1f}×"
            lines.append(f"{each.name:<14}{found:>12}{predicted:>11}{work:>9}{gain:>9}")
        lines += [f"{name:<14} not for this cell: {why}" for name, why in self.refused.items()]
        return "\n".join([*lines, self.recommendation])


@torch.no_grad()
def parallelisability(
    system: Any,
    inputs: Tensor | None = None,
    *,
    state: Tensor | ADPTState | None = None,
    steps: int | None = None,
    solvers: Mapping[str, Solver] | None = None,
    processors: float = math.inf,
) -> Parallelisability:
    """Whether the steps of a recurrence can be found at once instead of one after another, and by which solver.

    Exponents say whether it can work at all: below zero, errors of a guess die out; above, iterations approach the
    length. Each solver is then run. The gain is an upper limit from the number of operations that have to follow each
    other; how near a machine comes depends on how much it does at once, for which see `SolverReport.gain`.

    Args:
        system: A layer, a cell or a function, as for `lyapunov_exponents`.
        inputs: (batch, time, features), or (time, features).
        state: Where trajectories start.
        steps: How many steps, for a system without inputs.
        solvers: Which ones to try, by name; every undamped one of the DEER family that fits the cell by default.
        processors: How many times a step's work the hardware does at once, for the recommendation.
    """
    if not processors > 0:
        raise InputError(f"processors={processors}: how many times a step's work is done at once, above 0.")
    trajectory = posed(system, inputs, state, steps)
    if trajectory.steps < 4:
        raise InputError(f"{trajectory.steps} steps are too few to run at once. Pass at least 4.")
    size = trajectory.state.shape[-1]
    counts = None if isinstance(trajectory.cell, MapCell) else cost(trajectory.cell)
    reports, refused = [], {}
    for name, solver in (_family(trajectory) if solvers is None else solvers).items():
        if not isinstance(solver, Parallel):
            refused[name] = "it does not solve all steps at once"
            continue
        try:
            search = solver.search(trajectory.cell, equations(trajectory), None)
        except IncompatibleError as error:
            refused[name] = str(error).split(". ")[0].split("\n")[0]
            continue
        iterations = search.found.iterations
        mean = float(iterations.double().mean())
        each = math.nan if counts is None else _macs_of_an_iteration(solver, counts, size) / max(counts.step, 1)
        predicted = None
        if isinstance(solver, Newton) and isinstance(solver.damping, Undamped) and not _quadratic(solver):
            predicted = predicted_iterations(system, inputs, solver, state=state, steps=steps)
        depth = mean * (1 + (math.log2(trajectory.steps) if _has_scan(solver) else 0))
        result = Result(int(search.results.max()))
        reports.append(SolverReport(name, iterations, predicted, result, mean * each, depth, trajectory.steps))
    spectrum = lyapunov_exponents(system, inputs, state=state, steps=steps, count=1)
    held = _certified(system)
    best = min((r for r in reports if r.converged), key=lambda r: (-r.gain(processors), r.work), default=None)
    return Parallelisability(
        what=describe(system if isinstance(trajectory.cell, MapCell) else trajectory.cell),
        steps=trajectory.steps,
        spectrum=spectrum,
        certified=held,
        measured=certificate(system, inputs, state=state, steps=steps),
        solvers=tuple(reports),
        refused=refused,
        best=best,
        recommendation=_recommendation(spectrum, held, best, reports, processors),
    )


def _family(trajectory: Posed) -> dict[str, Solver]:
    """Every undamped solver; full Jacobians only where they fit into memory. A failure is told, not mended."""
    batch, size = trajectory.state.shape
    kinds = [QuasiDEER, ForwardDEER, ConvDEER, KoopmanDEER, Jacobi, Picard]
    if batch * trajectory.steps * size**2 <= _DENSE_LIMIT:
        kinds.insert(0, DEER)
    return {kind.__name__: kind(on_failure=Return()) for kind in kinds}


def _macs_of_an_iteration(solver: Solver, counts: Cost, size: int) -> float:
    """A step, its linearisation, and the scan: work-efficient, three products of transitions and states a step."""
    kind = solver.linearisation if isinstance(solver, Newton) else None
    if not _has_scan(solver):
        return counts.step
    diagonal = counts.step + 3.0 * size
    if isinstance(kind, FullJacobian):
        return counts.step + counts.jacobian + 2.0 * size**3 + size**2
    if isinstance(kind, JacobianDiagonal):
        return diagonal + counts.jacobian_diagonal
    if isinstance(kind, ConjugateDiagonal):
        return diagonal + (counts.conjugate_diagonal or 0)
    if isinstance(kind, MeanConjugate | MeanRotation):  # two products with the eigenvectors, and the mean itself
        return diagonal + 6.0 * size**2
    return diagonal


def _has_scan(solver: Solver) -> bool:
    """Whether an iteration has a scan along time; Jacobi's has none."""
    return not (isinstance(solver, Newton) and isinstance(solver.linearisation, Nothing))


def _quadratic(solver: Newton) -> bool:
    """Whether the linear theory has nothing to say: with the full Jacobian, all that is left is quadratic."""
    return isinstance(solver.linearisation, FullJacobian)


def _chaotic(spectrum: LyapunovSpectrum) -> bool:
    """Whether some trajectory has an exponent above zero by more than twice its standard error."""
    return bool((spectrum.exponents[..., 0] > 2 * spectrum.standard_error[..., 0].nan_to_num(0.0)).any())


def _certified(system: Any) -> Certificate | None:
    try:
        return certificate(system)
    except InputError:  # a plain function
        return None


def _recommendation(
    spectrum: LyapunovSpectrum,
    held: Certificate | None,
    best: SolverReport | None,
    reports: list[SolverReport],
    processors: float,
) -> str:
    largest = float(spectrum.largest.max())
    if held is not None and held.contracts:
        why = "It contracts for every input, so this does not depend on the data."
    elif _chaotic(spectrum):
        why = f"It is chaotic here: a small error doubles every {math.log(2) / largest:.3g} steps."
    else:
        within = f"within about {-1 / largest:.3g} steps" if largest < 0 else "slowly, if at all,"
        why = f"Errors die out {within} here."
    if best is None:
        return f"Run it step by step, solvers.Sequential(): no solver converged. {why}"
    mean, gain = float(best.iterations.double().mean()), best.gain(processors)
    count = f"{mean:.0f} iteration" + ("" if f"{mean:.0f}" == "1" else "s")
    if gain < _WORTHWHILE:
        return (
            f"Run it step by step, solvers.Sequential(): {best.name} needs {count} for {best.steps} steps, a gain of "
            f"{gain:.1f} at the very most. {why}"
        )
    cheaper = [r for r in reports if r.converged and r.gain(processors) >= _WORTHWHILE and r.work < best.work / 2]
    other = min(cheaper, key=lambda r: r.work, default=None)
    instead = "" if other is None else f" solvers.{other.name}() does {other.work / best.work:.0%} of its work."
    room = "" if math.isnan(best.work) else f", where {best.work:.0f} times a step's work is done at once"
    return (
        f"Run it in parallel, solvers.{best.name}(): about {count} instead of {best.steps} steps, up to "
        f"{gain:.0f} times faster{room}.{instead} {why}"
    )
