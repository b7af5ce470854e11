"""Training on Copy Memory with Lyapunov spectra along the way (table:baseline_trained_config).

The network is one residual block. Spectra are computed on a float64 copy of the network, along one test sequence.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adptnet import analysis
from adptnet.cells import ADPTCell, ADPTSpec
from adptnet.nn import ADPTNet, LayerSpec
from adptnet.nn.block import BlockSpec
from adptnet.recurrence.drive import EMA, RoPE
from adptnet.recurrence.projections import Dense, LowParam, Orthogonal, ProjectionSpec
from adptnet.recurrence.spectra import Linspace, Negative, SpectrumSpec

from ...tasks import CopyMemory
from ...training import Adam, Cosine, TrainConfig
from ..recipe import GridPoint, RunOutput
from ..scoring import train_and_score

__all__ = ["BATCH", "OPTIONS", "SCALAR", "copy_layers", "measure_spectrum", "rank_of_encoding", "train_on_copy_memory"]

BATCH = 64
SCALAR = {"encoding": "scalar"}  # the set-up that the paper cites; points without it embed tokens
OPTIONS = {  # that `--set` may add to a point
    "rope": '"tied" for rotary positions with the step sizes of the spectrum, as the paper writes them',
}


def rank_of_encoding(settings: Mapping[str, Any]) -> bool:
    """Return the rank of a point: runs with scalar input count before those with embedded tokens.

    Args:
        settings: Settings of the point.
    """
    return settings.get("encoding") == SCALAR["encoding"]


def train_on_copy_memory(point: GridPoint, snapshot: Callable[[ADPTNet, Tensor], dict[str, Any]]) -> RunOutput:
    """Train one network and take snapshots of its layer.

    Args:
        point: Settings `width`, `beta`, `weights` (of K and V), `negative` (fraction of negative eigenvalues),
            `length`, `sequences`, `test`, `epochs` (at which to take a snapshot), `rate`, and optionally `encoding`:
            "scalar" for the numbers themselves in one input channel, as in the task's source; tokens are embedded
            without it; and the keys of `OPTIONS`.
        snapshot: Called with a float64 copy of the layer and its input for one test sequence.
    """
    settings = point.settings
    spectrum: SpectrumSpec = Linspace(dt_min=1e-3, dt_max=1e-1, decay=0.5)
    if settings.get("negative"):
        spectrum = Negative(spectrum, settings["negative"])
    task = CopyMemory(
        settings["length"],
        training_sequences=settings["sequences"],
        test_sequences=settings["test"],
        encoding=settings.get("encoding", "tokens"),
    )
    cell = ADPTSpec(
        settings["width"],
        beta=settings["beta"],
        spectrum=spectrum,
        projection=_make_projection(settings["weights"], settings["width"]),
        gain=EMA(),
        rope=RoPE(tied=settings.get("rope") == "tied"),
    )
    spec = task.model(BlockSpec(LayerSpec(cell)))
    epoch = -(-settings["sequences"] // BATCH)
    config = TrainConfig(
        steps=settings["epochs"][-1] * epoch,
        batch_size=BATCH,
        learning_rate=settings["rate"],
        optimizer=Adam(),
        schedule=Cosine(),
        clip=None,
        seed=point.seed,
    )
    sample = next(task.evaluation("test", 1, 1)).inputs

    def watch(model: nn.Module) -> Callable[[int], Any]:
        def look(step: int) -> dict[str, Any] | None:
            if step % epoch or step // epoch not in settings["epochs"]:
                return None
            ((layer, x),) = copy_layers(model, sample)
            return snapshot(layer, x)

        return look

    trained = train_and_score(spec, task, config, sequences=settings["test"], watch=watch)
    return RunOutput({"snapshots": trained.observations, **trained.numbers}, spec)


def _make_projection(name: str, width: int) -> ProjectionSpec:
    """Return the projection of K and V. LowParam as in the paper: rank 32 and factors 32 and 4 at width 128."""
    low = LowParam(factors=(width // 4, 4), rank=width // 4)
    return {"dense": Dense(), "orthogonal": Orthogonal(), "LowParam": low}[name]


def copy_layers(model: nn.Module, sample: Tensor) -> list[tuple[ADPTNet, Tensor]]:
    """Return a float64 copy of each ADPTNet layer, without gradients, with its input for a sample.

    Args:
        model: The model, which is not changed.
        sample: Input of the model.
    """
    exact = sample.double() if sample.is_floating_point() else sample
    inputs = analysis.record_layer_inputs(copy.deepcopy(model).cpu().double(), exact).values()
    return [(layer.requires_grad_(False), x) for layer, x in inputs if isinstance(layer, ADPTNet)]


@torch.no_grad()
def measure_spectrum(layer: ADPTNet, x: Tensor) -> dict[str, Any]:
    """Return the Lyapunov exponents along the first sequence of `x`, ln |λ̄|, and the certified interval.

    Args:
        layer: The layer.
        x: Inputs, (batch, time, width).
    """
    assert isinstance(layer.cell, ADPTCell)
    return {
        "exponents": analysis.lyapunov_exponents(layer, x[0]).exponents,
        "log_eigenvalues": layer.cell.spectrum.log_modulus().sort(descending=True).values,
        "certified": list(analysis.certificate(layer).exponents),
    }
