"""A residual block: norm, layer, GELU, gated linear unit, and a skip connection."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._dtype import compute_dtype
from .._typing import Device, DType
from .._validate import check_lengths, make_validity_mask
from ..errors import SpecError
from ..ops._fx import Proxy, record_call
from ..ops._torch_state import has_values
from ..spec import ModuleSpec, check_fraction, reset_from_spec, spec, suggest_name
from .adpt_layer import LayerSpec
from .bidirectional import BidirectionalSpec, check_layer
from .mixer import MixerSpec
from .packing import check_padded
from .streaming import Streamable

__all__ = ["BlockSpec", "Norm", "NormName", "ResidualBlock"]

NormName = Literal["batch", "layer", "rms"]


@spec
class BlockSpec(ModuleSpec):
    """A residual block around a layer.

    Attributes:
        layer: A recurrent layer, a bidirectional layer, or a mixer.
        norm: "batch", "layer" or "rms".
        prenorm: True for a norm before the layer, False for a norm after the sum.
        glu: True for a gated linear unit as output map, False for a linear map.
        dropout: Dropout probability after the activation and after the output map.
    """

    layer: LayerSpec | BidirectionalSpec | MixerSpec
    norm: NormName = "layer"
    prenorm: bool = True
    glu: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_layer(self, self.layer)
        if self.norm not in get_args(NormName):
            raise SpecError(
                f"BlockSpec(norm={self.norm!r}) is unknown.{suggest_name(str(self.norm), get_args(NormName))}"
            )
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)

    @property
    def width(self) -> int:
        return self.layer.width

    def build(self, *, device: Device = None, dtype: DType = None) -> "ResidualBlock":
        return ResidualBlock(self, device=device, dtype=dtype)


class ResidualBlock(Streamable):
    """The residual block z + W(dropout(GELU(layer(norm(z))))): (batch, time, width) in and out.

    Args:
        spec: The description of the block.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: BlockSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        width = spec.width
        self.norm = Norm(spec.norm, width, device=device, dtype=dtype)
        self.layer = spec.layer.build(device=device, dtype=dtype)
        self.output = nn.Linear(width, 2 * width if spec.glu else width, device=device, dtype=dtype)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor, state: Any = None, *, lengths: Tensor | None = None, **run: Any) -> tuple[Tensor, Any]:
        """Run the block along a sequence.

        Args:
            x: (batch, time, width).
            state: The state that an earlier call returned.
            lengths: (batch,) true lengths of right-padded sequences.
            run: Further keyword arguments of the layer.

        Returns:
            Outputs (batch, time, width) and the state of the layer.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths)
        check_padded(x)
        lengths = check_lengths(lengths, x.shape[0], x.shape[1], x.device)
        keep = None if lengths is None else make_validity_mask(lengths, x.shape[1])
        x = x if keep is None else torch.where(keep.unsqueeze(-1), x, 0.0)
        mixed, after = self.layer(self.norm(x, keep) if self.spec.prenorm else x, state, lengths=lengths, **run)
        return self._add_residual(x, mixed, keep), after

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Run one step on (batch, width).

        Args:
            x: (batch, width).
            state: The state that an earlier call returned.
        """
        mixed, after = self.layer.step(self.norm(x) if self.spec.prenorm else x, state)
        return self._add_residual(x, mixed, None), after

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Any:
        """Return the state before the first step.

        Args:
            batch: Number of sequences.
            device: Device of the state; that of the parameters by default.
            dtype: Dtype of the state; that of the recurrence by default.
        """
        layer: Any = self.layer
        return layer.initial_state(batch, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def _add_residual(self, x: Tensor, mixed: Tensor, keep: Tensor | None) -> Tensor:
        y: Tensor = self.output(self.dropout(functional.gelu(mixed)))
        y = x + self.dropout(functional.glu(y, -1) if self.spec.glu else y)
        y = y if self.spec.prenorm else self.norm(y, keep)
        return y if keep is None else torch.where(keep.unsqueeze(-1), y, 0.0)


class Norm(nn.Module):
    """A norm over the features. Statistics of the batch norm are over batch and time, without padding.

    Args:
        name: "batch", "layer" or "rms".
        width: Number of features.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, name: NormName, width: int, *, device: Device = None, dtype: DType = None):
        super().__init__()
        kinds = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "rms": nn.RMSNorm}
        self.norm = kinds[name](width, device=device, dtype=dtype)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Normalize the features of each step.

        Args:
            x: (..., width); with `keep`, (batch, time, width).
            keep: (batch, time) bool, False in the padding; None without padding.
        """
        if not isinstance(self.norm, (nn.BatchNorm1d, nn.SyncBatchNorm)):
            if isinstance(self.norm, nn.RMSNorm) and self.norm.weight is not None:
                x = x.to(self.norm.weight.dtype)  # autocast does so for a layer norm, but not here
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
    """Apply a batch norm to the steps where `keep` is True, with a mask in place of data-dependent indexing.

    Under `torch.compile` no tensor may have a shape that depends on the data. Results and running statistics are those
    of indexing, up to rounding.
    """
    assert isinstance(norm, (nn.BatchNorm1d, nn.SyncBatchNorm))
    inside = keep.unsqueeze(-1)
    if not norm.training and norm.running_mean is not None:
        normed: Tensor = norm(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        return torch.where(inside, normed, 0.0)
    count = inside.sum()
    if norm.training:  # one value has no variance; torch raises an error without a mask, too
        torch._assert_async(count > 1, "a batch norm in training mode needs at least two valid steps; got one or none.")
    wide = x.to(compute_dtype(x.dtype))
    mean = torch.where(inside, wide, 0.0).sum((0, 1)) / count
    variance = torch.where(inside, (wide - mean).square(), 0.0).sum((0, 1)) / count
    if norm.training and norm.running_mean is not None:
        assert norm.num_batches_tracked is not None
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            share = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
            unbiased = variance * count / (count - 1)
            for running, current in ((norm.running_mean, mean), (norm.running_var, unbiased)):
                assert running is not None
                running.copy_((1 - share) * running + share * current)
    normed = (wide - mean) / (variance + norm.eps).sqrt()
    normed = normed if norm.weight is None else normed * norm.weight + norm.bias
    return torch.where(inside, normed, 0.0).to(x.dtype)
