"""MAD: Memorisation, Selective Copying and Compression, with other models in the same block (sec:mad_results).

The score is that of the suite: the best accuracy over the optimisers in each setting of a task, averaged over the
settings. Where the paper quotes the literature, we run our own reference implementations of the models, which are not
optimised for speed. xLSTM and MesaNet are not included.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from adptnet.cells import ADPTSpec
from adptnet.nn import LayerSpec
from adptnet.nn.mixer import MixerSpec
from adptnet.nn.swiglu import SwiGLUBlockSpec
from adptnet.recurrence.drive import SoftplusGate
from adptnet.recurrence.projections import Expand
from adptnet.recurrence.spectra import S4DInv
from adptnet.spec import ModuleSpec

from ...baselines import baseline, count_parameters, match_parameters
from ...tasks import (
    MAD_OPTIMIZERS,
    MadCompression,
    MadMemorisation,
    MadSelectiveCopying,
    Task,
    mad_score,
    mad_settings,
)
from ...training import AdamW, Constant, TrainConfig
from ..evidence import Estimate, estimate_mean, paired_difference
from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale, Table
from ..scoring import draw_accuracies, train_and_score
from ..verdicts import ClaimVerdict, combine, judge_equal, judge_increase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, LINEAR, HAWK = "ADPTNet", "β = 0", "Hawk"
MATCHED = "matched Hawk"  # as wide as it needs to be to have as many parameters as ADPTNet
BETAS = {OURS: 0.00125, LINEAR: 0.0}
NAMES = {OURS: "ADPTNet (β=0.00125)"}  # as the paper's table has it
BELOW = {"Mamba": "mamba", "DeltaNet": "delta-net"}  # below ADPTNet on Memorisation in the paper; ABOVE: above it
ABOVE = {"GLA": "gated-linear-attention", "Gated DeltaNet": "gated-delta-net", "Transformer": "attention", HAWK: "hawk"}
OTHERS = {**BELOW, **ABOVE}
MATRICES = ["DeltaNet", "GLA", "Gated DeltaNet"]  # models with a matrix as state
TASKS = {
    "memorisation": MadMemorisation,
    "selective-copying": MadSelectiveCopying,
    "compression": MadCompression,
}
MODELS = {
    "memorisation": [OURS, LINEAR, *OTHERS],
    "selective-copying": [OURS, LINEAR, HAWK, MATCHED],
    "compression": [OURS, LINEAR, HAWK, *MATRICES],
}
SMALL: dict[str, dict[str, Any]] = {
    "memorisation": {"vocabulary": 2048},
    "selective-copying": {"length": 40, "tokens_to_copy": 6, "training_sequences": 1600},
    "compression": {"length": 16, "training_sequences": 1600},
}
TOY: dict[str, dict[str, Any]] = {
    "memorisation": {"vocabulary": 8, "length": 4, "training_sequences": 8},
    "selective-copying": {"vocabulary": 4, "length": 8, "tokens_to_copy": 2, "training_sequences": 8},
    "compression": {"vocabulary": 4, "length": 4, "training_sequences": 8},
}
BEST = MAD_OPTIMIZERS[-2]  # the highest learning rate, without decay, since 400 steps are few
SHARED = ("vocabulary", "length", "training_sequences", "tokens_to_copy")


def _make_points(scale: Scale) -> list[GridPoint]:
    """Return all settings and optimisers of the suite at `--scale paper`; one small setting per task below it."""
    points = []
    for name, kind in TASKS.items():
        if scale == "paper":
            tasks, optimisers, seeds = [_fields(task) for task in mad_settings(name)], MAD_OPTIMIZERS, 1
            sizes = {"width": 128, "pairs": 4, "batch": 128, "epochs": 200, "test": 1280}
        elif scale == "laptop":
            few = name == "memorisation"  # few sequences and steps
            tasks, seeds = [_fields(kind(**SMALL[name]))], 2 if name == "selective-copying" else 1
            # the other tasks need a higher learning rate than the suite has
            optimisers = (BEST if few else {"learning_rate": 3e-3, "weight_decay": 0.0},)
            sizes = {"width": 32, "pairs": 2, "batch": 128 if few else 64, "epochs": 200 if few else 40, "test": 1280}
        else:
            tasks, optimisers, seeds = [_fields(kind(**TOY[name]))], (BEST,), 1
            sizes = {"width": 8, "pairs": 1, "batch": 4, "epochs": 1, "test": 8}
        for task in tasks:
            for tuned in optimisers:
                chosen = {"rate": tuned["learning_rate"], "decay": tuned["weight_decay"], **task, **sizes}
                models = [*MODELS[name], *(["Transformer"] if name == "compression" and scale == "paper" else [])]
                for model in models:
                    points += [GridPoint({"task": name, "model": model, **chosen}, seed) for seed in range(seeds)]
    return points


def _fields(task: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(task).items() if key in SHARED}


def _layer(settings: Any) -> LayerSpec | MixerSpec:
    width = settings["width"]
    if settings["model"] not in BETAS:
        return baseline(OTHERS[settings["model"]], width)
    cell = ADPTSpec(
        width,
        state_size=2 * settings["pairs"] * width,
        beta=settings.get("beta", BETAS[settings["model"]]),
        spectrum=S4DInv(),
        input_projection=Expand(),
        gate=SoftplusGate(),
    )
    return LayerSpec(cell)


def _make_model(settings: Any, task: Task) -> ModuleSpec:
    if settings["model"] != MATCHED:
        return task.model(SwiGLUBlockSpec(_layer(settings)), 2)
    size = count_parameters(_make_model({**settings, "model": OURS}, task))
    return match_parameters(lambda width: task.model(SwiGLUBlockSpec(baseline("hawk", width)), 2), size, multiple_of=8)


def _run(point: GridPoint) -> RunOutput:
    settings = point.settings
    task = TASKS[settings["task"]](**{key: settings[key] for key in SHARED if key in settings})
    spec = _make_model(settings, task)
    config = TrainConfig(
        steps=settings["epochs"] * -(-task.training_sequences // settings["batch"]),
        batch_size=settings["batch"],
        learning_rate=settings["rate"],
        weight_decay=settings["decay"],
        optimizer=AdamW(betas=(0.9, 0.999)),
        schedule=Constant(),
        clip=None,
        seed=point.seed,
    )
    trained = train_and_score(spec, task, config, sequences=settings["test"], batch=settings["batch"])
    numbers = trained.numbers
    if isinstance(task, MadMemorisation):
        numbers["ceiling"] = 100 * task.ceiling
    return RunOutput(numbers, spec)


def _score(rows: Rows) -> float:
    """Return the score of one model on one task. Several seeds count as settings."""
    settings: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = (row.seed, *(row.settings.get(name) for name in SHARED))
        settings.setdefault(key, []).append(row.numbers["accuracy"])
    return mad_score(list(settings.values()))


def _scores(rows: Rows, task: str) -> dict[str, float]:
    return {model: _score(some) for (model,), some in rows.where(task=task).groups("model").items()}


def _format_scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{model} {score:.1f}" for model, score in scores.items()) + " %"


def _settings_scores(rows: Rows, task: str, model: str) -> dict[Any, float]:
    """Return the best accuracy over optimisers in each setting and seed of a task: the runs that are averaged."""
    best: dict[Any, float] = {}
    for row in rows.where(task=task, model=model):
        key = (row.seed, *(row.settings.get(name) for name in SHARED))
        best[key] = max(best.get(key, 0.0), row.numbers["accuracy"])
    return best


def _difference(rows: Rows, task: str, first: str, second: str) -> Estimate:
    """Return the accuracy of one model minus that of another, paired by setting and seed."""
    values = [_settings_scores(rows, task, model) for model in (first, second)]
    keys = [key for key in values[0] if key in values[1]]
    return paired_difference([values[0][k] for k in keys], [values[1][k] for k in keys], "points")


def _describe(rows: Rows, task: str) -> str:
    """Return scores and parameters of every model."""
    counts = {m: max(some.numbers("parameters")) for (m,), some in rows.where(task=task).groups("model").items()}
    scores = _scores(rows, task)
    return ", ".join(f"{model} {score:.1f} ({counts[model]:,} parameters)" for model, score in scores.items())


def _check_hawk(rows: Rows) -> ClaimVerdict:
    """On Selective Copying the accuracy of ADPTNet minus that of Hawk, paired by setting and seed, has an interval
    above 0. Two points matter, half of the paper's difference."""
    found = _difference(rows, "selective-copying", OURS, HAWK)
    return judge_increase(found, 2, _describe(rows, "selective-copying"))


def _check_matched(rows: Rows) -> ClaimVerdict:
    """On Selective Copying the accuracy of ADPTNet minus that of a Hawk with as many parameters, paired by setting and
    seed, has an interval above 0. Two points matter, half of the paper's difference."""
    found = _difference(rows, "selective-copying", OURS, MATCHED)
    return judge_increase(found, 2, _describe(rows, "selective-copying"))


def _check_linear(rows: Rows) -> ClaimVerdict:
    """On Selective Copying the accuracy of ADPTNet minus that of the same network with β = 0, paired by setting and
    seed, has an interval above 0. Two points matter."""
    found = _difference(rows, "selective-copying", OURS, LINEAR)
    return judge_increase(found, 2, _describe(rows, "selective-copying"))


def _check_compression(rows: Rows) -> ClaimVerdict:
    """On Compression the accuracy of ADPTNet minus that of GLA, DeltaNet and Gated DeltaNet, paired by setting and
    seed, has an interval above 0 for each. Half a point matters."""
    parts = [judge_increase(_difference(rows, "compression", OURS, m), 0.5, f"over {m}") for m in MATRICES]
    return combine(parts, _describe(rows, "compression"))


def _check_compression_best(rows: Rows) -> ClaimVerdict:
    """On Compression the accuracy of Hawk and of the Transformer minus that of ADPTNet, paired by setting and seed, has
    an interval above 0 for both. One point matters, half of the paper's smaller difference."""
    others = (HAWK, "Transformer")
    parts = [judge_increase(_difference(rows, "compression", m, OURS), 1, f"{m} over ADPTNet") for m in others]
    return combine(parts, _describe(rows, "compression"))


def _check_memorisation(rows: Rows) -> ClaimVerdict:
    """On Memorisation the accuracy of ADPTNet is above those of Mamba and DeltaNet and below those of the other models,
    paired by setting and seed, with intervals above 0. Two points matter."""
    task = "memorisation"
    parts = [judge_increase(_difference(rows, task, OURS, model), 2, f"over {model}") for model in BELOW]
    parts += [judge_increase(_difference(rows, task, model, OURS), 2, f"{model} over ADPTNet") for model in ABOVE]
    return combine(parts, _describe(rows, task))


def _check_ceiling(rows: Rows) -> ClaimVerdict:
    """At one learning rate, Hawk's score is within 5 points of the share of facts that occur in training over the six
    vocabularies, and ADPTNet's accuracy is below Hawk's, paired by vocabulary."""
    ceilings = {row.settings["vocabulary"]: row.numbers["ceiling"] for row in rows}
    hawk = _settings_scores(rows, "memorisation", HAWK)
    place = 1 + SHARED.index("vocabulary")
    gap = estimate_mean([ceilings[key[place]] - value for key, value in hawk.items()], "points")
    below = _difference(rows, "memorisation", HAWK, OURS)
    text = _format_scores(_scores(rows, "memorisation"))
    return combine([judge_equal(gap, 5, "ceiling − Hawk"), judge_increase(below, 2, f"Hawk − ADPTNet; {text}")])


def _make_table(rows: Rows) -> Table:
    by_task = {task: _scores(rows, task) for task in TASKS}
    lines = [
        [NAMES.get(model, model), *(f"{scores[model]:.1f}" if model in scores else "--" for scores in by_task.values())]
        for model in (*MODELS["memorisation"], MATCHED)
        if any(model in scores for scores in by_task.values())
    ]
    return Table(["Model", "Memorisation", "Selective Copy", "Compression"], lines)


def _draw(rows: Rows) -> "Figure":
    return draw_accuracies(rows, "model", score=_score, panels="task")


def _make_subset(task: str, *models: str, **settings: Any) -> dict[str, Any]:
    """Return the subset of points of one task, for ADPTNet and the given models."""
    return {"task": [task], "model": [OURS, *models], **{key: [value] for key, value in settings.items()}}


RECIPES = {
    "table:mad_results": Recipe(
        version=1,
        points=_make_points,
        run=_run,
        checks={
            "hawk": Check(_check_hawk, "laptop", _make_subset("selective-copying", HAWK)),
            "hawk-matched": Check(_check_matched, "laptop", _make_subset("selective-copying", MATCHED)),
            "linear": Check(_check_linear, "laptop", _make_subset("selective-copying", LINEAR)),
            "compression": Check(_check_compression, "laptop", _make_subset("compression", *MATRICES)),
            "compression-best": Check(
                _check_compression_best,
                "paper",
                _make_subset("compression", HAWK, "Transformer"),
                "the Transformer is run at full size only",
            ),
            "memorisation": Check(_check_memorisation, "laptop", _make_subset("memorisation", *OTHERS)),
            "ceiling": Check(
                _check_ceiling,
                "paper",
                _make_subset("memorisation", LINEAR, HAWK, rate=BEST["learning_rate"], decay=0.0),
            ),
        },
        figures={"Accuracy of every run, and scores (bars)": _draw},
        table=_make_table,
        cost={"smoke": "3 s", "laptop": "19 min", "paper": "years; Memorisation of three models at one rate: 3 h"},
        dtype=torch.float32,
        options={"beta": "β of ADPTNet, 0.00125 in the paper; larger ones are its future work"},
    ),
}
