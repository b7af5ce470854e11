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

from ...baselines import baseline
from ...tasks import MAD_OPTIMIZERS, MadCompression, MadMemorisation, MadSelectiveCopying, mad_score, mad_settings
from ...training import AdamW, Constant, TrainConfig
from ..recipe import Check, ClaimVerdict, GridPoint, Recipe, Rows, RunOutput, Scale, Table, decide
from ..scoring import draw_accuracies, train_and_score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, LINEAR, HAWK = "ADPTNet", "β = 0", "Hawk"
BETAS = {OURS: 0.00125, LINEAR: 0.0}
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
    "selective-copying": [OURS, LINEAR, HAWK],
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
                for model in MODELS[name]:
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
        beta=BETAS[settings["model"]],
        spectrum=S4DInv(),
        input_projection=Expand(),
        gate=SoftplusGate(),
    )
    return LayerSpec(cell)


def _run(point: GridPoint) -> RunOutput:
    settings = point.settings
    task = TASKS[settings["task"]](**{key: settings[key] for key in SHARED if key in settings})
    spec = task.model(SwiGLUBlockSpec(_layer(settings)), 2)
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


def _judge_best(rows: Rows, task: str) -> ClaimVerdict:
    """Decide whether ADPTNet has the highest score on a task."""
    scores = _scores(rows, task)
    holds = all(scores[OURS] > score for model, score in scores.items() if model != OURS)
    return decide(holds, _format_scores(scores))


def _check_hawk(rows: Rows) -> ClaimVerdict:
    """On Selective Copying the score of ADPTNet is higher than that of Hawk."""
    return _judge_best(rows, "selective-copying")


def _check_linear(rows: Rows) -> ClaimVerdict:
    """On Selective Copying the score of ADPTNet is higher than that of the same network with β = 0."""
    return _judge_best(rows, "selective-copying")


def _check_compression(rows: Rows) -> ClaimVerdict:
    """On Compression the score of ADPTNet is higher than those of GLA, DeltaNet and Gated DeltaNet."""
    return _judge_best(rows, "compression")


def _check_memorisation(rows: Rows) -> ClaimVerdict:
    """On Memorisation ADPTNet's score is above Mamba's and DeltaNet's, and below those of the other models."""
    scores = _scores(rows, "memorisation")
    holds = all(scores[OURS] > scores[model] for model in BELOW) and all(scores[OURS] < scores[m] for m in ABOVE)
    return decide(holds, _format_scores(scores))


def _check_ceiling(rows: Rows) -> ClaimVerdict:
    """At one learning rate, Hawk's score is within 2 points of the share of facts that occur in training, and ADPTNet's
    is below Hawk's."""
    scores = _scores(rows, "memorisation")
    ceilings = rows.groups("vocabulary").values()
    ceiling = sum(some[0].numbers["ceiling"] for some in ceilings) / len(ceilings)
    holds = abs(scores[HAWK] - ceiling) <= 2 and scores[OURS] < scores[HAWK]
    return decide(holds, f"{_format_scores(scores)}; at most {ceiling:.1f} %")


def _make_table(rows: Rows) -> Table:
    by_task = {task: _scores(rows, task) for task in TASKS}
    lines = [
        [model, *(f"{scores[model]:.1f}" if model in scores else "--" for scores in by_task.values())]
        for model in MODELS["memorisation"]
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
            "linear": Check(_check_linear, "laptop", _make_subset("selective-copying", LINEAR)),
            "compression": Check(_check_compression, "laptop", _make_subset("compression", *MATRICES)),
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
    ),
}
