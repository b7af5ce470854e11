"""Word problems: β and the spectrum (table:s5_8_results), and what linear and ReLU networks do (its baselines).

S5 at width 512 with 16 384 steps at the scale paper; S3 at width 64 below it, where the same statements show in half a
minute a run. Accuracy is the mean over the last min(10, L) positions.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adptnet.analysis import plot
from adptnet.cells import ADPTSpec, CellSpec, ReLURNN
from adptnet.nn import LayerSpec
from adptnet.nn.block import BlockSpec
from adptnet.nn.model import ModelSpec
from adptnet.recurrence.directions import FromState
from adptnet.recurrence.drive import LRU, SoftplusGate
from adptnet.recurrence.spectra import Linspace, Negative, S4DReal, Sparse, SpectrumSpec

from ...tasks import WordProblem
from ...training import TrainConfig
from ..evidence import rank_correlation
from ..recipe import Check, Finding, Outcome, Point, Recipe, Rows, Scale, Table, Verdict
from ..scoring import CEILING, difference, mean_accuracy, scored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LABEL", "RECIPES", "SIZES", "run"]

LABEL = "table:s5_8_results"
BETAS = [0.0, 0.0125, 0.125, 1.0, 4.0]
PAPER_BETAS = [0.00125, 0.0125, 0.125, 0.5, 1.0, 4.0]
SPECTRA: dict[str, SpectrumSpec] = {"Linspace": Linspace(), "S4D-Real": S4DReal()}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"group": "S3", "width": 8, "steps": 3, "batch": 16, "test": 32},
    "laptop": {"group": "S3", "width": 64, "steps": 1500, "batch": 256, "test": 2048},
    "paper": {"group": "S5", "width": 512, "steps": 16384, "batch": 512, "test": 4096, "evaluate": 1000},
}
LENGTHS = (8, 16, 32)
KINDS = [(sparsity, negative) for sparsity in (0.0, 0.75) for negative in (True, False)]


def _points(scale: Scale) -> list[Point]:
    """At the scale laptop one seed of every spectrum, and three of one of them."""
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
            points += [Point({**chosen, **settings}, seed) for seed in range(seeds)]
    return points


def _spectrum(settings: Any) -> SpectrumSpec:
    spectrum = SPECTRA[settings["spectrum"]]
    if settings["sparsity"]:
        spectrum = Sparse(spectrum, settings["sparsity"])
    return Negative(spectrum, 0.5) if settings["negative"] else spectrum


def _cell(settings: Any) -> CellSpec:
    if settings["spectrum"] is None:
        return ReLURNN(settings["width"])
    direction = FromState(**{key: settings[key] for key in ("relu", "layer_norm", "dot") if key in settings})
    return ADPTSpec(
        settings["width"],
        beta=settings["beta"],
        spectrum=_spectrum(settings),
        direction=direction,
        gain=LRU(),
        gate=SoftplusGate(),
    )


def run(point: Point) -> Finding:
    """Trains one network and scores it at 1, 2 and 4 times its length."""
    settings = point.settings
    task = WordProblem(settings["group"], length=settings.get("length", LENGTHS[0]))
    lengths = [factor * task.length for factor in (1, 2, 4)]
    spec = ModelSpec(BlockSpec(LayerSpec(_cell(settings)), norm="batch", dropout=0.05), vocabulary=task.vocabulary)
    config = TrainConfig(
        seed=point.seed,
        steps=settings["steps"],
        batch_size=settings["batch"],
        evaluate_every=settings.get("evaluate"),
        select_by="loss",
    )
    found = scored(spec, task, config, sequences=settings["test"], lengths=lengths)
    last = [100 * float(scores["last_token"]) for scores in found.scores]  # type: ignore[arg-type]
    return Finding({**found.numbers, "last token": last}, spec)


def _groups(rows: Rows) -> list[Rows]:
    """One for each spectrum, sparsity and sign."""
    return list(rows.groups("spectrum", "sparsity", "negative").values())


def _beta(rows: Rows) -> Verdict:
    """Spearman's correlation of β and mean accuracy at the training length is at least 0.8 for every spectrum."""
    found = [
        rank_correlation(group.values("beta"), [mean_accuracy(group.where(beta=b)) for b in group.values("beta")])
        for group in _groups(rows)
    ]
    means = [mean_accuracy(rows.where(beta=b)) for b in rows.values("beta")]
    shown = ", ".join(f"{b:g}: {mean:.1f}" for b, mean in zip(rows.values("beta"), means, strict=True))
    return Verdict.of(
        all(value >= 0.8 for value in found), f"smallest correlation {min(found):.2f}; mean accuracy by β {shown}"
    )


def _linear(rows: Rows) -> Verdict:
    """At the training length β = 4 minus β = 0, paired by spectrum and seed, has a 95 % interval above 0."""
    found = difference(rows, {"beta": 4.0}, {"beta": 0.0})
    return Verdict.of(found.low > 0, f"{found} (%)")


def _extrapolates(rows: Rows) -> Verdict:
    """At β = 4 the accuracy at 4 times the length is at least 1.3 times chance, for at least three spectra in four."""
    chance = 100 * WordProblem(rows[0].settings["group"]).chance
    found = [mean_accuracy(group.where(beta=4.0), 2) for group in _groups(rows)]
    share = float(np.mean([accuracy > 1.3 * chance for accuracy in found]))
    return Verdict.of(
        share >= 0.75, f"{share:.0%} of the spectra; {min(found):.1f} to {max(found):.1f} %, chance {chance:.1f} %"
    )


def _negative(rows: Rows) -> Verdict:
    """For 0 < β < 1, negative minus positive at the training length, paired, has a 95 % interval above 0."""
    low = Rows([row for row in rows if 0 < row.settings["beta"] < 1])
    found = difference(low, {"negative": True}, {"negative": False})
    return Verdict.of(found.low > 0, f"{found} (%)")


def _exclusive(rows: Rows) -> Verdict:
    """At β = 4, for both initialisations, sparse and negative together is below the better of either alone.

    Not testable where both of these are above 99 %.
    """
    shown, fails, full = [], False, False
    for name in SPECTRA:
        group = rows.where(beta=4.0, spectrum=name)
        both = mean_accuracy(group.where(sparsity=0.75, negative=True))
        alone = max(
            mean_accuracy(group.where(sparsity=0.75, negative=False)),
            mean_accuracy(group.where(sparsity=0.0, negative=True)),
        )
        at_ceiling = min(both, alone) > CEILING
        full |= at_ceiling
        fails |= not at_ceiling and both >= alone
        shown.append(f"{name}: both {both:.1f}, the better alone {alone:.1f}")
    if full and not fails:
        return Verdict(Outcome.NOT_TESTABLE, "there is no room above: " + "; ".join(shown))
    return Verdict.of(not fails, "; ".join(shown))


def _sparsity(rows: Rows) -> Verdict:
    """At β = 1, 75 % minus 0 % sparsity, paired, has a 95 % interval above 0, and a larger mean than the sign has."""
    some = rows.where(beta=1.0)
    sparse = difference(some, {"sparsity": 0.75}, {"sparsity": 0.0})
    sign = difference(some, {"negative": True}, {"negative": False})
    return Verdict.of(sparse.low > 0 and sparse.mean > sign.mean, f"sparsity {sparse}, sign {sign} (%)")


def _furthest(rows: Rows) -> Verdict:
    """The best mean accuracy of any β, sparsity and sign, at 2 or 4 times the length, is higher with Linspace.

    Not testable where both are above 99 %.
    """
    best = {
        name: max(
            mean_accuracy(each, place)
            for each in rows.where(spectrum=name).groups("sparsity", "negative", "beta").values()
            for place in (1, 2)
        )
        for name in SPECTRA
    }
    shown = ", ".join(f"{name} {value:.1f} %" for name, value in best.items())
    if min(best.values()) > CEILING:
        return Verdict(Outcome.NOT_TESTABLE, f"there is no room above: {shown}")
    return Verdict.of(best["Linspace"] > best["S4D-Real"], shown)


LENGTH_COLUMNS = [*(f"L={length}" for length in LENGTHS), "seeds"]


def _cells(rows: Rows) -> list[Any]:
    """Mean accuracies, and how many runs."""
    return [*(f"{mean_accuracy(rows, place):.1f}" for place in range(len(LENGTHS))), len(rows)]


def _table(rows: Rows) -> Table:
    lines = []
    for (spectrum, sparsity, negative, beta), some in rows.groups("spectrum", "sparsity", "negative", "beta").items():
        share, sign = _marks(sparsity, negative)
        lines.append([spectrum, share, beta, sign, *_cells(some)])
    return Table(["Eig. Init.", "Sparsity", "β", "Neg. Eig.", *LENGTH_COLUMNS], lines)


def _draw(rows: Rows) -> "Figure":
    figure = plot.blank(10, 3.3)
    for place, axis in enumerate(figure.subplots(1, 3, sharey=True)):
        for colour, group in zip((*plot.COLOURS, "#999999", "#000000"), _groups(rows), strict=False):
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
        plot.bare(axis)
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


def _baseline_points(scale: Scale) -> list[Point]:
    """Below the scale paper every spectrum at two widths."""
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
        points += [Point({**settings, **chosen, "beta": beta}, seed) for seed in range(seeds)]
    return points


def _chance(rows: Rows) -> float:
    return 100 * WordProblem(rows[0].settings["group"]).chance


def _rnn(rows: Rows) -> Verdict:
    """The mean accuracy of the ReLU RNN is at least 99 % at the training length and 95 % at 4 times that."""
    found = [mean_accuracy(rows.where(spectrum=None), place) for place in range(3)]
    return Verdict.of(found[0] >= 99 and found[2] >= 95, ", ".join(f"{value:.1f}" for value in found) + " %")


def _beta_0(rows: Rows) -> Rows:
    return Rows([row for row in rows if row.settings["spectrum"]])


def _not_solved(rows: Rows) -> Verdict:
    """No network with β = 0 reaches 90 % at the training length."""
    best = max(row.numbers["accuracy"][0] for row in _beta_0(rows))
    return Verdict.of(best < 90, f"best {best:.1f} %, the ReLU RNN {mean_accuracy(rows.where(spectrum=None)):.1f} %")


def _collapse(rows: Rows) -> Verdict:
    """The mean accuracy with β = 0 at 4 times the length is below 1.25 times chance."""
    found = mean_accuracy(_beta_0(rows), 2)
    return Verdict.of(found < 1.25 * _chance(rows), f"{found:.1f} %, chance {_chance(rows):.1f} %")


def _width(rows: Rows) -> Verdict:
    """Wider networks minus narrower ones, paired by spectrum and seed, are below 2 points in the mean."""
    narrow, wide = sorted(_beta_0(rows).values("width"))
    found = difference(_beta_0(rows), {"width": wide}, {"width": narrow})
    return Verdict.of(found.mean < 2, f"{found} (%)")


def _helps(rows: Rows) -> Verdict:
    """S4D-Real: negative minus positive at the training length, paired, has a 95 % interval above 0."""
    found = difference(rows.where(spectrum="S4D-Real"), {"negative": True}, {"negative": False})
    return Verdict.of(found.low > 0, f"{found} (%)")


def _marks(sparsity: float | None, negative: bool | None) -> list[str]:
    """As the paper's tables have them."""
    return ["--", "--"] if sparsity is None else [f"{sparsity:.0%}", "✓" if negative else "×"]


def _baseline_table(rows: Rows) -> Table:
    lines = []
    for (spectrum, width, sparsity, negative), some in rows.groups("spectrum", "width", "sparsity", "negative").items():
        model = "ADPTNet (β=0)" if spectrum else "ReLU RNN"
        lines.append([spectrum or "--", model, width, *_marks(sparsity, negative), *_cells(some)])
    return Table(["Eig. Init.", "Model", "Width", "Sparsity", "Neg. Eig.", *LENGTH_COLUMNS], lines)


RECIPES = {
    LABEL: Recipe(
        version=1,
        points=_points,
        run=run,
        checks={
            "beta": Check(_beta, "laptop"),
            "linear": Check(_linear, "laptop"),
            "extrapolates": Check(_extrapolates, "laptop"),
            "negative": Check(_negative, "laptop"),
            "exclusive": Check(_exclusive, "laptop"),
            "sparsity": Check(_sparsity, "laptop"),
            "furthest": Check(_furthest, "laptop"),
        },
        figures={"Accuracy by β": _draw},
        table=_table,
        cost={"smoke": "2 s", "laptop": "30 min", "paper": "a GPU for days"},
        dtype=torch.float32,
    ),
    "table:baselines_state_tracking": Recipe(
        version=1,
        points=_baseline_points,
        run=run,
        checks={
            "rnn": Check(_rnn, "laptop"),
            "linear": Check(_not_solved, "laptop"),
            "collapse": Check(_collapse, "laptop"),
            "width": Check(_width, "laptop"),
            "negative": Check(_helps, "laptop"),
        },
        table=_baseline_table,
        cost={"smoke": "1 s", "laptop": "45 min", "paper": "a GPU for a day"},
        dtype=torch.float32,
    ),
}
