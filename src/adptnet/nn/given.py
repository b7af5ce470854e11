"""Layers in place of their specs: a container takes the spec, and then a copy of the layer with its weights."""

import copy
import dataclasses
from typing import Any

from torch import nn

from .._typing import Device, DType
from ..cells import Cell, CellSpec
from ..errors import SpecError
from ..spec import Spec
from .adpt_layer import LayerSpec, Recurrent
from .layer import RecurrentLayer

__all__ = ["choose_depth", "find_spec", "make_layer", "place"]


@dataclasses.dataclass(frozen=True)
class GivenCell(CellSpec):
    """A cell that no spec describes, inside the spec of a container. It cannot be written as JSON.

    Attributes:
        width: Features of the input.
        cell: The cell.
    """

    width: int
    cell: Cell

    def build(self, *, device: Device = None, dtype: DType = None) -> Cell:
        return copy.deepcopy(self.cell).to(device=device, dtype=dtype)


def make_layer(layer: Any) -> Any:
    """Return a layer, around `layer` if it is a cell or a recurrent module of `torch.nn`; a spec as it is.

    Args:
        layer: What a user passed as a layer.
    """
    if isinstance(layer, Cell | nn.RNNCellBase | nn.RNNBase):
        return Recurrent(layer, batch_first=True)
    return layer


def find_spec(layer: Any) -> Any:
    """Return the spec of a layer; a spec as it is.

    Args:
        layer: A spec; or a layer, a cell or a recurrent module of `torch.nn`.

    Raises:
        SpecError: The layer has different numbers of features in and out.
    """
    layer = make_layer(layer)
    if not isinstance(layer, nn.Module):
        return layer
    if isinstance(layer, RecurrentLayer) and layer.spec is None:
        if layer.output_size != layer.width:
            raise SpecError(
                f"this layer maps {layer.width} to {layer.output_size} features, and a block or stack needs as many "
                "out as in. Pass Recurrent(cell, readout=projections.Dense())."
            )
        return LayerSpec(GivenCell(layer.width, layer.cell), layer._readout, layer.batch_first)
    spec = getattr(layer, "spec", None)
    return spec if isinstance(spec, Spec) else layer


def place(layer: Any, spec: Any, device: Device, dtype: DType) -> Any:
    """Return a new module for a place in a container: a copy of a layer with its weights, or one built from a spec.

    Args:
        layer: What a user passed: a layer or its spec.
        spec: Its spec.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """
    if isinstance(layer, nn.Module):
        return copy.deepcopy(layer).to(device=device, dtype=dtype)
    return spec.build(device=device, dtype=dtype)


def choose_depth(owner: str, depth: int, others: dict[str, Any]) -> int:
    """Return the number of layers, which may be passed under its name in `nn.GRU`.

    Args:
        owner: The name of the class, for the message.
        depth: The number of layers.
        others: Further keyword arguments, from which `num_layers` is removed.

    Raises:
        SpecError: Both names are passed.
    """
    alias = others.pop("num_layers", None)
    if alias is not None and depth != 1:
        raise SpecError(f"{owner}(depth={depth!r}, num_layers={alias!r}): both are the number of layers. Pass depth=.")
    chosen: int = depth if alias is None else alias
    return chosen
