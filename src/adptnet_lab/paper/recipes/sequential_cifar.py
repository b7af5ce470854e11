"""Sequential CIFAR-10 with directions from the state and from the input (sec:scifar).

Complex S4D-Inv in the set-up of S4D's small model. Below the scale paper: images averaged down, a narrow network, and
other models beside ours where the paper quotes the literature. The scale smoke takes pictures of its own.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from adptnet.cells import ADPTSpec
from adptnet.errors import DataError
from adptnet.nn import LayerSpec
from adptnet.nn.block import BlockSpec
from adptnet.nn.mixer import MixerSpec
from adptnet.recurrence.directions import FromInput, FromState
from adptnet.recurrence.projections import Expand
from adptnet.recurrence.spectra import S4DInv, Spectrum

from ...baselines import baseline
from ...tasks import SequentialImage
from ...training import Cosine, TrainConfig
from ..recipe import Check, Finding, Outcome, Point, Recipe, Rows, Scale, Table, Verdict
from ..scoring import bars, by_setting, difference, mean_accuracy, scored, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "ADPTNet"
OTHERS = {"Mamba": "mamba", "Transformer": "attention"}
GENERATED = "generated"
TRAINING_IMAGES = 45_000  # of CIFAR-10, without the tenth that is held out
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"data": GENERATED, "side": 4, "images": 16, "test": 8, "width": 4, "pairs": 1, "batch": 8, "epochs": 1},
    "laptop": {"data": "cifar10", "images": 4000, "test": 1000, "width": 32, "pairs": 1, "batch": 50, "epochs": 10},
    "paper": {
        "data": "cifar10",
        "side": None,
        "images": None,
        "test": 10_000,
        "width": 128,
        "pairs": 2,
        "batch": 50,
        "epochs": 100,
    },
}
BEST_SELECTIVE = 76.5  # Mamba, of the rows that the paper quotes
BEST_RECURRENT = 74.4  # UR-GRU


def _seeds(scale: Scale) -> range:
    return range(3 if scale == "laptop" else 1)


def _state_points(scale: Scale) -> list[Point]:
    shared = {"source": "state", "depth": 2, "side": 16, **SIZES[scale], "rate": 0.01}
    return [Point({"model": OURS, "beta": beta, **shared}, seed) for beta in (0.0, 0.0125) for seed in _seeds(scale)]


def _input_points(scale: Scale) -> list[Point]:
    """The other models at the scale laptop alone: the paper quotes theirs."""
    shared = {"source": "input", "depth": 4 if scale == "paper" else 2, "side": 8, **SIZES[scale], "rate": 0.01}
    if scale == "laptop":
        shared["epochs"] = 6  # Mamba takes its time
    kinds: list[dict[str, Any]] = [{"model": OURS, "beta": 0.0125}]
    if scale != "paper":
        kinds += [{"model": name, "beta": None} for name in OTHERS]
    return [Point({**kind, **shared}, seed) for kind in kinds for seed in _seeds(scale)]


def _layer(settings: Any) -> LayerSpec | MixerSpec:
    if settings["model"] != OURS:
        return baseline(OTHERS[settings["model"]], settings["width"])
    cell = ADPTSpec(
        settings["width"],
        state_size=2 * settings["pairs"] * settings["width"],
        beta=settings["beta"],
        spectrum=S4DInv(),
        direction=FromInput() if settings["source"] == "input" else FromState(),
        input_projection=Expand(),
    )
    return LayerSpec(cell)


def _run(point: Point) -> Finding:
    settings = point.settings
    with tempfile.TemporaryDirectory() as folder:
        data = _pictures(Path(folder)) if settings["data"] == GENERATED else settings["data"]
        task = SequentialImage(data, side=settings["side"], training_images=settings["images"])
        spec = task.model(BlockSpec(_layer(settings), prenorm=False, dropout=0.1), settings["depth"])
        steps = settings["epochs"] * (task.size("train") // settings["batch"])
        config = TrainConfig(
            steps=steps,
            batch_size=settings["batch"],
            learning_rate=settings["rate"],
            weight_decay=0.01,
            schedule=Cosine(warmup=1 / 90),
            clip=None,
            seed=point.seed,
        )
        numbers = scored(spec, task, config, sequences=settings["test"], batch=50, watch=_slow_spectra).numbers
    return Finding(numbers, spec)


def _slow_spectra(model: nn.Module) -> None:
    """A tenth of the learning rate for timescales, as S4D has it."""
    for module in model.modules():
        if isinstance(module, Spectrum):
            for parameter in module.parameters(recurse=False):
                parameter._optim = {"weight_decay": 0.0, "lr": 1e-3}  # type: ignore[attr-defined]


def _pictures(folder: Path) -> str:
    """Two kinds of small pictures, bright above and bright below, with noise."""
    generator = np.random.default_rng(0)
    labels = np.arange(32) % 2
    pictures = generator.integers(0, 100, (32, 4, 4, 3), dtype=np.uint8)
    pictures[labels == 0, :2] += 100
    pictures[labels == 1, 2:] += 100
    path = folder / "pictures.npz"
    np.savez(path, x_train=pictures, y_train=labels, x_test=pictures, y_test=labels)
    return str(path)


def _lacks(scale: Scale) -> str | None:
    if scale == "smoke":
        return None
    try:
        found = SequentialImage().size("train")
    except DataError as error:
        return str(error)
    if scale == "paper" and found < TRAINING_IMAGES:
        return (
            f"it needs all of CIFAR-10, {TRAINING_IMAGES:,} images to train on; those found are {found:,}. "
            "Fetch it: adptnet data fetch cifar10."
        )
    return None


def _matches(rows: Rows) -> Verdict:
    """β = 0.0125 minus β = 0, in the mean over seeds, is within 2 points, and both are above twice chance."""
    found = difference(rows, {"beta": 0.0125}, {"beta": 0.0})
    lowest = min(mean_accuracy(some) for some in rows.groups("beta").values())
    holds = abs(found.mean) < 2 and lowest > 2 * rows[0].numbers["chance"]
    return Verdict.of(holds, f"{found}; by β {shown(rows, 'beta')}")


def _recurrent(rows: Rows) -> Verdict:
    """The accuracy at β = 0.0125 is above 74.4 %, the best of the recurrent networks that the paper quotes."""
    return Verdict.of(mean_accuracy(rows.where(beta=0.0125)) > BEST_RECURRENT, shown(rows, "beta"))


def _two_layers(rows: Rows) -> Verdict:
    """The accuracy at β = 0.0125 is above 76.5 %, the best of the selective models that the paper quotes."""
    return Verdict.of(mean_accuracy(rows.where(beta=0.0125)) > BEST_SELECTIVE, shown(rows, "beta"))


def _selective(rows: Rows) -> Verdict:
    """The accuracy is above 76.5 %, the best of the models that the paper quotes."""
    return Verdict.of(mean_accuracy(rows.where(model=OURS)) > BEST_SELECTIVE, shown(rows, "model"))


def _parameters(rows: Rows) -> Verdict:
    """The paper prints no number of parameters, neither its own nor theirs: there is nothing to compare with."""
    counts = {model: some[0].numbers["parameters"] for (model,), some in rows.groups("model").items()}
    ours = ", ".join(f"{m} {count:,}" for m, count in counts.items())
    return Verdict(Outcome.NOT_TESTABLE, f"nor at any other: the paper prints no number of parameters. Ours: {ours}")


def _beside(rows: Rows) -> Verdict:
    """ADPTNet minus Mamba and minus a Transformer, paired by seed, each have a 95 % interval above 0."""
    found = {name: difference(_alike(rows), {"model": OURS}, {"model": name}) for name in OTHERS}
    differences = "; ".join(f"minus {name} {each}" for name, each in found.items())
    return Verdict.of(all(each.low > 0 for each in found.values()), f"{differences}; {shown(rows, 'model')}")


def _alike(rows: Rows) -> Rows:
    """Without β, which the others have not."""
    return Rows([row._replace(settings={**row.settings, "beta": None}) for row in rows])


def _state_table(rows: Rows) -> Table:
    return by_setting(rows, {"model": "Model", "beta": "β"})


def _draw(key: str) -> Callable[[Rows], "Figure"]:
    return lambda rows: bars(rows, key)


_SHARED: dict[str, Any] = {"version": 1, "run": _run, "table": _state_table, "dtype": torch.float32, "lacks": _lacks}

RECIPES = {
    "table:linear_scifar_results": Recipe(
        points=_input_points,
        checks={
            "selective": Check(_selective, "paper"),
            "parameters": Check(_parameters),
            "beside": Check(_beside, "laptop", {"depth": [2]}),
        },
        figures={"Accuracy by model (points: runs)": _draw("model")},
        cost={"smoke": "1 s", "laptop": "5 min", "paper": "11 days"},
        **_SHARED,
    ),
    "table:non-linear_scifar_results": Recipe(
        points=_state_points,
        checks={
            "matches": Check(_matches, "laptop"),
            "recurrent": Check(_recurrent, "paper"),
            "two-layers": Check(_two_layers, "paper"),
        },
        figures={"Accuracy by β (points: runs)": _draw("beta")},
        cost={"smoke": "1 s", "laptop": "7 min", "paper": "10 days"},
        **_SHARED,
    ),
}
