"""The residual block: norm, layer, GELU, a gated linear unit, and the input added back."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._typing import Device, DType
from ..errors import SpecError
from ..ops._fx import Proxy, record_call
from ..ops._torch_state import has_values
from ..solvers.problem import check_lengths, valid
from ..spec import ModuleSpec, check_fraction, nearest, reset_from_spec, spec
from .bidirectional import BidirectionalSpec, refuse_time_major
from .layer import LayerSpec
from .mixer import MixerSpec
from .packing import check_padded

__all__ = ["BlockSpec", "Norm", "NormName", "ResidualBlock"]

NormName = Literal["batch", "layer", "rms"]


@spec
class BlockSpec(ModuleSpec):
    """A residual block around a layer.

    Attributes:
        layer: The layer, two of them in both directions, or a mixer.
        norm: "batch", "layer" or "rms".
        prenorm: Whether the norm comes before the layer or after the sum.
        glu: Whether the output map is a gated linear unit or a plain linear one.
        dropout: After the activation and after the output map.
    """

    layer: LayerSpec | BidirectionalSpec | MixerSpec
    norm: NormName = "layer"
    prenorm: bool = True
    glu: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.layer, (LayerSpec, BidirectionalSpec, MixerSpec)):
            raise SpecError(
                f"BlockSpec(layer={type(self.layer).__name__}): must be a LayerSpec, BidirectionalSpec or MixerSpec: "
                "layer.spec."
            )
        if isinstance(self.layer, LayerSpec):
            refuse_time_major(self, self.layer)
        if self.norm not in get_args(NormName):
            raise SpecError(f"BlockSpec(norm={self.norm!r}) is unknown.{nearest(str(self.norm), get_args(NormName))}")
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)

    @property
    def width(self) -> int:
        return self.layer.width

    def build(self, *, device: Device = None, dtype: DType = None) -> "ResidualBlock":
        return ResidualBlock(self, device=device, dtype=dtype)


class ResidualBlock(nn.Module):
    """z + W(dropout(GELU(layer(norm(z))))): (batch, time, width) in and out, with the layer's state."""

    def __init__(self, spec: BlockSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        width = spec.width
        self.norm = Norm(spec.norm, width, device=device, dtype=dtype)
        self.layer = spec.layer.build(device=device, dtype=dtype)
        self.output = nn.Linear(width, 2 * width if spec.glu else width, device=device, dtype=dtype)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor, state: Any = None, *, lengths: Tensor | None = None, **run: Any) -> tuple[Tensor, Any]:
        """As `RecurrentLayer.forward`, on (batch, time, width)."""
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths)
        check_padded(x)
        lengths = check_lengths(lengths, x.shape[0], x.shape[1], x.device)
        keep = None if lengths is None else valid(lengths, x.shape[1])
        x = x if keep is None else torch.where(keep.unsqueeze(-1), x, 0.0)
        mixed, after = self.layer(self.norm(x, keep) if self.spec.prenorm else x, state, lengths=lengths, **run)
        return self._out(x, mixed, keep), after

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """As `RecurrentLayer.step`."""
        mixed, after = self.layer.step(self.norm(x) if self.spec.prenorm else x, state)
        return self._out(x, mixed, None), after

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def _out(self, x: Tensor, mixed: Tensor, keep: Tensor | None) -> Tensor:
        y: Tensor = self.output(self.dropout(functional.gelu(mixed)))
        y = x + self.dropout(functional.glu(y, -1) if self.spec.glu else y)
        y = y if self.spec.prenorm else self.norm(y, keep)
        return y if keep is None else torch.where(keep.unsqueeze(-1), y, 0.0)


class Norm(nn.Module):
    """A norm over the features; the batch norm takes its statistics over batch and time, padding left out."""

    def __init__(self, name: NormName, width: int, *, device: Device = None, dtype: DType = None):
        super().__init__()
        kinds = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "rms": nn.RMSNorm}
        self.norm = kinds[name](width, device=device, dtype=dtype)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        if not isinstance(self.norm, (nn.BatchNorm1d, nn.SyncBatchNorm)):
            normed: Tensor = self.norm(x)
            return normed
        if keep is None:
            flat: Tensor = self.norm(x.reshape(-1, x.shape[-1]))
            return flat.reshape(x.shape)
        if not has_values(x) and (type(self.norm) is nn.BatchNorm1d or x.is_meta):
            return _masked_batch_norm(self.norm, x, keep)
        normed = torch.zeros_like(x)
        normed[keep] = self.norm(x[keep]).to(x.dtype)
        return normed


def _masked_batch_norm(norm: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    """The batch norm of the steps to `keep`, by a mask: a compiled program has no tensor of as many rows as there are.

    The same numbers up to rounding, with the running statistics.
    """
    assert isinstance(norm, (nn.BatchNorm1d, nn.SyncBatchNorm))
    inside = keep.unsqueeze(-1)
    if not norm.training and norm.running_mean is not None:
        normed: Tensor = norm(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        return torch.where(inside, normed, 0.0)
    count = inside.sum()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = torch.where(inside, wide, 0.0).sum((0, 1)) / count
    variance = torch.where(inside, (wide - mean).square(), 0.0).sum((0, 1)) / count
    if norm.training and norm.running_mean is not None:
        assert norm.num_batches_tracked is not None
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            share = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
            unbiased = variance * count / (count - 1)
            for running, seen in ((norm.running_mean, mean), (norm.running_var, unbiased)):
                assert running is not None
                running.copy_((1 - share) * running + share * seen)
    normed = (wide - mean) / (variance + norm.eps).sqrt()
    normed = normed if norm.weight is None else normed * norm.weight + norm.bias
    return torch.where(inside, normed, 0.0).to(x.dtype)
