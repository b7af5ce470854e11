"""S5 word problem: accuracy by β and spectrum (table:s5_8_results), and baselines (table:baselines_state_tracking).

The settings of appendix:s5_training_config are in `settings/s5_word_problem.py`: S5 at width 512 with 16 384 steps at
`--scale paper`, and S3 at width 64 at smaller scales.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet.analysis import plot

from ...tasks import WordProblem
from ..evidence import estimate_trend, paired_difference
from ..recipe import Check, GridPoint, Recipe, Rows, Scale, Table
from ..scoring import CEILING, accuracy_difference, estimate_accuracy, format_estimate, mean_accuracy
from ..settings.s5_word_problem import LENGTHS, OPTIONS, SIZES, SPECTRA, train_on_word_problem
from ..verdicts import (
    ClaimVerdict,
    combine,
    judge_absence,
    judge_increase,
    judge_limit,
    judge_share,
    not_testable,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = [0.0, 0.0125, 0.125, 1.0, 4.0]
PAPER_BETAS = [0.00125, 0.0125, 0.125, 0.5, 1.0, 4.0]
MAMBA = {"model": "mamba", "beta": None, "spectrum": None, "sparsity": None, "negative": None}
KINDS = [(sparsity, negative) for sparsity in (0.0, 0.75) for negative in (True, False)]


def _make_points(scale: Scale) -> list[GridPoint]:
    """Return the grid of β and spectra. At `--scale laptop` one spectrum has three seeds and the others have one."""
    settings = SIZES[scale]
    grid = [(name, *kind) for name in SPECTRA for kind in KINDS]
    if scale == "smoke":
        grid = [("S4D-Real", 0.0, True), ("S4D-Real", 0.0, False)]
    points = []
    for spectrum, sparsity, negative in grid:
        main = (spectrum, sparsity, negative) == ("S4D-Real", 0.0, True)
        seeds = 3 if scale == "paper" or (main and scale == "laptop") else 1
        for beta in [0.0, *PAPER_BETAS] if scale == "paper" else BETAS:
            chosen = {"beta": beta, "spectrum": spectrum, "sparsity": sparsity, "negative": negative}
            points += [GridPoint({**chosen, **settings}, seed) for seed in range(seeds)]
    if scale != "laptop":  # a control that the paper's abstract names and does not run
        points += [GridPoint({**MAMBA, **settings}, seed) for seed in range(3 if scale == "paper" else 1)]
    return points


def _groups(rows: Rows) -> list[Rows]:
    """Group the rows of ADPTNet by spectrum, sparsity and sign."""
    own = Rows([row for row in rows if "model" not in row.settings])
    return list(own.groups("spectrum", "sparsity", "negative").values())


MAIN: dict[str, list[Any]] = {
    "spectrum": ["S4D-Real"],
    "sparsity": [0.0],
    "negative": [True],
}  # the paper's main spectrum


def _check_beta(rows: Rows) -> ClaimVerdict:
    """For S4D-Real with negative eigenvalues and without sparsity, Spearman's correlation of β and accuracy at the
    training length has an interval over runs above 0. A correlation of 0.5 matters."""
    found = estimate_trend([row.settings["beta"] for row in rows], [row.numbers["accuracy"][0] for row in rows])
    means = ", ".join(f"{b:g}: {mean_accuracy(rows.where(beta=b)):.1f}" for b in rows.values("beta"))
    return judge_increase(found, 0.5, f"mean accuracy by β {means}")


def _check_linear(rows: Rows) -> ClaimVerdict:
    """At the training length the accuracy at β = 4 minus that at β = 0, for S4D-Real with negative eigenvalues, paired
    by seed, has an interval above 0. 28 points matter, half of the paper's difference."""
    return judge_increase(accuracy_difference(rows, {"beta": 4.0}, {"beta": 0.0}), 28)


def _check_mamba(rows: Rows) -> ClaimVerdict:
    """At the training length the accuracy at β = 4, for S4D-Real with negative eigenvalues, minus that of Mamba of the
    same width in the same block, paired by seed, has an interval above 0. 28 points matter."""
    ours, mamba = (
        {row.seed: row.numbers["accuracy"][0] for row in rows if ("model" in row.settings) == is_mamba}
        for is_mamba in (False, True)
    )
    seeds = sorted(ours.keys() & mamba.keys())
    return judge_increase(paired_difference([ours[s] for s in seeds], [mamba[s] for s in seeds], "points"), 28)


def _check_extrapolates(rows: Rows) -> ClaimVerdict:
    """At β = 4 the accuracy at 4 times the length is above 1.3 times chance in at least three spectra of four: the
    exact interval of the share of spectra is above 0.75."""
    chance = 100 * WordProblem(rows[0].settings["group"]).chance
    found = [mean_accuracy(group, 2) for group in _groups(rows)]
    text = f"{min(found):.1f} to {max(found):.1f} %, chance {chance:.1f} %"
    above = sum(accuracy > 1.3 * chance for accuracy in found)
    return judge_share(above, len(found), 0.75, text, "of the spectra")


def _check_negative(rows: Rows) -> ClaimVerdict:
    """For β = 0.0125 and 0.125, the accuracy at the training length with negative eigenvalues minus that without,
    paired by seed and spectrum, has an interval above 0. 3.5 points matter, half of the paper's difference."""
    return judge_increase(accuracy_difference(rows, {"negative": True}, {"negative": False}), 3.5)


def _check_both_needed(rows: Rows) -> ClaimVerdict:
    """At β = 0.00125, for S4D-Real, the accuracy with sparsity and negative eigenvalues minus that with either alone,
    paired by seed, has an interval above 0. One point matters, half of the paper's smaller difference."""
    both = {row.seed: row.numbers["accuracy"][0] for row in rows.where(sparsity=0.75, negative=True)}
    parts = []
    for name, kind in (("negative alone", (0.0, True)), ("sparsity alone", (0.75, False))):
        alone = {r.seed: r.numbers["accuracy"][0] for r in rows.where(sparsity=kind[0], negative=kind[1])}
        seeds = sorted(both.keys() & alone.keys())
        more = paired_difference([both[s] for s in seeds], [alone[s] for s in seeds], "points")
        parts.append(judge_increase(more, 1, name))
    return combine(parts)


def _check_exclusive(rows: Rows) -> ClaimVerdict:
    """At β = 4, for both initialisations, the accuracy of the better of sparsity or negative eigenvalues alone minus
    that of both, paired by seed, has an interval above 0. Nine points matter, half of the paper's difference.

    Not testable if both of these are above 99 %.
    """
    parts, texts = [], []
    for name in SPECTRA:
        group = rows.where(spectrum=name)
        both = group.where(sparsity=0.75, negative=True)
        alone = max(
            (group.where(sparsity=0.75, negative=False), group.where(sparsity=0.0, negative=True)), key=mean_accuracy
        )
        texts.append(f"{name}: both {mean_accuracy(both):.1f}, the better alone {mean_accuracy(alone):.1f}")
        if min(mean_accuracy(both), mean_accuracy(alone)) > CEILING:
            parts.append(not_testable("accuracies are saturated"))
            continue
        seeds = sorted({r.seed for r in both} & {r.seed for r in alone})
        values = ({r.seed: r.numbers["accuracy"][0] for r in some} for some in (alone, both))
        first, second = values
        parts.append(
            judge_increase(paired_difference([first[s] for s in seeds], [second[s] for s in seeds], "points"), 9)
        )
    return combine(parts, "; ".join(dict.fromkeys([*(p.why for p in parts), *texts])))


def _check_sparsity(rows: Rows) -> ClaimVerdict:
    """At β = 1, the accuracy with 75 % sparsity minus that with 0 %, paired by seed, sign and spectrum, has an interval
    above 0. Five points matter; the paper's own pairs are negative."""
    sparse = accuracy_difference(rows, {"sparsity": 0.75}, {"sparsity": 0.0})
    sign = accuracy_difference(rows, {"negative": True}, {"negative": False})
    return judge_increase(sparse, 5, f"by sign {sign}")


def _check_furthest(rows: Rows) -> ClaimVerdict:
    """The best mean accuracy over β, sparsity and sign, at 2 or 4 times the length, is higher with Linspace: the
    difference of the two best settings, paired by seed, has an interval above 0. One point matters.

    Not testable if both initialisations are above 99 %.
    """
    best: dict[str, dict[int, float]] = {}
    for name in SPECTRA:
        groups = rows.where(spectrum=name).groups("sparsity", "negative", "beta").values()
        group, place = max(((g, p) for g in groups for p in (1, 2)), key=lambda each: mean_accuracy(*each))
        best[name] = {row.seed: row.numbers["accuracy"][place] for row in group}
    means = {name: float(np.mean(list(values.values()))) for name, values in best.items()}
    text = ", ".join(f"{name} {value:.1f} %" for name, value in means.items())
    if min(means.values()) > CEILING:
        return not_testable(f"accuracies are saturated: {text}")
    seeds = sorted(best["Linspace"].keys() & best["S4D-Real"].keys())
    more = paired_difference([best["Linspace"][s] for s in seeds], [best["S4D-Real"][s] for s in seeds], "points")
    return judge_increase(more, 1, text)


LENGTH_COLUMNS = [*(f"L={length}" for length in LENGTHS), "seeds"]


def _accuracy_cells(rows: Rows) -> list[Any]:
    """Return the cells of `LENGTH_COLUMNS`: mean accuracies with their intervals, and the number of runs."""
    return [*(format_estimate(estimate_accuracy(rows, place)) for place in range(len(LENGTHS))), len(rows)]


def _make_table(rows: Rows) -> Table:
    lines = []
    for (spectrum, sparsity, negative, beta), some in rows.groups("spectrum", "sparsity", "negative", "beta").items():
        share, sign = _format_spectrum(sparsity, negative)
        lines.append([spectrum or "Mamba", share, "--" if beta is None else beta, sign, *_accuracy_cells(some)])
    return Table(["Eig. Init.", "Sparsity", "β", "Neg. Eig.", *LENGTH_COLUMNS], lines)


def _draw(rows: Rows) -> "Figure":
    figure = plot.new_figure(10, 3.3)
    for place, axis in enumerate(figure.subplots(1, 3, sharey=True)):
        for colour, group in zip((*plot.COLORS, "#999999", "#000000"), _groups(rows), strict=False):
            first = group[0].settings
            betas = group.values("beta")
            style = "-o" if first["negative"] else ":s"
            name = f"{first['spectrum']}, {first['sparsity']:.0%}, {'±' if first['negative'] else '+'}"
            axis.plot(
                betas,
                [mean_accuracy(group.where(beta=b), place) for b in betas],
                style,
                color=colour,
                markersize=3,
                label=name,
            )
        axis.axhline(100 * WordProblem(rows[0].settings["group"]).chance, color="black", linewidth=0.8, linestyle="--")
        axis.set_xscale("symlog", linthresh=0.01)
        axis.set(xlabel="β", title=f"{2**place}× the length ({LENGTHS[place]})", xlim=(-0.002, 6), ylim=(0, 104))
        plot.strip_axes(axis)
        if place == 0:
            axis.set_ylabel("accuracy (%; dashed: chance)")
    axis.legend(frameon=False, fontsize=7, loc="upper left")
    return figure


# table:baselines_state_tracking


PAPER_BASELINES = [  # spectrum, width, sparsity, negative: the rows of the table
    (None, 512, None, None),
    (None, 864, None, None),
    ("Linspace", 512, 0.0, True),
    ("Linspace", 624, 0.0, True),
    ("Linspace", 512, 0.75, True),
    ("S4D-Real", 512, 0.0, True),
    ("S4D-Real", 512, 0.0, False),
    ("S4D-Real", 512, 0.75, True),
    ("S4D-Real", 512, 0.75, False),
]


def _make_baseline_points(scale: Scale) -> list[GridPoint]:
    """Return the rows of the paper's table; below `--scale paper`, every spectrum at two widths."""
    settings, kinds = SIZES[scale], PAPER_BASELINES
    if scale != "paper":
        width = settings["width"]
        grid = [(name, w, *kind) for name in SPECTRA for w in (width, 2 * width) for kind in KINDS]
        kinds = [(None, width, None, None), *(grid if scale == "laptop" else grid[:2])]
    points = []
    for spectrum, width, sparsity, negative in kinds:
        chosen = {"spectrum": spectrum, "width": width, "sparsity": sparsity, "negative": negative}
        beta = None if spectrum is None else 0.0
        seeds = {"smoke": 1, "laptop": 2 if width == settings["width"] else 1, "paper": 3}[scale]
        points += [GridPoint({**settings, **chosen, "beta": beta}, seed) for seed in range(seeds)]
    return points


def _chance(rows: Rows) -> float:
    return 100 * WordProblem(rows[0].settings["group"]).chance


def _check_rnn(rows: Rows) -> ClaimVerdict:
    """The mean accuracy of the ReLU RNN has an interval above 99 % at the training length and above 95 % at 4 times
    that."""
    parts = [
        judge_limit(estimate_accuracy(rows, place), above=least, why=f"at {2**place} times the length")
        for place, least in ((0, 99.0), (2, 95.0))
    ]
    return combine(parts)


def _linear_rows(rows: Rows) -> Rows:
    """Return the rows of networks with β = 0."""
    return Rows([row for row in rows if row.settings["spectrum"]])


def _check_not_solved(rows: Rows) -> ClaimVerdict:
    """The mean accuracy with β = 0 at the training length, for S4D-Real with negative eigenvalues, has an interval
    below 90 %."""
    return judge_limit(estimate_accuracy(rows), below=90)


def _check_collapse(rows: Rows) -> ClaimVerdict:
    """The mean accuracy with β = 0 at 4 times the length, for S4D-Real with negative eigenvalues, has an interval below
    1.25 times chance."""
    return judge_limit(estimate_accuracy(rows, 2), below=1.25 * _chance(rows), why=f"chance {_chance(rows):.1f} %")


def _check_width(rows: Rows) -> ClaimVerdict:
    """The accuracy of wider networks minus that of narrower ones, paired by spectrum and seed, has an interval below 2
    points, the paper's largest difference between seeds' means of neighbouring settings."""
    narrow, wide = sorted(rows.values("width"))
    return judge_absence(accuracy_difference(rows, {"width": wide}, {"width": narrow}), 2)


def _check_helps(rows: Rows) -> ClaimVerdict:
    """For S4D-Real, the accuracy at the training length with negative eigenvalues minus that without, paired by seed
    and sparsity, has an interval above 0. 0.9 points matter, half of the paper's difference."""
    return judge_increase(accuracy_difference(rows, {"negative": True}, {"negative": False}), 0.9)


def _format_spectrum(sparsity: float | None, negative: bool | None) -> list[str]:
    """Return sparsity and sign in the notation of the paper's tables."""
    return ["--", "--"] if sparsity is None else [f"{sparsity:.0%}", "✓" if negative else "×"]


def _make_baseline_table(rows: Rows) -> Table:
    lines = []
    for (spectrum, width, sparsity, negative), some in rows.groups("spectrum", "width", "sparsity", "negative").items():
        model = "ADPTNet (β=0)" if spectrum else "ReLU RNN"
        lines.append([spectrum or "--", model, width, *_format_spectrum(sparsity, negative), *_accuracy_cells(some)])
    return Table(["Eig. Init.", "Model", "Width", "Sparsity", "Neg. Eig.", *LENGTH_COLUMNS], lines)


_WIDTHS = [8, 64, 512]  # of the scales smoke, laptop and paper

RECIPES = {
    "table:s5_8_results": Recipe(
        version=1,
        points=_make_points,
        run=train_on_word_problem,
        checks={
            "beta": Check(_check_beta, "laptop", MAIN | {"beta": [0.0, 0.125, 1.0, 4.0]}),
            "linear": Check(_check_linear, "laptop", MAIN | {"beta": [0.0, 4.0]}),
            "mamba": Check(
                _check_mamba,
                "paper",
                {
                    "beta": [4.0, None],
                    "spectrum": ["S4D-Real", None],
                    "sparsity": [0.0, None],
                    "negative": [True, None],
                },
                "Mamba is run on S5 only",
            ),
            "extrapolates": Check(_check_extrapolates, "laptop", {"beta": [4.0]}),
            "negative": Check(_check_negative, "laptop", {"beta": [0.0125, 0.125]}),
            "both-needed": Check(
                _check_both_needed,
                "paper",
                {"spectrum": ["S4D-Real"], "beta": [0.00125]},
                "smaller scales do not have this β",
            ),
            "exclusive": Check(_check_exclusive, "laptop", {"beta": [4.0]}),
            "sparsity": Check(_check_sparsity, "laptop", {"beta": [1.0]}),
            "furthest": Check(_check_furthest, "laptop", {"beta": [1.0, 4.0]}),
        },
        figures={"Accuracy by β": _draw},
        table=_make_table,
        cost={"smoke": "2 s", "laptop": "30 min", "paper": "370 h; 2.2 h a network, 1.6 h at β = 0"},
        borrows=("table:baselines_state_tracking",),
        dtype=torch.float32,
        options=OPTIONS,
    ),
    "table:baselines_state_tracking": Recipe(
        version=1,
        points=_make_baseline_points,
        run=train_on_word_problem,
        checks={
            "rnn": Check(_check_rnn, "laptop", {"spectrum": [None], "width": _WIDTHS}),
            "linear": Check(_check_not_solved, "laptop", MAIN | {"width": _WIDTHS}),
            "collapse": Check(_check_collapse, "laptop", MAIN | {"width": _WIDTHS}),
            "width": Check(_check_width, "laptop", {"spectrum": ["Linspace"], "sparsity": [0.0], "negative": [True]}),
            "negative": Check(_check_helps, "laptop", {"spectrum": ["S4D-Real"], "width": _WIDTHS}),
        },
        table=_make_baseline_table,
        cost={"smoke": "1 s", "laptop": "45 min", "paper": "60 h; 1.6 to 1.9 h a network"},
        borrows=("table:s5_8_results",),
        dtype=torch.float32,
        options=OPTIONS,
    ),
}
