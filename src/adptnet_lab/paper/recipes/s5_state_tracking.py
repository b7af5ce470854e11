"""S5 word problem: accuracy by β and spectrum (table:s5_8_results), and baselines (table:baselines_state_tracking).

The settings of appendix:s5_training_config are in `settings/s5_word_problem.py`: S5 at width 512 with 16 384 steps at
`--scale paper`, and S3 at width 64 at smaller scales.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet.analysis import plot

from ...tasks import WordProblem
from ..evidence import rank_correlation
from ..recipe import Check, ClaimVerdict, GridPoint, Outcome, Recipe, Rows, Scale, Table, decide
from ..scoring import CEILING, accuracy_difference, mean_accuracy
from ..settings.s5_word_problem import LENGTHS, SIZES, SPECTRA, train_on_word_problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = [0.0, 0.0125, 0.125, 1.0, 4.0]
PAPER_BETAS = [0.00125, 0.0125, 0.125, 0.5, 1.0, 4.0]
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
    return points


def _groups(rows: Rows) -> list[Rows]:
    """Group the rows by spectrum, sparsity and sign."""
    return list(rows.groups("spectrum", "sparsity", "negative").values())


def _check_beta(rows: Rows) -> ClaimVerdict:
    """Spearman's correlation of β and mean accuracy at the training length is at least 0.8 for every spectrum."""
    found = [
        rank_correlation(group.values("beta"), [mean_accuracy(group.where(beta=b)) for b in group.values("beta")])
        for group in _groups(rows)
    ]
    means = [mean_accuracy(rows.where(beta=b)) for b in rows.values("beta")]
    by_beta = ", ".join(f"{b:g}: {mean:.1f}" for b, mean in zip(rows.values("beta"), means, strict=True))
    return decide(
        all(value >= 0.8 for value in found), f"smallest correlation {min(found):.2f}; mean accuracy by β {by_beta}"
    )


def _check_linear(rows: Rows) -> ClaimVerdict:
    """At the training length the accuracy at β = 4 minus that at β = 0, paired by spectrum and seed, has a 95 %
    interval above 0."""
    found = accuracy_difference(rows, {"beta": 4.0}, {"beta": 0.0})
    return decide(found.low > 0, f"{found} (%)")


def _check_extrapolates(rows: Rows) -> ClaimVerdict:
    """At β = 4 the accuracy at 4 times the length is at least 1.3 times chance, for at least three spectra in four."""
    chance = 100 * WordProblem(rows[0].settings["group"]).chance
    found = [mean_accuracy(group.where(beta=4.0), 2) for group in _groups(rows)]
    share = float(np.mean([accuracy > 1.3 * chance for accuracy in found]))
    return decide(
        share >= 0.75, f"{share:.0%} of the spectra; {min(found):.1f} to {max(found):.1f} %, chance {chance:.1f} %"
    )


def _check_negative(rows: Rows) -> ClaimVerdict:
    """For 0 < β < 1, the accuracy at the training length with negative eigenvalues minus that without, paired, has a 95
    % interval above 0."""
    low = Rows([row for row in rows if 0 < row.settings["beta"] < 1])
    found = accuracy_difference(low, {"negative": True}, {"negative": False})
    return decide(found.low > 0, f"{found} (%)")


def _check_exclusive(rows: Rows) -> ClaimVerdict:
    """At β = 4, for both initialisations, the accuracy of sparse and negative eigenvalues together is below the better
    of either alone.

    Not testable if both of these are above 99 %.
    """
    texts, fails, saturated = [], False, False
    for name in SPECTRA:
        group = rows.where(beta=4.0, spectrum=name)
        both = mean_accuracy(group.where(sparsity=0.75, negative=True))
        alone = max(
            mean_accuracy(group.where(sparsity=0.75, negative=False)),
            mean_accuracy(group.where(sparsity=0.0, negative=True)),
        )
        at_ceiling = min(both, alone) > CEILING
        saturated |= at_ceiling
        fails |= not at_ceiling and both >= alone
        texts.append(f"{name}: both {both:.1f}, the better alone {alone:.1f}")
    if saturated and not fails:
        return ClaimVerdict(Outcome.NOT_TESTABLE, "accuracies are saturated: " + "; ".join(texts))
    return decide(not fails, "; ".join(texts))


def _check_sparsity(rows: Rows) -> ClaimVerdict:
    """At β = 1, the accuracy with 75 % sparsity minus that with 0 %, paired, has a 95 % interval above 0 and a larger
    mean than the difference between negative and positive eigenvalues."""
    some = rows.where(beta=1.0)
    sparse = accuracy_difference(some, {"sparsity": 0.75}, {"sparsity": 0.0})
    sign = accuracy_difference(some, {"negative": True}, {"negative": False})
    return decide(sparse.low > 0 and sparse.mean > sign.mean, f"sparsity {sparse}, sign {sign} (%)")


def _check_furthest(rows: Rows) -> ClaimVerdict:
    """The best mean accuracy over β, sparsity and sign, at 2 or 4 times the length, is higher with Linspace.

    Not testable if both initialisations are above 99 %.
    """
    best = {
        name: max(
            mean_accuracy(each, place)
            for each in rows.where(spectrum=name).groups("sparsity", "negative", "beta").values()
            for place in (1, 2)
        )
        for name in SPECTRA
    }
    text = ", ".join(f"{name} {value:.1f} %" for name, value in best.items())
    if min(best.values()) > CEILING:
        return ClaimVerdict(Outcome.NOT_TESTABLE, f"accuracies are saturated: {text}")
    return decide(best["Linspace"] > best["S4D-Real"], text)


LENGTH_COLUMNS = [*(f"L={length}" for length in LENGTHS), "seeds"]


def _accuracy_cells(rows: Rows) -> list[Any]:
    """Return the cells of `LENGTH_COLUMNS`: mean accuracies and the number of runs."""
    return [*(f"{mean_accuracy(rows, place):.1f}" for place in range(len(LENGTHS))), len(rows)]


def _make_table(rows: Rows) -> Table:
    lines = []
    for (spectrum, sparsity, negative, beta), some in rows.groups("spectrum", "sparsity", "negative", "beta").items():
        share, sign = _format_spectrum(sparsity, negative)
        lines.append([spectrum, share, beta, sign, *_accuracy_cells(some)])
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
    """The mean accuracy of the ReLU RNN is at least 99 % at the training length and 95 % at 4 times that."""
    found = [mean_accuracy(rows.where(spectrum=None), place) for place in range(3)]
    return decide(found[0] >= 99 and found[2] >= 95, ", ".join(f"{value:.1f}" for value in found) + " %")


def _linear_rows(rows: Rows) -> Rows:
    """Return the rows of networks with β = 0."""
    return Rows([row for row in rows if row.settings["spectrum"]])


def _check_not_solved(rows: Rows) -> ClaimVerdict:
    """No network with β = 0 reaches 90 % at the training length."""
    best = max(row.numbers["accuracy"][0] for row in _linear_rows(rows))
    return decide(best < 90, f"best {best:.1f} %, the ReLU RNN {mean_accuracy(rows.where(spectrum=None)):.1f} %")


def _check_collapse(rows: Rows) -> ClaimVerdict:
    """The mean accuracy with β = 0 at 4 times the length is below 1.25 times chance."""
    found = mean_accuracy(_linear_rows(rows), 2)
    return decide(found < 1.25 * _chance(rows), f"{found:.1f} %, chance {_chance(rows):.1f} %")


def _check_width(rows: Rows) -> ClaimVerdict:
    """The accuracy of wider networks minus that of narrower ones, paired by spectrum and seed, is below 2 points in the
    mean."""
    narrow, wide = sorted(_linear_rows(rows).values("width"))
    found = accuracy_difference(_linear_rows(rows), {"width": wide}, {"width": narrow})
    return decide(found.mean < 2, f"{found} (%)")


def _check_helps(rows: Rows) -> ClaimVerdict:
    """For S4D-Real, the accuracy at the training length with negative eigenvalues minus that without, paired, has a 95
    % interval above 0."""
    found = accuracy_difference(rows.where(spectrum="S4D-Real"), {"negative": True}, {"negative": False})
    return decide(found.low > 0, f"{found} (%)")


def _format_spectrum(sparsity: float | None, negative: bool | None) -> list[str]:
    """Return sparsity and sign in the notation of the paper's tables."""
    return ["--", "--"] if sparsity is None else [f"{sparsity:.0%}", "✓" if negative else "×"]


def _make_baseline_table(rows: Rows) -> Table:
    lines = []
    for (spectrum, width, sparsity, negative), some in rows.groups("spectrum", "width", "sparsity", "negative").items():
        model = "ADPTNet (β=0)" if spectrum else "ReLU RNN"
        lines.append([spectrum or "--", model, width, *_format_spectrum(sparsity, negative), *_accuracy_cells(some)])
    return Table(["Eig. Init.", "Model", "Width", "Sparsity", "Neg. Eig.", *LENGTH_COLUMNS], lines)


RECIPES = {
    "table:s5_8_results": Recipe(
        version=1,
        points=_make_points,
        run=train_on_word_problem,
        checks={
            "beta": Check(_check_beta, "laptop"),
            "linear": Check(_check_linear, "laptop"),
            "extrapolates": Check(_check_extrapolates, "laptop"),
            "negative": Check(_check_negative, "laptop"),
            "exclusive": Check(_check_exclusive, "laptop"),
            "sparsity": Check(_check_sparsity, "laptop"),
            "furthest": Check(_check_furthest, "laptop"),
        },
        figures={"Accuracy by β": _draw},
        table=_make_table,
        cost={"smoke": "2 s", "laptop": "30 min", "paper": "a GPU for days"},
        dtype=torch.float32,
    ),
    "table:baselines_state_tracking": Recipe(
        version=1,
        points=_make_baseline_points,
        run=train_on_word_problem,
        checks={
            "rnn": Check(_check_rnn, "laptop"),
            "linear": Check(_check_not_solved, "laptop"),
            "collapse": Check(_check_collapse, "laptop"),
            "width": Check(_check_width, "laptop"),
            "negative": Check(_check_helps, "laptop"),
        },
        table=_make_baseline_table,
        cost={"smoke": "1 s", "laptop": "45 min", "paper": "a GPU for a day"},
        dtype=torch.float32,
    ),
}
