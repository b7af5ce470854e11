"""Settings of the S5 word problem (appendix:s5_training_config) and of its smaller version with S3.

S5 is the symmetric group, not the state-space model.
At `--scale paper` the group is S5, the width 512 and training takes 16 384 steps. At smaller scales the group is S3 and
the width 64, where the same claims can be tested in half a minute per run. Optimizer, learning rate, clipping and
schedule are the defaults of `training.TrainConfig`.
"""

from typing import Any

from adptnet.cells import ADPTSpec, CellSpec, ReLURNN
from adptnet.nn import LayerSpec
from adptnet.nn.block import BlockSpec
from adptnet.nn.mixer import MixerSpec
from adptnet.nn.model import ModelSpec
from adptnet.recurrence.directions import FromState
from adptnet.recurrence.drive import LRU, SoftplusGate
from adptnet.recurrence.spectra import Linspace, Negative, S4DReal, Sparse, SpectrumSpec

from ...baselines import baseline
from ...tasks import WordProblem
from ...training import TrainConfig
from ..recipe import GridPoint, RunOutput
from ..scoring import train_and_score

__all__ = ["LENGTHS", "OPTIONS", "SIZES", "SPECTRA", "train_on_word_problem"]

SPECTRA: dict[str, SpectrumSpec] = {"Linspace": Linspace(), "S4D-Real": S4DReal()}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"group": "S3", "width": 8, "steps": 3, "batch": 16, "test": 32},
    "laptop": {"group": "S3", "width": 64, "steps": 1500, "batch": 256, "test": 2048},
    "paper": {
        "group": "S5",
        "width": 512,
        "steps": 16384,
        "batch": 512,
        "test": 4096,
        "evaluate": 1000,
        "precision": "bf16-all",  # half the time of a step; the paper does not state its precision
    },
}
LENGTHS = (8, 16, 32)  # the training length, and 2 and 4 times that
OPTIONS = {  # that `--set` may add to a point
    "select": '"all" to keep the weights with the least mean loss over all three lengths',
    "stop": "true to select by the accuracy at twice the training length and to stop when it is perfect",
    "precision": '"bf16-all" to train with products in bfloat16, K and V included',
}


def train_on_word_problem(point: GridPoint) -> RunOutput:
    """Train one network and score it at 1, 2 and 4 times the training length.

    Accuracy is the mean over the last min(10, L) positions.

    Args:
        point: Settings `group`, `width`, `steps`, `batch`, `test`, `spectrum` (None for a ReLU RNN), `beta`,
            `sparsity`, `negative`, and optionally `length`, `evaluate`, `relu`, `layer_norm`, `dot`, `model` (the name
            of a baseline) and the keys of `OPTIONS`.
    """
    settings = point.settings
    task = WordProblem(settings["group"], length=settings.get("length", LENGTHS[0]))
    lengths = [factor * task.length for factor in (1, 2, 4)]
    spec = ModelSpec(BlockSpec(_make_layer(settings), norm="batch", dropout=0.05), vocabulary=task.vocabulary)
    config = TrainConfig(
        seed=point.seed,
        steps=settings["steps"],
        batch_size=settings["batch"],
        evaluate_every=settings.get("evaluate"),
        precision=settings.get("precision", "float32"),
        **_choose_selection(settings, lengths),
    )
    trained = train_and_score(spec, task, config, sequences=settings["test"], lengths=lengths)
    last = [100 * float(scores["last_token"]) for scores in trained.scores]  # type: ignore[arg-type]
    return RunOutput({**trained.numbers, "last token": last}, spec)


def _choose_selection(settings: Any, lengths: list[int]) -> dict[str, Any]:
    """Return which weights to keep, and when to stop."""
    if settings.get("stop"):
        twice = (lengths[1], lengths[0], lengths[2])
        return {"lengths": twice, "select_by": "accuracy", "stop_at": 1.0 if settings.get("evaluate") else None}
    if settings.get("select") == "all":
        return {"lengths": tuple(lengths), "select_by": "loss", "select_at": "mean"}
    return {"select_by": "loss"}


def _make_layer(settings: Any) -> LayerSpec | MixerSpec:
    if "model" in settings:
        return baseline(settings["model"], settings["width"])
    return LayerSpec(_make_cell(settings))


def _make_cell(settings: Any) -> CellSpec:
    if settings["spectrum"] is None:
        return ReLURNN(settings["width"])
    direction = FromState(**{key: settings[key] for key in ("relu", "layer_norm", "dot") if key in settings})
    return ADPTSpec(
        settings["width"],
        beta=settings["beta"],
        spectrum=_make_spectrum(settings),
        direction=direction,
        gain=LRU(),
        gate=SoftplusGate(),
    )


def _make_spectrum(settings: Any) -> SpectrumSpec:
    spectrum = SPECTRA[settings["spectrum"]]
    if settings["sparsity"]:
        spectrum = Sparse(spectrum, settings["sparsity"])
    return Negative(spectrum, 0.5) if settings["negative"] else spectrum
