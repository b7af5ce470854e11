"""The timescales of untrained networks (sec:untrained_lyapunov_results) at the paper's scale, and what it says of them.

Lyapunov exponents against ln λ̄ for lengths and sizes (fig:time_ablation), weights and β (fig:kv_ablation), retractions
(fig:cayley_ablation) and spreads of the eigenvalues (fig:cond_ablation), and those of an orthogonal RNN
(fig:orthogonal_rnn_lyapunov). Each statement of the paper about them is then checked and printed with the number behind
it. Minutes on one core at the full scale, seconds with a shorter longest sequence; needs matplotlib:

    python examples/timescales.py
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adptnet import ADPTNet, Recurrent, analysis, cells, drive, projections, retractions, spectra
from adptnet.analysis import figures

WEIGHTS = {
    "dense": projections.Dense(),
    "orthogonal": projections.Orthogonal(),
    "LowParam": projections.LowParam(factors=(4, 4), rank=2),
}
RETRACTIONS = {"exponential": retractions.Exponential(), "Cayley": retractions.Cayley()}
SPREADS = {"10": (1e-2, 2.3), "5": (0.7, 2.3), "1.01": (1e-3, 1e-2)}  # λ̄_max / λ̄_min, and the step sizes that make it
BETAS = (0.125, 1.0, 1000.0)
GRIDS = ("time", "weights", "retraction", "spread", "orthogonal RNN")


class Measured(NamedTuple):
    exponents: Tensor
    log_eigenvalues: Tensor | None
    singular: Tensor | None  # the mean of ln σ_i(J_t): what the paper's text describes
    held: analysis.Certificate

    @property
    def low(self) -> float:
        """How far the smallest exponent is below ln λ̄_min."""
        return float(self.exponents.min() - self.log_eigenvalues.min())

    @property
    def high(self) -> float:
        """How far the largest exponent is above ln λ̄_max."""
        return float(self.exponents.max() - self.log_eigenvalues.max())

    @property
    def mismatch(self) -> float:
        """The mean distance of α_i and ln λ̄_i, both sorted, in units of the spread of ln λ̄."""
        wanted = self.log_eigenvalues.sort(descending=True).values
        return float((self.exponents - wanted).abs().mean() / (wanted.max() - wanted.min()))

    @property
    def squeeze(self) -> float:
        """The width of the exponents in units of that of ln λ̄."""
        width = self.log_eigenvalues.max() - self.log_eigenvalues.min()
        return float((self.exponents.max() - self.exponents.min()) / width)


def layer(size: int, beta: float, **axes: Any) -> ADPTNet:
    """The set-up of table:baseline_untrained_config."""
    base = {"projection": projections.Orthogonal(), "spectrum": spectra.UniformDecay()}
    return ADPTNet(size, beta=beta, gain=drive.LRU(), rope=drive.RoPE(), **{**base, **axes}).requires_grad_(False)


def measure(system: ADPTNet | Recurrent, steps: int, singular: bool = False) -> Measured:
    x = torch.randn(steps, system.width)
    found = analysis.lyapunov_exponents(system, x).exponents
    adpt = isinstance(system, ADPTNet)
    return Measured(
        found,
        system.cell.spectrum.log_modulus() if adpt else None,
        analysis.mean_log_singular_values(system, x) if singular else None,
        analysis.certificate(system),
    )


def grids(longest: int, seed: int, large: int) -> dict[str, dict[str, Measured]]:
    """Every spectrum of the section, figure by figure."""
    torch.manual_seed(seed)
    middle = min(4096, longest)
    lengths = sorted({64, middle, longest})
    found: dict[str, dict[str, Measured]] = {}
    found["time"] = {f"D = {n}, T = {t}": measure(layer(n, 0.125), t) for n in (16, large) for t in lengths}
    found["weights"] = {
        f"{name}, β = {beta:g}": measure(layer(16, beta, projection=kind), middle, singular=True)
        for name, kind in WEIGHTS.items()
        for beta in BETAS
    }
    found["retraction"] = {
        f"{name}, β = {beta:g}": measure(layer(16, beta, retraction=kind), middle)
        for name, kind in RETRACTIONS.items()
        for beta in BETAS
    }
    found["spread"] = {
        f"ratio {name}, β = {beta:g}": measure(
            layer(large, beta, spectrum=spectra.UniformDecay(1.0, 1.0, dt_min=low, dt_max=high)), middle
        )
        for name, (low, high) in SPREADS.items()
        for beta in BETAS
    }
    found["orthogonal RNN"] = {
        f"T = {t}": measure(Recurrent(cells.OrthogonalRNN(large)).requires_grad_(False), t, singular=t == middle)
        for t in lengths
    }
    return found


def statements(found: dict[str, dict[str, Measured]]) -> list[tuple[str, bool, str]]:
    """What the paper says, whether it holds here, and the numbers."""
    time, weights, retraction, spread = (found[name] for name in ("time", "weights", "retraction", "spread"))
    longest = [list(time.values())[i] for i in (len(time) // 2 - 1, -1)]
    shortest = [list(time.values())[i] for i in (0, len(time) // 2)]
    every = [m for name, grid in found.items() if name != "orthogonal RNN" for m in grid.values()]
    rnn = list(found["orthogonal RNN"].values())
    middle = next(m for m in rnn if m.singular is not None)
    large = {name: weights[f"{name}, β = 1000"] for name in WEIGHTS}

    def undershoots(measured: dict[str, Measured]) -> str:
        return ", ".join(f"{name} {m.low:+.2g}" for name, m in measured.items())

    turned = {name: retraction[f"{name}, β = 1000"] for name in RETRACTIONS}
    tops = ", ".join(f"{name} {float(m.exponents.max()):+.2g}" for name, m in large.items())
    by_beta = {b: [m.mismatch for name, m in spread.items() if name.endswith(f"β = {b:g}")] for b in BETAS}
    by_ratio = {r: [m.mismatch for name, m in spread.items() if name.startswith(f"ratio {r},")] for r in SPREADS}
    active = float((middle.singular > -1).double().mean())
    return [
        (
            "β = 0.125: every exponent lies within [ln λ̄_min, ln λ̄_max]",
            all(m.low >= 0 and m.high <= 0 for m in time.values()),
            f"largest excess {max(max(-m.low, m.high) for m in time.values()):+.1e}",
        ),
        (
            "short sequences squeeze the spectrum",
            all(s.squeeze < 1 for s in shortest)
            and all(s.squeeze < m.squeeze for s, m in zip(shortest, longest, strict=True)),
            ", ".join(f"{name}: {m.squeeze:.2f} of the width" for name, m in time.items()),
        ),
        (
            "the size of the state does not affect the alignment (at the longest length)",
            abs(longest[0].mismatch - longest[1].mismatch) < 0.05,
            ", ".join(f"mean |α - ln λ̄| {m.mismatch:.3f} of the width" for m in longest),
        ),
        (
            "α_i ≈ ln λ̄_i at the longest length (within a tenth of the width)",
            all(m.mismatch < 0.1 for m in longest),
            ", ".join(f"{m.mismatch:.3f}" for m in longest),
        ),
        (
            "β = 0.125: all weights within [ln λ̄_min, ln λ̄_max]",
            all(weights[f"{name}, β = 0.125"].low >= 0 and weights[f"{name}, β = 0.125"].high <= 0 for name in WEIGHTS),
            undershoots({name: weights[f"{name}, β = 0.125"] for name in WEIGHTS}) + " above ln λ̄_min",
        ),
        (
            "β = 1000: orthogonal weights undershoot by about 0.002",
            -0.004 < large["orthogonal"].low < -0.001,
            undershoots(large),
        ),
        (
            "β = 1000: dense weights undershoot by more than 0.01, LowParam by more than 0.04",
            large["dense"].low < -0.01 and large["LowParam"].low < -0.04,
            undershoots(large),
        ),
        (
            "β = 1000: dense and LowParam are chaotic, orthogonal is stable",
            float(large["dense"].exponents.max()) > 0
            and float(large["LowParam"].exponents.max()) > 0
            and float(large["orthogonal"].exponents.max()) < 0,
            f"largest exponents {tops}",
        ),
        (
            "the bounds hold wherever there is one",
            all(
                m.held.exponents[0] <= float(m.exponents.min()) and float(m.exponents.max()) <= m.held.exponents[1]
                for m in every
            ),
            f"{sum(m.held.holds for m in every)} of {len(every)} spectra are certified",
        ),
        (
            "the Cayley map has nearly the same spectra, and undershoots alike by about 0.002 at β = 1000",
            all(-0.004 < m.low < -0.001 for m in turned.values()),
            undershoots(turned),
        ),
        (
            "alignment is driven by β rather than by the condition number of Λ̄",
            max(map(max, by_beta.values())) > 0 and _spread_of_means(by_beta) > _spread_of_means(by_ratio),
            f"mean mismatch by β {_means(by_beta)}, by ratio {_means(by_ratio)}",
        ),
        (
            "an orthogonal RNN has a largest exponent of at least 0",
            all(float(m.exponents.max()) >= -1e-3 for m in rnn),
            ", ".join(f"{name}: {float(m.exponents.max()):+.3f}" for name, m in found["orthogonal RNN"].items()),
        ),
        (
            "about half of its exponents are close to 0",
            all(0.3 < float((m.exponents > -0.05).double().mean()) < 0.7 for m in rnn),
            f"no exponent is above {float(max(m.exponents.max() for m in rnn)):.2f}; of the means of ln σ_i(J_t), "
            f"{active:.0%} are above -1",
        ),
        (
            "its others decay at e^-40",
            all(bool((m.exponents < -30).any()) and bool(m.exponents.isfinite().all()) for m in rnn),
            f"{float(rnn[-1].exponents.isinf().double().mean()):.0%} are -∞: J is singular. 40 is where float64 ends",
        ),
    ]


def _means(groups: dict[Any, list[float]]) -> str:
    return ", ".join(f"{key}: {sum(values) / len(values):.4f}" for key, values in groups.items())


def _spread_of_means(groups: dict[Any, list[float]]) -> float:
    means = [sum(values) / len(values) for values in groups.values()]
    return max(means) - min(means)


def main(
    output: Path, longest: int = 16384, seed: int = 0, large: int = 128, drawn: Sequence[str] = GRIDS
) -> list[tuple[str, bool, str]]:
    """Draws a figure for each grid into `output`, prints every statement with its verdict, and returns them."""
    torch.set_default_dtype(torch.float64)
    found = grids(longest, seed, large)
    output.mkdir(parents=True, exist_ok=True)
    for name in drawn:
        grid = found[name]
        eigenvalues = {key: m.log_eigenvalues for key, m in grid.items() if m.log_eigenvalues is not None}
        held = {key: m.held for key, m in grid.items()}
        figure = figures.spectra({key: m.exponents for key, m in grid.items()}, eigenvalues, held)
        figures.save(figure, output / f"timescales_{name.replace(' ', '_')}")
    checked = statements(found)
    for statement, holds, numbers in checked:
        print(f"{'holds    ' if holds else 'DOES NOT '} {statement}\n          {numbers}")
    rows = {
        name: {key: [str(a) if math.isinf(a) else a for a in m.exponents.tolist()] for key, m in grid.items()}
        for name, grid in found.items()
    }
    (output / "timescales.json").write_text(json.dumps(rows))
    print(f"Figures and numbers: {output}/timescales_*.png, timescales.json")
    return checked


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path("runs/examples"), *(int(argument) for argument in sys.argv[1:]))
