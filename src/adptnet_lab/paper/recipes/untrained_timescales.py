"""Lyapunov spectra of networks as initialised (sec:untrained_lyapunov_results), by QR, in float64.

The networks are those of table:baseline_untrained_config; a point is one of them, driven by inputs from N(0, 1).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet import analysis, cells, drive, projections, retractions, spectra
from adptnet.analysis import plot
from adptnet.nn import ADPTNet, Recurrent

from ..evidence import within
from ..recipe import Check, Finding, Point, Recipe, Row, Rows, Scale, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = {
    "dense": projections.Dense(),
    "orthogonal": projections.Orthogonal(),
    "LowParam": projections.LowParam(factors=(4, 4), rank=2),
}
RETRACTIONS = {"exponential": retractions.Exponential(), "Cayley": retractions.Cayley()}
STEP_SIZES = {"10": (1e-2, 2.3), "5": (0.7, 2.3), "1.01": (1e-3, 1e-2)}  # by λ̄_max / λ̄_min
BETAS = (0.125, 1.0, 1000.0)
LENGTHS = {"smoke": (8, 16, 24), "laptop": (64, 1024, 4096), "paper": (64, 4096, 16384)}
MIDDLE = {"smoke": 16, "laptop": 4096, "paper": 4096}
SMALL, LARGE = 16, {"smoke": 20, "laptop": 64, "paper": 128}
SEEDS = {"smoke": 1, "laptop": 3, "paper": 7}
SLACK = 0.01  # of the width of ln λ̄: what an exponent may leave its interval by


def _points(seeds: int, **grid: Any) -> list[Point]:
    """The product of the lists in `grid`, for each seed."""
    points: list[dict[str, Any]] = [{}]
    for key, values in grid.items():
        points = [
            {**point, key: value} for point in points for value in (values if isinstance(values, list) else [values])
        ]
    return [Point(point, seed) for seed in range(seeds) for point in points]


def _run(point: Point) -> Finding:
    settings = point.settings
    axes: dict[str, Any] = {
        "projection": WEIGHTS[settings.get("weights", "orthogonal")],
        "retraction": RETRACTIONS[settings.get("retraction", "exponential")],
        "spectrum": spectra.UniformDecay(),
    }
    if "ratio" in settings:
        low, high = STEP_SIZES[settings["ratio"]]
        axes["spectrum"] = spectra.UniformDecay(1.0, 1.0, dt_min=low, dt_max=high)
    layer = ADPTNet(settings["size"], beta=settings["beta"], gain=drive.LRU(), rope=drive.RoPE(), **axes)
    layer.requires_grad_(False)
    numbers = _spectrum(layer, settings["steps"])
    assert isinstance(layer.cell, cells.ADPTCell)
    numbers["log_eigenvalues"] = layer.cell.spectrum.log_modulus().sort(descending=True).values
    return Finding(numbers, layer.spec)


def _run_orthogonal(point: Point) -> Finding:
    layer = Recurrent(cells.OrthogonalRNN(point.settings["size"])).requires_grad_(False)
    numbers = _spectrum(layer, point.settings["steps"])
    x = torch.randn(min(point.settings["steps"], 1024), layer.width)
    numbers["singular"] = analysis.mean_log_singular_values(layer, x)
    return Finding(numbers, layer.spec)


def _spectrum(layer: ADPTNet | Recurrent, steps: int) -> dict[str, Any]:
    x = torch.randn(steps, layer.width)
    return {
        "exponents": analysis.lyapunov_exponents(layer, x).exponents,
        "certified": list(analysis.certificate(layer).exponents),
    }


# What is said of a spectrum


def _wanted(row: Row) -> np.ndarray[Any, Any]:
    return np.asarray(row.numbers["log_eigenvalues"])


def _width(row: Row) -> float:
    return float(np.ptp(_wanted(row)))


def _below(row: Row) -> float:
    """How far the smallest exponent is below ln λ̄_min; negative if it is."""
    return float(min(row.numbers["exponents"]) - _wanted(row).min())


def _excess(row: Row) -> float:
    """How far the exponents leave [ln λ̄_min, ln λ̄_max], in units of its width; negative inside."""
    return within(row.numbers["exponents"], _wanted(row).min(), _wanted(row).max()) / _width(row)


def _mismatch(row: Row) -> float:
    """The mean distance of α_i and ln λ̄_i, both sorted, in units of the width of ln λ̄."""
    return float(np.abs(np.asarray(row.numbers["exponents"]) - _wanted(row)).mean() / _width(row))


def _squeeze(row: Row) -> float:
    """The width of the exponents in units of that of ln λ̄."""
    return float(np.ptp(row.numbers["exponents"])) / _width(row)


def _mean(rows: Rows, what: Callable[[Row], float]) -> float:
    return float(np.mean([what(row) for row in rows]))


def _range(rows: Rows, what: Callable[[Row], float]) -> str:
    values = [what(row) for row in rows]
    return f"{values[0]:.3g}" if len(values) == 1 else f"{min(values):.3g} to {max(values):.3g}"


def _contained(rows: Rows) -> Verdict:
    """No exponent leaves [ln λ̄_min, ln λ̄_max] by more than 1 % of its width, in any network."""
    worst = max(_excess(row) for row in rows)
    return Verdict.of(worst <= SLACK, f"largest excess {max(worst, 0):.2%} of the width, {len(rows)} spectra")


# fig:time_ablation


def _time_points(scale: Scale) -> list[Point]:
    seeds = 1 if scale == "smoke" else 3
    return _points(seeds, size=[SMALL, LARGE[scale]], steps=list(LENGTHS[scale]), beta=0.125)


def _squeezed(rows: Rows) -> Verdict:
    """At the shortest length the exponents span less than at the longest, and less than ln λ̄, for each size."""
    shortest, longest = min(rows.values("steps")), max(rows.values("steps"))
    spans = [
        (_mean(rows.where(size=n, steps=shortest), _squeeze), _mean(rows.where(size=n, steps=longest), _squeeze))
        for n in rows.values("size")
    ]
    shown = ", ".join(f"{a:.2f} at T = {shortest} and {b:.2f} at {longest}" for a, b in spans)
    return Verdict.of(all(a < b and a < 1 for a, b in spans), f"widths relative to ln λ̄, each size: {shown}")


def _size(rows: Rows) -> Verdict:
    """At the longest length the mean mismatch |α_i - ln λ̄_i| of the sizes differs by less than 5 % of the width."""
    longest = rows.where(steps=max(rows.values("steps")))
    found = {n: _mean(longest.where(size=n), _mismatch) for n in rows.values("size")}
    shown = ", ".join(f"D = {n}: {value:.2%}" for n, value in found.items())
    return Verdict.of(max(found.values()) - min(found.values()) < 0.05, f"mean mismatch {shown} of the width")


def _aligned(rows: Rows) -> Verdict:
    """At the longest length the mean mismatch |α_i - ln λ̄_i| is below 5 % of the width in every network."""
    longest = rows.where(steps=max(rows.values("steps")))
    return Verdict.of(
        max(_mismatch(row) for row in longest) < 0.05, f"mismatch {_range(longest, _mismatch)} of the width"
    )


# fig:kv_ablation


def _kv_points(scale: Scale) -> list[Point]:
    return _points(
        SEEDS[scale],
        weights=list(WEIGHTS),
        beta=list(BETAS),
        size=SMALL,
        steps=MIDDLE[scale],
    )


def _kv_contained(rows: Rows) -> Verdict:
    """At β = 0.125 no exponent leaves [ln λ̄_min, ln λ̄_max] by more than 1 % of its width."""
    return _contained(rows.where(beta=0.125))


def _close(rows: Rows) -> Verdict:
    """At β = 1 the mean mismatch |α_i - ln λ̄_i| is below 10 % of the width for all three, on average over networks."""
    found = {name: _mean(rows.where(beta=1.0, weights=name), _mismatch) for name in WEIGHTS}
    shown = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
    return Verdict.of(max(found.values()) < 0.1, f"mean mismatch {shown} of the width")


def _undershoot(rows: Rows) -> Verdict:
    """At β = 1000 with orthogonal K, V the mean undershoot over networks is between 0.001 and 0.004."""
    large = rows.where(beta=1000.0, weights="orthogonal")
    mean = -_mean(large, _below)
    return Verdict.of(0.001 < mean < 0.004, f"mean undershoot {mean:.2g}, {_range(large, lambda row: -_below(row))}")


def _undershoot_others(rows: Rows) -> Verdict:
    """At β = 1000 the mean undershoot is above 0.04 for LowParam and above 0.01 for dense, and above orthogonal's."""
    means = {name: -_mean(rows.where(beta=1000.0, weights=name), _below) for name in WEIGHTS}
    holds = means["LowParam"] > 0.04 and means["dense"] > max(0.01, means["orthogonal"])
    return Verdict.of(holds, "mean undershoot " + ", ".join(f"{name} {value:.2g}" for name, value in means.items()))


def _chaos(rows: Rows) -> Verdict:
    """At β = 1000 the largest exponent is above 0 in most dense and LowParam networks and in no orthogonal one."""
    shares = {
        name: np.mean([max(row.numbers["exponents"]) > 0 for row in rows.where(beta=1000.0, weights=name)])
        for name in WEIGHTS
    }
    holds = shares["dense"] > 0.5 and shares["LowParam"] > 0.5 and shares["orthogonal"] == 0
    return Verdict.of(bool(holds), "chaotic: " + ", ".join(f"{name} {value:.0%}" for name, value in shares.items()))


def _bounds(rows: Rows) -> Verdict:
    """Every exponent lies in the certified interval, wherever there is one."""
    held = [row for row in rows if any(np.isfinite(row.numbers["certified"]))]
    inside = all(within(row.numbers["exponents"], *row.numbers["certified"]) <= 1e-12 for row in held)
    return Verdict.of(
        bool(held) and inside, f"{len(held)} of {len(rows)} spectra have a certificate (LowParam is singular: none)"
    )


# fig:cayley_ablation


def _cayley_points(scale: Scale) -> list[Point]:
    return _points(SEEDS[scale], retraction=list(RETRACTIONS), beta=list(BETAS), size=SMALL, steps=MIDDLE[scale])


def _alike(rows: Rows) -> Verdict:
    """At β = 0.125 and 1 the mean mismatch of the two differs by less than 3 % of the width of ln λ̄."""
    gaps = [
        abs(
            _mean(rows.where(beta=b, retraction="Cayley"), _mismatch)
            - _mean(rows.where(beta=b, retraction="exponential"), _mismatch)
        )
        for b in (0.125, 1.0)
    ]
    return Verdict.of(
        max(gaps) < 0.03, f"differences of the mean mismatch {gaps[0]:.2%} and {gaps[1]:.2%} of the width"
    )


def _both_undershoot(rows: Rows) -> Verdict:
    """At β = 1000 the mean undershoot over networks is between 0.001 and 0.004 for both retractions."""
    means = {name: -_mean(rows.where(beta=1000.0, retraction=name), _below) for name in RETRACTIONS}
    shown = ", ".join(f"{name} {value:+.2g}" for name, value in means.items())
    return Verdict.of(all(0.001 < mean < 0.004 for mean in means.values()), f"mean undershoot {shown}")


# fig:cond_ablation


def _cond_points(scale: Scale) -> list[Point]:
    steps = LENGTHS[scale][1]
    seeds = {"smoke": 1, "laptop": 1, "paper": 3}[scale]
    return _points(seeds, ratio=list(STEP_SIZES), beta=list(BETAS), size=LARGE[scale], steps=steps)


def _by(rows: Rows, key: str) -> dict[Any, float]:
    return {value: _mean(rows.where(**{key: value}), _mismatch) for value in rows.values(key)}


def _shown(means: dict[Any, float]) -> str:
    return ", ".join(
        f"{key:g}: {value:.2%}" if isinstance(key, float) else f"{key}: {value:.2%}" for key, value in means.items()
    )


def _ratio(rows: Rows) -> Verdict:
    """The mean mismatch, in units of the width of ln λ̄, differs by less than 3 % between the condition numbers."""
    means = _by(rows, "ratio")
    return Verdict.of(max(means.values()) - min(means.values()) < 0.03, f"mean mismatch by ratio {_shown(means)}")


def _beta(rows: Rows) -> Verdict:
    """The mean mismatch is larger at β = 1000 than at 1, and varies more over β than over the condition numbers."""
    by_beta, by_ratio = _by(rows, "beta"), _by(rows, "ratio")
    more = max(by_beta.values()) - min(by_beta.values()) > max(by_ratio.values()) - min(by_ratio.values())
    shown = f"mean mismatch by β {_shown(by_beta)}; by ratio {_shown(by_ratio)}"
    return Verdict.of(by_beta[1000.0] > by_beta[1.0] and more, shown)


def _discordant(rows: Rows) -> Verdict:
    """The ratio of 1.01 has the largest mean mismatch."""
    means = _by(rows, "ratio")
    return Verdict.of(max(means, key=lambda key: means[key]) == "1.01", f"mean mismatch by ratio {_shown(means)}")


# fig:orthogonal_rnn_lyapunov


def _rnn_points(scale: Scale) -> list[Point]:
    return _points(1 if scale == "smoke" else 3, size=LARGE[scale], steps=list(LENGTHS[scale]))


def _top(rows: Rows) -> Verdict:
    """The largest exponent is at least -0.001 in every network."""
    tops = [max(row.numbers["exponents"]) for row in rows]
    return Verdict.of(min(tops) >= -1e-3, f"largest exponents {min(tops):.3f} to {max(tops):.3f}")


def _half(rows: Rows) -> Verdict:
    """Between 30 % and 70 % of the exponents are above -0.05."""
    shares = [float(np.mean(np.asarray(row.numbers["exponents"]) > -0.05)) for row in rows]
    return Verdict.of(
        min(shares) > 0.3 and max(shares) < 0.7, f"shares above -0.05: {min(shares):.0%} to {max(shares):.0%}"
    )


def _half_singular(rows: Rows) -> Verdict:
    """Between 30 % and 70 % of the time averages of ln σ_i(J_t) are above -1."""
    shares = [float(np.mean(np.asarray(row.numbers["singular"]) > -1)) for row in rows]
    return Verdict.of(
        min(shares) > 0.3 and max(shares) < 0.7, f"shares above -1: {min(shares):.0%} to {max(shares):.0%}"
    )


def _floor(rows: Rows) -> Verdict:
    """In every network the smallest exponent is finite and between -50 and -30."""
    lows = [min(row.numbers["exponents"]) for row in rows]
    lost = float(np.mean([np.mean(np.isinf(row.numbers["exponents"])) for row in rows]))
    known = "J is singular there; e^-40 is where float64 ends"
    return Verdict.of(all(-50 < low < -30 for low in lows), f"{lost:.0%} of the exponents are -∞", known)


# Figures and tables


def _panels(title: Callable[[Row], str]) -> Callable[[Rows], "Figure"]:
    def draw(rows: Rows) -> "Figure":
        shown = {title(row): row for row in rows if row.seed == 0}
        eigenvalues = {k: r.numbers["log_eigenvalues"] for k, r in shown.items() if "log_eigenvalues" in r.numbers}
        return plot.spectra(
            {name: torch.tensor(row.numbers["exponents"]) for name, row in shown.items()},
            {name: torch.tensor(values) for name, values in eigenvalues.items()},
            {name: tuple(row.numbers["certified"]) for name, row in shown.items()},
        )

    return draw


def _summary(*keys: str) -> Callable[[Rows], Table]:
    def table(rows: Rows) -> Table:
        lines = []
        for settings in dict.fromkeys(tuple(row.settings[key] for key in keys) for row in rows):
            group = rows.where(**dict(zip(keys, settings, strict=True)))
            lines.append(
                [
                    *settings,
                    len(group),
                    f"{_mean(group, lambda r: max(r.numbers['exponents'])):.3g}",
                    f"{-_mean(group, _below):+.2g}",
                    f"{_mean(group, _mismatch):.2%}",
                    f"{_mean(group, _squeeze):.2f}",
                ]
            )
        columns = ["networks", "largest exponent", "below ln λ̄_min", "mean mismatch", "width"]
        return Table([*keys, *columns], lines)

    return table


RECIPES = {
    "fig:time_ablation": Recipe(
        version=1,
        points=_time_points,
        run=_run,
        checks={
            "contained": Check(_contained),
            "squeezed": Check(_squeezed, "laptop"),
            "size": Check(_size, "laptop"),
            "aligned": Check(_aligned, "laptop"),
        },
        figures={
            "Exponents and ln λ̄ by size and length": _panels(
                lambda r: f"D = {r.settings['size']}, T = {r.settings['steps']}"
            )
        },
        table=_summary("size", "steps"),
        cost={"smoke": "1 s", "laptop": "20 s", "paper": "3 min"},
    ),
    "fig:kv_ablation": Recipe(
        version=1,
        points=_kv_points,
        run=_run,
        checks={
            "contained": Check(_kv_contained),
            "close": Check(_close, "laptop"),
            "undershoot-orthogonal": Check(_undershoot, "laptop"),
            "undershoot-others": Check(_undershoot_others, "laptop"),
            "chaos": Check(_chaos, "laptop"),
            "bounds": Check(_bounds),
        },
        figures={
            "Exponents and ln λ̄ by K, V and β": _panels(
                lambda r: f"{r.settings['weights']}, β = {r.settings['beta']:g}"
            )
        },
        table=_summary("weights", "beta"),
        cost={"smoke": "1 s", "laptop": "30 s", "paper": "1 min"},
    ),
    "fig:cayley_ablation": Recipe(
        version=1,
        points=_cayley_points,
        run=_run,
        checks={"alike": Check(_alike, "laptop"), "undershoot": Check(_both_undershoot, "laptop")},
        figures={
            "Exponents and ln λ̄ by retraction and β": _panels(
                lambda r: f"{r.settings['retraction']}, β = {r.settings['beta']:g}"
            )
        },
        table=_summary("retraction", "beta"),
        cost={"smoke": "1 s", "laptop": "20 s", "paper": "1 min"},
    ),
    "fig:cond_ablation": Recipe(
        version=1,
        points=_cond_points,
        run=_run,
        checks={
            "ratio": Check(_ratio, "laptop"),
            "beta": Check(_beta, "laptop"),
            "discordant": Check(_discordant, "laptop"),
        },
        figures={
            "Exponents and ln λ̄ by λ̄_max / λ̄_min and β": _panels(
                lambda r: f"ratio {r.settings['ratio']}, β = {r.settings['beta']:g}"
            )
        },
        table=_summary("ratio", "beta"),
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "2 min"},
    ),
    "fig:orthogonal_rnn_lyapunov": Recipe(
        version=1,
        points=_rnn_points,
        run=_run_orthogonal,
        checks={
            "top": Check(_top),
            "half": Check(_half),
            "half-singular": Check(_half_singular, "laptop"),
            "floor": Check(_floor),
        },
        figures={"Exponents of an orthogonal ReLU RNN": _panels(lambda r: f"T = {r.settings['steps']}")},
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "12 min"},
    ),
}
