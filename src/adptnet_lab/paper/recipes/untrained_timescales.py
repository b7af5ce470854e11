"""Lyapunov spectra of networks at initialisation (sec:untrained_lyapunov_results), by QR, in float64.

The networks are those of table:baseline_untrained_config. A point is one network, driven by inputs from N(0, 1).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet import analysis, cells, drive, projections, retractions, spectra
from adptnet.analysis import plot
from adptnet.nn import ADPTNet, Recurrent

from ..evidence import EXPONENT_TOLERANCE, largest_excess
from ..recipe import Check, ClaimVerdict, GridPoint, Recipe, Row, Rows, RunOutput, Scale, Table, decide

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


def _make_points(seeds: int, **grid: Any) -> list[GridPoint]:
    """Return the Cartesian product of the lists in `grid`, for each seed."""
    points: list[dict[str, Any]] = [{}]
    for key, values in grid.items():
        points = [
            {**point, key: value} for point in points for value in (values if isinstance(values, list) else [values])
        ]
    return [GridPoint(point, seed) for seed in range(seeds) for point in points]


def _run(point: GridPoint) -> RunOutput:
    settings = point.settings
    axes: dict[str, Any] = {
        "projection": WEIGHTS[settings.get("weights", "orthogonal")],
        "retraction": RETRACTIONS[settings.get("retraction", "exponential")],
        "spectrum": spectra.UniformDecay(),
    }
    if "ratio" in settings:
        low, high = STEP_SIZES[settings["ratio"]]
        axes["spectrum"] = spectra.UniformDecay(1.0, 1.0, dt_min=low, dt_max=high)
    layer = ADPTNet.paper(settings["size"], beta=settings["beta"], gain=drive.LRU(), rope=drive.RoPE(), **axes)
    layer.requires_grad_(False)
    numbers = _measure_spectrum(layer, settings["steps"])
    assert isinstance(layer.cell, cells.ADPTCell)
    numbers["log_eigenvalues"] = layer.cell.spectrum.log_modulus().sort(descending=True).values
    return RunOutput(numbers, layer.spec)


def _run_orthogonal(point: GridPoint) -> RunOutput:
    layer = Recurrent(cells.OrthogonalRNN(point.settings["size"])).requires_grad_(False)
    numbers = _measure_spectrum(layer, point.settings["steps"])
    x = torch.randn(min(point.settings["steps"], 1024), layer.width)
    numbers["singular"] = analysis.mean_log_singular_values(layer, x)
    return RunOutput(numbers, layer.spec)


def _measure_spectrum(layer: ADPTNet | Recurrent, steps: int) -> dict[str, Any]:
    x = torch.randn(steps, layer.width)
    return {
        "exponents": analysis.lyapunov_exponents(layer, x).exponents,
        "certified": list(analysis.certificate(layer).exponents),
    }


# Statistics of a spectrum


def _log_eigenvalues(row: Row) -> np.ndarray[Any, Any]:
    return np.asarray(row.numbers["log_eigenvalues"])


def _width(row: Row) -> float:
    return float(np.ptp(_log_eigenvalues(row)))


def _distance_to_minimum(row: Row) -> float:
    """Return the smallest exponent minus ln λ̄_min; negative if the exponents undershoot."""
    return float(min(row.numbers["exponents"]) - _log_eigenvalues(row).min())


def _relative_excess(row: Row) -> float:
    """Return by how much the exponents leave [ln λ̄_min, ln λ̄_max], relative to its width; negative inside."""
    prescribed = _log_eigenvalues(row)
    return largest_excess(row.numbers["exponents"], prescribed.min(), prescribed.max()) / _width(row)


def _mismatch(row: Row) -> float:
    """Return the mean |α_i - ln λ̄_i|, both sorted, relative to the width of ln λ̄."""
    return float(np.abs(np.asarray(row.numbers["exponents"]) - _log_eigenvalues(row)).mean() / _width(row))


def _relative_width(row: Row) -> float:
    """Return the width of the exponents relative to that of ln λ̄."""
    return float(np.ptp(row.numbers["exponents"])) / _width(row)


def _mean(rows: Rows, number: Callable[[Row], float]) -> float:
    return float(np.mean([number(row) for row in rows]))


def _format_range(rows: Rows, number: Callable[[Row], float]) -> str:
    values = [number(row) for row in rows]
    return f"{values[0]:.3g}" if len(values) == 1 else f"{min(values):.3g} to {max(values):.3g}"


def _check_contained(rows: Rows) -> ClaimVerdict:
    """No exponent leaves [ln λ̄_min, ln λ̄_max] by more than 1 % of its width, in any network."""
    worst = max(_relative_excess(row) for row in rows)
    return decide(worst <= EXPONENT_TOLERANCE, f"largest excess {max(worst, 0):.2%} of the width, {len(rows)} spectra")


# fig:time_ablation


def _make_time_points(scale: Scale) -> list[GridPoint]:
    seeds = 1 if scale == "smoke" else 3
    return _make_points(seeds, size=[SMALL, LARGE[scale]], steps=list(LENGTHS[scale]), beta=0.125)


def _check_squeezed(rows: Rows) -> ClaimVerdict:
    """At the shortest length the exponents span a smaller range than at the longest, and than ln λ̄, for each size."""
    shortest, longest = min(rows.values("steps")), max(rows.values("steps"))
    spans = [
        tuple(_mean(rows.where(size=n, steps=steps), _relative_width) for steps in (shortest, longest))
        for n in rows.values("size")
    ]
    text = ", ".join(f"{a:.2f} at T = {shortest} and {b:.2f} at {longest}" for a, b in spans)
    return decide(all(a < b and a < 1 for a, b in spans), f"widths relative to ln λ̄, for each size: {text}")


def _check_size(rows: Rows) -> ClaimVerdict:
    """At the longest length the mean mismatch |α_i - ln λ̄_i| differs between the sizes by less than 5 % of the
    width."""
    longest = rows.where(steps=max(rows.values("steps")))
    found = {n: _mean(longest.where(size=n), _mismatch) for n in rows.values("size")}
    text = ", ".join(f"D = {n}: {value:.2%}" for n, value in found.items())
    return decide(max(found.values()) - min(found.values()) < 0.05, f"mean mismatch {text} of the width")


def _check_aligned(rows: Rows) -> ClaimVerdict:
    """At the longest length the mean mismatch |α_i - ln λ̄_i| is below 5 % of the width in every network."""
    longest = rows.where(steps=max(rows.values("steps")))
    return decide(
        max(_mismatch(row) for row in longest) < 0.05, f"mismatch {_format_range(longest, _mismatch)} of the width"
    )


# fig:kv_ablation


def _make_kv_points(scale: Scale) -> list[GridPoint]:
    return _make_points(
        SEEDS[scale],
        weights=list(WEIGHTS),
        beta=list(BETAS),
        size=SMALL,
        steps=MIDDLE[scale],
    )


def _check_kv_contained(rows: Rows) -> ClaimVerdict:
    """At β = 0.125 no exponent leaves [ln λ̄_min, ln λ̄_max] by more than 1 % of its width."""
    return _check_contained(rows.where(beta=0.125))


def _check_close(rows: Rows) -> ClaimVerdict:
    """At β = 1 the mean mismatch |α_i - ln λ̄_i|, averaged over networks, is below 10 % of the width for all three."""
    found = {name: _mean(rows.where(beta=1.0, weights=name), _mismatch) for name in WEIGHTS}
    text = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
    return decide(max(found.values()) < 0.1, f"mean mismatch {text} of the width")


def _check_undershoot(rows: Rows) -> ClaimVerdict:
    """At β = 1000 with orthogonal K, V the mean undershoot over networks is between 0.001 and 0.004."""
    large = rows.where(beta=1000.0, weights="orthogonal")
    mean = -_mean(large, _distance_to_minimum)
    spread = _format_range(large, lambda row: -_distance_to_minimum(row))
    return decide(0.001 < mean < 0.004, f"mean undershoot {mean:.2g}, {spread}")


def _check_undershoot_others(rows: Rows) -> ClaimVerdict:
    """At β = 1000 the mean undershoot is above 0.04 for LowParam and above 0.01 for dense, and above orthogonal's."""
    means = {name: -_mean(rows.where(beta=1000.0, weights=name), _distance_to_minimum) for name in WEIGHTS}
    holds = means["LowParam"] > 0.04 and means["dense"] > max(0.01, means["orthogonal"])
    return decide(holds, "mean undershoot " + ", ".join(f"{name} {value:.2g}" for name, value in means.items()))


def _check_chaos(rows: Rows) -> ClaimVerdict:
    """At β = 1000 the largest exponent is above 0 in most dense and LowParam networks and in no orthogonal one."""
    shares = {
        name: np.mean([max(row.numbers["exponents"]) > 0 for row in rows.where(beta=1000.0, weights=name)])
        for name in WEIGHTS
    }
    holds = shares["dense"] > 0.5 and shares["LowParam"] > 0.5 and shares["orthogonal"] == 0
    return decide(bool(holds), "chaotic: " + ", ".join(f"{name} {value:.0%}" for name, value in shares.items()))


def _check_bounds(rows: Rows) -> ClaimVerdict:
    """Every exponent lies in the certified interval, wherever there is one."""
    certified = [row for row in rows if any(np.isfinite(row.numbers["certified"]))]
    inside = all(largest_excess(row.numbers["exponents"], *row.numbers["certified"]) <= 1e-12 for row in certified)
    count = f"{len(certified)} of {len(rows)} spectra have a certificate"
    return decide(bool(certified) and inside, f"{count} (LowParam has none, since it is singular)")


# fig:cayley_ablation


def _make_cayley_points(scale: Scale) -> list[GridPoint]:
    return _make_points(SEEDS[scale], retraction=list(RETRACTIONS), beta=list(BETAS), size=SMALL, steps=MIDDLE[scale])


def _check_alike(rows: Rows) -> ClaimVerdict:
    """At β = 0.125 and 1 the mean mismatch differs between the retractions by less than 3 % of the width of ln λ̄."""
    gaps = [
        abs(
            _mean(rows.where(beta=b, retraction="Cayley"), _mismatch)
            - _mean(rows.where(beta=b, retraction="exponential"), _mismatch)
        )
        for b in (0.125, 1.0)
    ]
    return decide(max(gaps) < 0.03, f"differences of the mean mismatch {gaps[0]:.2%} and {gaps[1]:.2%} of the width")


def _check_both_undershoot(rows: Rows) -> ClaimVerdict:
    """At β = 1000 the mean undershoot over networks is between 0.001 and 0.004 for both retractions."""
    means = {name: -_mean(rows.where(beta=1000.0, retraction=name), _distance_to_minimum) for name in RETRACTIONS}
    text = ", ".join(f"{name} {value:+.2g}" for name, value in means.items())
    return decide(all(0.001 < mean < 0.004 for mean in means.values()), f"mean undershoot {text}")


# fig:cond_ablation


def _make_condition_points(scale: Scale) -> list[GridPoint]:
    steps = LENGTHS[scale][1]
    seeds = {"smoke": 1, "laptop": 1, "paper": 3}[scale]
    return _make_points(seeds, ratio=list(STEP_SIZES), beta=list(BETAS), size=LARGE[scale], steps=steps)


def _mismatch_by(rows: Rows, key: str) -> dict[Any, float]:
    """Return the mean mismatch for each value of a setting."""
    return {value: _mean(rows.where(**{key: value}), _mismatch) for value in rows.values(key)}


def _format_means(means: dict[Any, float]) -> str:
    return ", ".join(
        f"{key:g}: {value:.2%}" if isinstance(key, float) else f"{key}: {value:.2%}" for key, value in means.items()
    )


def _check_ratio(rows: Rows) -> ClaimVerdict:
    """The mean mismatch differs between the condition numbers by less than 3 % of the width of ln λ̄."""
    means = _mismatch_by(rows, "ratio")
    return decide(max(means.values()) - min(means.values()) < 0.03, f"mean mismatch by ratio {_format_means(means)}")


def _check_beta(rows: Rows) -> ClaimVerdict:
    """The mean mismatch is larger at β = 1000 than at 1, and varies more over β than over the condition numbers."""
    by_beta, by_ratio = _mismatch_by(rows, "beta"), _mismatch_by(rows, "ratio")
    more = max(by_beta.values()) - min(by_beta.values()) > max(by_ratio.values()) - min(by_ratio.values())
    text = f"mean mismatch by β {_format_means(by_beta)}; by ratio {_format_means(by_ratio)}"
    return decide(by_beta[1000.0] > by_beta[1.0] and more, text)


def _check_discordant(rows: Rows) -> ClaimVerdict:
    """The ratio of 1.01 has the largest mean mismatch."""
    means = _mismatch_by(rows, "ratio")
    return decide(max(means, key=lambda key: means[key]) == "1.01", f"mean mismatch by ratio {_format_means(means)}")


# fig:orthogonal_rnn_lyapunov


def _make_rnn_points(scale: Scale) -> list[GridPoint]:
    return _make_points(1 if scale == "smoke" else 3, size=LARGE[scale], steps=list(LENGTHS[scale]))


def _check_top(rows: Rows) -> ClaimVerdict:
    """The largest exponent is at least -0.001 in every network."""
    tops = [max(row.numbers["exponents"]) for row in rows]
    return decide(min(tops) >= -1e-3, f"largest exponents {min(tops):.3f} to {max(tops):.3f}")


def _check_half(rows: Rows) -> ClaimVerdict:
    """Between 30 % and 70 % of the exponents are above -0.05, in every network."""
    shares = [float(np.mean(np.asarray(row.numbers["exponents"]) > -0.05)) for row in rows]
    return decide(
        min(shares) > 0.3 and max(shares) < 0.7, f"shares above -0.05: {min(shares):.0%} to {max(shares):.0%}"
    )


def _check_half_singular(rows: Rows) -> ClaimVerdict:
    """Between 30 % and 70 % of the time averages of ln σ_i(J_t) are above -1, in every network."""
    shares = [float(np.mean(np.asarray(row.numbers["singular"]) > -1)) for row in rows]
    return decide(min(shares) > 0.3 and max(shares) < 0.7, f"shares above -1: {min(shares):.0%} to {max(shares):.0%}")


def _check_floor(rows: Rows) -> ClaimVerdict:
    """In every network the smallest exponent is finite and between -50 and -30."""
    lows = [min(row.numbers["exponents"]) for row in rows]
    infinite = float(np.mean([np.mean(np.isinf(row.numbers["exponents"])) for row in rows]))
    reason = "J is singular there; e^-40 is about the precision of float64"
    return decide(all(-50 < low < -30 for low in lows), f"{infinite:.0%} of the exponents are -∞", reason)


# Figures and tables


def _draw_panels(title: Callable[[Row], str]) -> Callable[[Rows], "Figure"]:
    def draw(rows: Rows) -> "Figure":
        panels = {title(row): row for row in rows if row.seed == 0}
        eigenvalues = {k: r.numbers["log_eigenvalues"] for k, r in panels.items() if "log_eigenvalues" in r.numbers}
        return plot.spectra(
            {name: torch.tensor(row.numbers["exponents"]) for name, row in panels.items()},
            {name: torch.tensor(values) for name, values in eigenvalues.items()},
            {name: tuple(row.numbers["certified"]) for name, row in panels.items()},
        )

    return draw


def _make_table_by(*keys: str) -> Callable[[Rows], Table]:
    def make_table(rows: Rows) -> Table:
        lines = []
        for settings in dict.fromkeys(tuple(row.settings[key] for key in keys) for row in rows):
            group = rows.where(**dict(zip(keys, settings, strict=True)))
            lines.append(
                [
                    *settings,
                    len(group),
                    f"{_mean(group, lambda r: max(r.numbers['exponents'])):.3g}",
                    f"{-_mean(group, _distance_to_minimum):+.2g}",
                    f"{_mean(group, _mismatch):.2%}",
                    f"{_mean(group, _relative_width):.2f}",
                ]
            )
        columns = ["networks", "largest exponent", "below ln λ̄_min", "mean mismatch", "relative width"]
        return Table([*keys, *columns], lines)

    return make_table


RECIPES = {
    "fig:time_ablation": Recipe(
        version=1,
        points=_make_time_points,
        run=_run,
        checks={
            "contained": Check(_check_contained),
            "squeezed": Check(_check_squeezed, "laptop"),
            "size": Check(_check_size, "laptop"),
            "aligned": Check(_check_aligned, "laptop"),
        },
        figures={
            "Exponents and ln λ̄ by size and length": _draw_panels(
                lambda r: f"D = {r.settings['size']}, T = {r.settings['steps']}"
            )
        },
        table=_make_table_by("size", "steps"),
        cost={"smoke": "1 s", "laptop": "20 s", "paper": "3 min"},
    ),
    "fig:kv_ablation": Recipe(
        version=1,
        points=_make_kv_points,
        run=_run,
        checks={
            "contained": Check(_check_kv_contained),
            "close": Check(_check_close, "laptop"),
            "undershoot-orthogonal": Check(_check_undershoot, "laptop"),
            "undershoot-others": Check(_check_undershoot_others, "laptop"),
            "chaos": Check(_check_chaos, "laptop"),
            "bounds": Check(_check_bounds),
        },
        figures={
            "Exponents and ln λ̄ by K, V and β": _draw_panels(
                lambda r: f"{r.settings['weights']}, β = {r.settings['beta']:g}"
            )
        },
        table=_make_table_by("weights", "beta"),
        cost={"smoke": "1 s", "laptop": "30 s", "paper": "1 min"},
    ),
    "fig:cayley_ablation": Recipe(
        version=1,
        points=_make_cayley_points,
        run=_run,
        checks={"alike": Check(_check_alike, "laptop"), "undershoot": Check(_check_both_undershoot, "laptop")},
        figures={
            "Exponents and ln λ̄ by retraction and β": _draw_panels(
                lambda r: f"{r.settings['retraction']}, β = {r.settings['beta']:g}"
            )
        },
        table=_make_table_by("retraction", "beta"),
        cost={"smoke": "1 s", "laptop": "20 s", "paper": "1 min"},
    ),
    "fig:cond_ablation": Recipe(
        version=1,
        points=_make_condition_points,
        run=_run,
        checks={
            "ratio": Check(_check_ratio, "laptop"),
            "beta": Check(_check_beta, "laptop"),
            "discordant": Check(_check_discordant, "laptop"),
        },
        figures={
            "Exponents and ln λ̄ by λ̄_max / λ̄_min and β": _draw_panels(
                lambda r: f"ratio {r.settings['ratio']}, β = {r.settings['beta']:g}"
            )
        },
        table=_make_table_by("ratio", "beta"),
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "2 min"},
    ),
    "fig:orthogonal_rnn_lyapunov": Recipe(
        version=1,
        points=_make_rnn_points,
        run=_run_orthogonal,
        checks={
            "top": Check(_check_top),
            "half": Check(_check_half),
            "half-singular": Check(_check_half_singular, "laptop"),
            "floor": Check(_check_floor),
        },
        figures={"Exponents of an orthogonal ReLU RNN": _draw_panels(lambda r: f"T = {r.settings['steps']}")},
        cost={"smoke": "1 s", "laptop": "10 s", "paper": "12 min"},
    ),
}
