"""Import of weights from the SiLIF authors' code (Maxtimer97/SSM-inspired-LIF)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._io.untrusted import read_npz
from ..cells import SiLIF
from ..errors import CheckpointError
from ..nn.spiking_model import SpikingModel, SpikingModelSpec

__all__ = ["from_silif"]

_NEURON = {"dt": "log_dt", "alpha": "log_decay", "beta": "log_slow_decay", "a": "coupling", "b": "jump"}
_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def from_silif(weights: str | Path | Mapping[str, Any]) -> SpikingModel:
    """Return a SiLIF network with the given weights, in evaluation mode.

    Args:
        weights: A state dict of the authors' code, as a mapping of tensors or arrays, or the path of an `.npz` file.

    Raises:
        CheckpointError: The file cannot be read, or its arrays are not those of a SiLIF network.
    """
    if isinstance(weights, (str, Path)):
        try:
            weights = read_npz(Path(weights))[0]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{weights} is not an .npz file of arrays: {error}.") from None
    try:
        arrays = {name: torch.as_tensor(value) for name, value in weights.items()}
    except (TypeError, ValueError) as error:  # a dtype or byte order that torch does not support
        raise CheckpointError(f"these are not the weights of a SiLIF network: {error}.") from None
    depth = sum(name.endswith(".dt") for name in arrays)
    named = dict(_map_names(depth))
    missing, unknown = sorted(set(named) - set(arrays)), sorted(set(arrays) - set(named))
    if not depth or missing or unknown:
        raise CheckpointError(
            f"these are not the weights of a SiLIF network: missing {missing[:3]}, unknown {unknown[:3]}. "
            "Names are like snn.0.dt, snn.0.W.weight, snn.0.norm.weight; the last layer is the read-out."
        )
    for name, array in arrays.items():
        if array.dim() != (2 if name.endswith(".W.weight") else 0 if name.endswith("_tracked") else 1):
            raise CheckpointError(f"{name} of a SiLIF network cannot have the shape {tuple(array.shape)}.")
        if not array.is_floating_point() and not name.endswith("_tracked"):
            raise CheckpointError(f"{name} of a SiLIF network is floating-point; this one is {array.dtype}.")
    width, channels = arrays["snn.0.W.weight"].shape
    spec = SpikingModelSpec(SiLIF(width), channels, arrays[f"snn.{depth}.W.weight"].shape[0], depth=depth)
    model = spec.build(dtype=arrays["snn.0.W.weight"].dtype)
    try:
        model.load_state_dict({ours: arrays[theirs] for theirs, ours in named.items()})
    except RuntimeError as error:
        raise CheckpointError(f"these are not the weights of one SiLIF network: {error}") from None
    return model.eval()


def _map_names(depth: int) -> list[tuple[str, str]]:
    """Return pairs of the authors' parameter names and ours."""
    pairs = [(f"snn.{depth}.alpha", "integrators.cell.decay")]
    for i in range(depth + 1):
        currents = f"layers.{i}.currents" if i < depth else "decoder"
        pairs.append((f"snn.{i}.W.weight", f"{currents}.projection.weight"))
        pairs += [(f"snn.{i}.norm.{name}", f"{currents}.norm.norm.{name}") for name in _NORM]
        if i < depth:
            pairs += [(f"snn.{i}.{theirs}", f"layers.{i}.neurons.cell.{ours}") for theirs, ours in _NEURON.items()]
    return pairs
