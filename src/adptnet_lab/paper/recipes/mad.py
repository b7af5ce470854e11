"""MAD: Memorisation, Selective Copying and Compression beside other models in the same block (sec:mad_results).

A score is that of the suite: the best of the optimisers in each setting of a task, averaged over its settings. Where
the paper quotes the literature we run our own versions of the models, which are plain and slow; xLSTM and MesaNet
are not among them.
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
from ...tasks import MAD_OPTIMISERS, MadCompression, MadMemorisation, MadSelectiveCopying, mad_score, mad_settings
from ...training import AdamW, Constant, TrainConfig
from ..recipe import Check, Finding, Point, Recipe, Rows, Scale, Table, Verdict
from ..scoring import bars, scored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL = "table:mad_results"
OURS, LINEAR, HAWK = "ADPTNet", "β = 0", "Hawk"
BETAS = {OURS: 0.00125, LINEAR: 0.0}
BELOW = {"Mamba": "mamba", "DeltaNet": "delta-net"}  # what the paper is better than on Memorisation
ABOVE = {"GLA": "gated-linear-attention", "Gated DeltaNet": "gated-delta-net", "Transformer": "attention", HAWK: "hawk"}
OTHERS = {**BELOW, **ABOVE}
MATRICES = ["DeltaNet", "GLA", "Gated DeltaNet"]  # whose state is a matrix
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
BEST = MAD_OPTIMISERS[-2]  # the highest rate without decay: 400 steps are few
SHARED = ("vocabulary", "length", "training_sequences", "tokens_to_copy")


def _points(scale: Scale) -> list[Point]:
    """The settings of the suite and all its optimisers at the scale paper; one small setting of each task below it."""
    points = []
    for name, kind in TASKS.items():
        if scale == "paper":
            tasks, optimisers, seeds = [_fields(task) for task in mad_settings(name)], MAD_OPTIMISERS, 1
            sizes = {"width": 128, "pairs": 4, "batch": 128, "epochs": 200, "test": 1280}
        elif scale == "laptop":
            few = (
                name == "memorisation"
            )  # sequences, and steps: the highest rate of the suite is too slow for the others
            tasks, seeds = [_fields(kind(**SMALL[name]))], 2 if name == "selective-copying" else 1
            optimisers = (BEST if few else {"learning_rate": 3e-3, "weight_decay": 0.0},)
            sizes = {"width": 32, "pairs": 2, "batch": 128 if few else 64, "epochs": 200 if few else 40, "test": 1280}
        else:
            tasks, optimisers, seeds = [_fields(kind(**TOY[name]))], (BEST,), 1
            sizes = {"width": 8, "pairs": 1, "batch": 4, "epochs": 1, "test": 8}
        for task in tasks:
            for tuned in optimisers:
                chosen = {"rate": tuned["learning_rate"], "decay": tuned["weight_decay"], **task, **sizes}
                for model in MODELS[name]:
                    points += [Point({"task": name, "model": model, **chosen}, seed) for seed in range(seeds)]
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


def _run(point: Point) -> Finding:
    settings = point.settings
    task = TASKS[settings["task"]](**{key: settings[key] for key in SHARED if key in settings})
    spec = task.model(SwiGLUBlockSpec(_layer(settings)), 2)
    config = TrainConfig(
        steps=settings["epochs"] * -(-task.training_sequences // settings["batch"]),
        batch_size=settings["batch"],
        learning_rate=settings["rate"],
        weight_decay=settings["decay"],
        optimiser=AdamW(betas=(0.9, 0.999)),
        schedule=Constant(),
        clip=None,
        seed=point.seed,
    )
    numbers = scored(spec, task, config, sequences=settings["test"], batch=settings["batch"]).numbers
    if isinstance(task, MadMemorisation):
        numbers["ceiling"] = 100 * task.ceiling
    return Finding(numbers, spec)


def _score(rows: Rows) -> float:
    """Of one model on one task; seeds, where there are several, count as settings."""
    settings: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = (row.seed, *(row.settings.get(name) for name in SHARED))
        settings.setdefault(key, []).append(row.numbers["accuracy"])
    return mad_score(list(settings.values()))


def _scores(rows: Rows, task: str) -> dict[str, float]:
    return {model: _score(some) for (model,), some in rows.where(task=task).groups("model").items()}


def _words(scores: dict[str, float]) -> str:
    return ", ".join(f"{model} {score:.1f}" for model, score in scores.items()) + " %"


def _better(rows: Rows, task: str) -> Verdict:
    scores = _scores(rows, task)
    return Verdict.of(all(scores[OURS] > score for model, score in scores.items() if model != OURS), _words(scores))


def _hawk(rows: Rows) -> Verdict:
    """On Selective Copying the score of ADPTNet is higher than that of Hawk."""
    return _better(rows, "selective-copying")


def _linear(rows: Rows) -> Verdict:
    """On Selective Copying the score of ADPTNet is higher than that of the same network with β = 0."""
    return _better(rows, "selective-copying")


def _compression(rows: Rows) -> Verdict:
    """On Compression the score of ADPTNet is higher than those of GLA, DeltaNet and Gated DeltaNet."""
    return _better(rows, "compression")


def _memorisation(rows: Rows) -> Verdict:
    """On Memorisation ADPTNet's score is above Mamba's and DeltaNet's, and below those of the other models we have."""
    scores = _scores(rows, "memorisation")
    holds = all(scores[OURS] > scores[model] for model in BELOW) and all(scores[OURS] < scores[m] for m in ABOVE)
    return Verdict.of(holds, _words(scores))


def _ceiling(rows: Rows) -> Verdict:
    """At one rate Hawk's score is within 2 points of the share of facts that training shows, and ADPTNet's below it."""
    scores = _scores(rows, "memorisation")
    ceilings = rows.groups("vocabulary").values()
    ceiling = sum(some[0].numbers["ceiling"] for some in ceilings) / len(ceilings)
    holds = abs(scores[HAWK] - ceiling) <= 2 and scores[OURS] < scores[HAWK]
    return Verdict.of(holds, f"{_words(scores)}; at most {ceiling:.1f} %")


def _table(rows: Rows) -> Table:
    found = {task: _scores(rows, task) for task in TASKS}
    lines = [
        [model, *(f"{scores[model]:.1f}" if model in scores else "--" for scores in found.values())]
        for model in MODELS["memorisation"]
    ]
    return Table(["Model", "Memorisation", "Selective Copy", "Compression"], lines)


def _draw(rows: Rows) -> "Figure":
    return bars(rows, "model", heights=_score, panels="task")


def _of(task: str, *models: str, **settings: Any) -> dict[str, Any]:
    """The points of one task and some models."""
    return {"task": [task], "model": [OURS, *models], **{key: [value] for key, value in settings.items()}}


RECIPES = {
    LABEL: Recipe(
        version=1,
        points=_points,
        run=_run,
        checks={
            "hawk": Check(_hawk, "laptop", _of("selective-copying", HAWK)),
            "linear": Check(_linear, "laptop", _of("selective-copying", LINEAR)),
            "compression": Check(_compression, "laptop", _of("compression", *MATRICES)),
            "memorisation": Check(_memorisation, "laptop", _of("memorisation", *OTHERS)),
            "ceiling": Check(
                _ceiling, "paper", _of("memorisation", LINEAR, HAWK, rate=BEST["learning_rate"], decay=0.0)
            ),
        },
        figures={"Accuracy of every run, and scores (bars)": _draw},
        table=_table,
        cost={"smoke": "3 s", "laptop": "19 min", "paper": "years; Memorisation of three models at one rate: 3 h"},
        dtype=torch.float32,
    ),
}
