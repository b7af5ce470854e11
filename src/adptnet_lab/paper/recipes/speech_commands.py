"""Spiking Speech Commands: SpikingADPTNet and SiLIF (sec:ssc).

`--scale paper` needs the files of the data set, `ssc_train.h5`, `ssc_valid.h5` and `ssc_test.h5`, which each user
downloads. At smaller scales parameters are counted at full size, and small networks learn synthetic words, each a path
through the channels over time.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from adptnet.nn import SpikingModelSpec, silif_for_speech, spiking_adpt_for_speech

from ...baselines import count_parameters
from ...training import Adam, ReduceOnPlateau, TrainConfig
from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale, Table
from ..scoring import draw_accuracies, estimate_accuracy, make_accuracy_table, train_and_score
from ..settings.spoken_words import SpokenWords, describe_missing_files
from ..verdicts import ClaimVerdict, combine, decide, judge_limit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, SILIF = "SpikingADPTNet", "SiLIF"
COUNTS = {512: 355_689, 2048: 1_069_481}  # parameters by width, as printed in the paper
BEST_BEFORE = 82.42  # percent; DelRec, as quoted in the paper
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"words": 2, "channels": 20, "recordings": 16, "steps": 8, "batch": 8, "epochs": 1},
    "laptop": {"words": 10, "channels": 140, "recordings": 400, "steps": 50, "batch": 40, "epochs": 8},
    "paper": {"words": 35, "channels": 700, "recordings": None, "steps": 300, "batch": 256, "epochs": 100},
}


def _find_missing_data(scale: Scale) -> str | None:
    return describe_missing_files() if scale == "paper" else None


def _make_points(scale: Scale) -> list[GridPoint]:
    sizes = SIZES[scale]
    kinds: list[tuple[str, int, int]] = [(OURS, 512, 1), (OURS, 2048, 4), (SILIF, 512, 1)]  # as in the paper
    if scale != "paper":
        kinds = [(OURS, 64, 2), (SILIF, 64, 2)] if scale == "laptop" else [(OURS, 8, 1), (SILIF, 8, 1)]
    return [
        GridPoint({"model": model, "width": width, **sizes}, seed)
        for model, width, seeds in kinds
        for seed in range(seeds)
    ]


def _make_network(settings: Any, task: SpokenWords) -> SpikingModelSpec:
    build = spiking_adpt_for_speech if settings["model"] == OURS else silif_for_speech
    sizes = {"input_size": task.input_size, "output_size": task.output_size}
    network = build(settings["width"], **sizes, dropout=0.5, dt=0.004)
    return (
        network if task.recordings is None else dataclasses.replace(network, momentum=0.2)
    )  # since there are few batches


def _run(point: GridPoint) -> RunOutput:
    settings = point.settings
    task = SpokenWords(*(settings[key] for key in ("steps", "channels", "words", "recordings")))
    network = _make_network(settings, task)
    epoch = -(-task.size("train") // settings["batch"])
    config = TrainConfig(
        steps=settings["epochs"] * epoch,
        batch_size=settings["batch"],
        learning_rate=0.01,
        optimizer=Adam(),
        schedule=ReduceOnPlateau(factor=0.7, patience=10),
        clip=None,
        seed=point.seed,
        evaluate_every=epoch,
        evaluation_size=task.size("validation"),
        evaluation_batch=settings["batch"],
    )
    trained = train_and_score(network, task, config, sequences=task.size("test"), batch=settings["batch"])
    full = {str(width): count_parameters(spiking_adpt_for_speech(width)) for width in COUNTS}
    return RunOutput({**trained.numbers, "full size": full}, network)


def _check_parameters(rows: Rows) -> ClaimVerdict:
    """The networks of widths 512 and 2048 have exactly these numbers of parameters."""
    counts = rows[0].numbers["full size"]
    return decide(counts == {str(width): count for width, count in COUNTS.items()}, f"by width {counts}")


def _check_learns(rows: Rows) -> ClaimVerdict:
    """On synthetic words the mean accuracy of both networks has an interval above three times chance."""
    chance = rows[0].numbers["chance"]
    parts = [
        judge_limit(estimate_accuracy(some), above=3 * chance, why=model)
        for (model,), some in rows.groups("model").items()
    ]
    return combine(parts, f"{'; '.join(part.why for part in parts)}; chance {chance:.0f} %")


def _check_small(rows: Rows) -> ClaimVerdict:
    """The accuracy at width 512 has an interval above 82.03 %."""
    return judge_limit(estimate_accuracy(rows), above=82.03)


def _check_large(rows: Rows) -> ClaimVerdict:
    """The mean accuracy at width 2048 has an interval more than 1 point above 82.42 %."""
    return judge_limit(estimate_accuracy(rows), above=BEST_BEFORE + 1)


def _check_commander(rows: Rows) -> ClaimVerdict:
    """The mean accuracy at width 2048 has an interval above 83.26 %."""
    return judge_limit(estimate_accuracy(rows), above=83.26)


def _make_table(rows: Rows) -> Table:
    return make_accuracy_table(rows, {"model": "Model", "width": "State Size"})


def _draw(rows: Rows) -> "Figure":
    return draw_accuracies(rows, "model", panels="width")


_DATA = "it needs the recordings of Spiking Speech Commands"

RECIPES = {
    "table:ssc_results": Recipe(
        version=1,
        points=_make_points,
        run=_run,
        checks={
            "parameters": Check(_check_parameters),
            "learns": Check(_check_learns, "laptop", {"width": [8, 64]}),
            "small": Check(_check_small, "paper", {"model": [OURS], "width": [512]}, _DATA),
            "large": Check(_check_large, "paper", {"model": [OURS], "width": [2048]}, _DATA),
            "commander": Check(_check_commander, "paper", {"model": [OURS], "width": [2048]}, _DATA),
        },
        figures={"Accuracy (points: runs)": _draw},
        table=_make_table,
        cost={"smoke": "1 s", "laptop": "30 s", "paper": "a GPU for a week"},
        dtype=torch.float32,
        find_missing_data=_find_missing_data,
    ),
}
