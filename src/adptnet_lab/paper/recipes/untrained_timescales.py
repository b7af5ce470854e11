"""Lyapunov spectra of networks at initialisation (sec:untrained_lyapunov_results), by QR, in float64.

The networks are those of table:baseline_untrained_config. A point is one network, driven by inputs from N(0, 1).
"""

from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet import analysis, cells, drive, projections, retractions, spectra
from adptnet.analysis import plot
from adptnet.nn import ADPTNet, Recurrent

from ..evidence import EXPONENT_TOLERANCE, estimate_mean, largest_excess, paired_difference
from ..recipe import Check, GridPoint, Recipe, Row, Rows, RunOutput, Scale, Table
from ..verdicts import (
    ClaimVerdict,
    Outcome,
    combine,
    judge_equal,
    judge_every,
    judge_increase,
    judge_limit,
    judge_observation,
)

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
    excess = [_relative_excess(row) for row in rows]
    inside = [value <= EXPONENT_TOLERANCE for value in excess]
    return judge_every(inside, f"largest excess {max(*excess, 0):.2%} of the width, {len(rows)} spectra")


def _by_seed(rows: Rows, number: Callable[[Row], float]) -> list[float]:
    """Return the mean of a number over the rows of each seed: one value per independent network."""
    return [_mean(Rows([row for row in rows if row.seed == s]), number) for s in sorted({row.seed for row in rows})]


# fig:time_ablation


def _make_time_points(scale: Scale) -> list[GridPoint]:
    seeds = 1 if scale == "smoke" else 3
    return _make_points(seeds, size=[SMALL, LARGE[scale]], steps=list(LENGTHS[scale]), beta=0.125)


def _check_squeezed(rows: Rows) -> ClaimVerdict:
    """For each size, the width of the exponents relative to that of ln λ̄ is larger at the longest length than at the
    shortest, paired by seed, and below 1 at the shortest. A tenth of the width of ln λ̄ matters."""
    shortest, longest = min(rows.values("steps")), max(rows.values("steps"))
    parts = []
    for size in rows.values("size"):
        short, long = (_by_seed(rows.where(size=size, steps=t), _relative_width) for t in (shortest, longest))
        text = f"D = {size}: {np.mean(short):.2f} at T = {shortest}, {np.mean(long):.2f} at {longest}"
        parts.append(judge_increase(paired_difference(long, short, "Δ of the width"), 0.1, text))
        parts.append(judge_limit(estimate_mean(short), below=1, why=text))
    return combine(parts, "; ".join(part.why for part in parts[::2]))


def _check_size(rows: Rows) -> ClaimVerdict:
    """At the longest length the mean mismatch |α_i - ln λ̄_i| of the two sizes differs by less than 5 % of the width."""
    longest = rows.where(steps=max(rows.values("steps")))
    small, large = (_by_seed(longest.where(size=n), _mismatch) for n in rows.values("size"))
    text = f"mean mismatch {np.mean(small):.2%} and {np.mean(large):.2%}"
    return judge_equal(paired_difference(small, large, "Δ of the width"), 0.05, text)


def _check_aligned(rows: Rows) -> ClaimVerdict:
    """At the longest length the mean mismatch |α_i - ln λ̄_i| is below 5 % of the width. Exponents paired at random
    would give a third of it."""
    longest = rows.where(steps=max(rows.values("steps")))
    found = estimate_mean([_mismatch(row) for row in longest], "of the width")
    return judge_limit(found, below=0.05, why=f"{_format_range(longest, _mismatch)} over networks")


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
    """At β = 1 the mean mismatch |α_i - ln λ̄_i| over networks is below 10 % of the width for all three."""
    found = {name: rows.where(beta=1.0, weights=name) for name in WEIGHTS}
    return combine(
        [
            judge_limit(estimate_mean([_mismatch(row) for row in some], "of the width"), below=0.1, why=name)
            for name, some in found.items()
        ]
    )


def _undershoots(rows: Rows) -> list[float]:
    """Return by how much the smallest exponent of each network is below ln λ̄_min."""
    return [-_distance_to_minimum(row) for row in rows]


def _check_undershoot(rows: Rows) -> ClaimVerdict:
    """At β = 1000 with orthogonal K, V there is an undershoot, and the paper's 0.002, of one network, lies where 95 %
    of our networks lie."""
    values = _undershoots(rows.where(beta=1000.0, weights="orthogonal"))
    return combine(
        [judge_observation(values, 0.002), judge_increase(estimate_mean(values, "Δ"), 0.001)],
        f"undershoot {estimate_mean(values)}, {min(values):.2g} to {max(values):.2g} over networks",
    )


def _check_undershoot_others(rows: Rows) -> ClaimVerdict:
    """At β = 1000 the mean undershoot over networks is above 0.04 for LowParam and above 0.01 for dense."""
    large = rows.where(beta=1000.0)
    return combine(
        [
            judge_limit(estimate_mean(_undershoots(large.where(weights=name))), above=least, why=name)
            for name, least in (("LowParam", 0.04), ("dense", 0.01))
        ]
    )


def _check_chaos(rows: Rows) -> ClaimVerdict:
    """At β = 1000 the largest exponent is above 0 in every dense and LowParam network and in no orthogonal one."""
    chaotic = {
        name: [max(row.numbers["exponents"]) > 0 for row in rows.where(beta=1000.0, weights=name)] for name in WEIGHTS
    }
    text = "chaotic: " + ", ".join(f"{name} {sum(found)} of {len(found)}" for name, found in chaotic.items())
    parts = [judge_every(chaotic[name], text) for name in ("dense", "LowParam")]
    return combine([*parts, judge_every([not each for each in chaotic["orthogonal"]], text)], text)


def _check_bounds(rows: Rows) -> ClaimVerdict:
    """Every exponent lies in the certified interval, wherever there is one."""
    certified = [row for row in rows if any(np.isfinite(row.numbers["certified"]))]
    inside = [largest_excess(row.numbers["exponents"], *row.numbers["certified"]) <= 1e-12 for row in certified]
    count = f"{len(certified)} of {len(rows)} spectra have a certificate"
    return judge_every(inside, f"{count} (LowParam has none, since it is singular)")


# fig:cayley_ablation


def _make_cayley_points(scale: Scale) -> list[GridPoint]:
    return _make_points(SEEDS[scale], retraction=list(RETRACTIONS), beta=list(BETAS), size=SMALL, steps=MIDDLE[scale])


def _check_alike(rows: Rows) -> ClaimVerdict:
    """At β = 0.125 and 1 the mean mismatch of the two retractions, paired by seed, differs by less than 3 % of the
    width of ln λ̄, the mismatch at β = 1 itself."""
    parts = []
    for beta in (0.125, 1.0):
        cayley, exponential = (
            _by_seed(rows.where(beta=beta, retraction=n), _mismatch) for n in ("Cayley", "exponential")
        )
        parts.append(judge_equal(paired_difference(cayley, exponential, "Δ of the width"), 0.03, f"β = {beta:g}"))
    return combine(parts)


def _check_both_undershoot(rows: Rows) -> ClaimVerdict:
    """At β = 1000, for both retractions, the paper's undershoot of 0.002, of one network, lies where 95 % of our
    networks lie, and there is an undershoot."""
    parts = []
    for name in RETRACTIONS:
        values = _undershoots(rows.where(beta=1000.0, retraction=name))
        parts += [judge_observation(values, 0.002, name), judge_increase(estimate_mean(values, "Δ"), 0.001, name)]
    return combine(parts, "undershoot " + "; ".join(part.why for part in parts[1::2]))


# fig:cond_ablation


def _make_condition_points(scale: Scale) -> list[GridPoint]:
    steps = LENGTHS[scale][1]
    seeds = {"smoke": 1, "laptop": 1, "paper": 3}[scale]
    return _make_points(seeds, ratio=list(STEP_SIZES), beta=list(BETAS), size=LARGE[scale], steps=steps)


def _absolute_mismatch(row: Row) -> float:
    """Return the mean |α_i - ln λ̄_i|."""
    return _mismatch(row) * _width(row)


UNITS: dict[str, Callable[[Row], float]] = {"of the width": _mismatch, "absolute": _absolute_mismatch}


def _in_both_units(judge: Callable[[Callable[[Row], float], str], ClaimVerdict]) -> ClaimVerdict:
    """Judge a claim on the mismatch relative to the width of ln λ̄ and in absolute units; undecided if they disagree."""
    found = [judge(number, unit) for unit, number in UNITS.items()]
    text = "; ".join(verdict.why for verdict in found)
    if len({verdict.outcome for verdict in found}) > 1:
        needs = "the verdict depends on the unit, relative to the width or absolute, which the paper does not state"
        return found[0]._replace(outcome=Outcome.UNDECIDED, why=text, needs=needs)
    return found[0]._replace(why=text)


def _check_ratio(rows: Rows) -> ClaimVerdict:
    """The mean mismatch at any two condition numbers, paired by seed, differs by less than 3 % of the width of ln λ̄."""
    by_ratio = {ratio: _by_seed(rows.where(ratio=ratio), _mismatch) for ratio in rows.values("ratio")}
    return combine(
        [
            judge_equal(paired_difference(by_ratio[a], by_ratio[b], "Δ of the width"), 0.03, f"ratio {a} minus {b}")
            for a, b in combinations(by_ratio, 2)
        ]
    )


def _check_beta(rows: Rows) -> ClaimVerdict:
    """The mismatch at β = 1000 minus that at β = 1, paired by seed, has an interval above 0, both relative to the width
    of ln λ̄ and in absolute units."""

    def judge(number: Callable[[Row], float], unit: str) -> ClaimVerdict:
        large, small = (_by_seed(rows.where(beta=beta), number) for beta in (1000.0, 1.0))
        return judge_increase(paired_difference(large, small, f"Δ {unit}"), 0.5 * float(np.mean(small)))

    return _in_both_units(judge)


def _check_discordant(rows: Rows) -> ClaimVerdict:
    """The mismatch at the ratio 1.01 minus that at the larger of the other two, paired by seed, has an interval above
    0, both relative to the width of ln λ̄ and in absolute units."""

    def judge(number: Callable[[Row], float], unit: str) -> ClaimVerdict:
        by_ratio = {ratio: _by_seed(rows.where(ratio=ratio), number) for ratio in rows.values("ratio")}
        others = np.maximum(by_ratio["10"], by_ratio["5"]).tolist()
        return judge_increase(paired_difference(by_ratio["1.01"], others, f"Δ {unit}"), 0.5 * float(np.mean(others)))

    return _in_both_units(judge)


# fig:orthogonal_rnn_lyapunov


def _make_rnn_points(scale: Scale) -> list[GridPoint]:
    return _make_points(1 if scale == "smoke" else 3, size=LARGE[scale], steps=list(LENGTHS[scale]))


def _check_top(rows: Rows) -> ClaimVerdict:
    """The largest exponent is at least -0.001 in every network."""
    tops = [max(row.numbers["exponents"]) for row in rows]
    return judge_every([top >= -1e-3 for top in tops], f"largest exponents {min(tops):.3f} to {max(tops):.3f}")


def _check_half(rows: Rows) -> ClaimVerdict:
    """Between 30 % and 70 % of the exponents are above -0.05, in every network."""
    shares = [float(np.mean(np.asarray(row.numbers["exponents"]) > -0.05)) for row in rows]
    text = f"shares above -0.05: {min(shares):.0%} to {max(shares):.0%}"
    return judge_every([0.3 < share < 0.7 for share in shares], text)


def _check_half_singular(rows: Rows) -> ClaimVerdict:
    """Between 30 % and 70 % of the time averages of ln σ_i(J_t) are above -1, in every network."""
    shares = [float(np.mean(np.asarray(row.numbers["singular"]) > -1)) for row in rows]
    return judge_every(
        [0.3 < share < 0.7 for share in shares], f"shares above -1: {min(shares):.0%} to {max(shares):.0%}"
    )


def _check_floor(rows: Rows) -> ClaimVerdict:
    """In every network the smallest exponent is finite and between -50 and -30."""
    lows = [min(row.numbers["exponents"]) for row in rows]
    infinite = float(np.mean([np.mean(np.isinf(row.numbers["exponents"])) for row in rows]))
    return judge_every([-50 < low < -30 for low in lows], f"{infinite:.0%} of the exponents are -∞")


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
