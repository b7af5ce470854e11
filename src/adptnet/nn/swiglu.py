"""The block of language models: a layer and a SwiGLU unit, each with a pre-norm and a skip connection."""

from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._typing import Device, DType
from .._validate import check_lengths, make_validity_mask
from ..errors import SpecError
from ..ops._fx import Proxy, record_call
from ..spec import ModuleSpec, check_fraction, check_size, reset_from_spec, spec, suggest_name
from .adpt_layer import LayerSpec
from .bidirectional import BidirectionalSpec, check_layer
from .block import Norm, NormName
from .mixer import MixerSpec
from .packing import check_padded
from .streaming import Streamable

__all__ = ["SwiGLUBlock", "SwiGLUBlockSpec"]


@spec
class SwiGLUBlockSpec(ModuleSpec):
    """A block with a layer and a SwiGLU unit: the default block of `SequenceModel`.

    The MAD benchmark compares layers in it.

    Attributes:
        layer: A recurrent layer, a bidirectional layer, or a mixer.
        norm: "batch", "layer" or "rms".
        expansion: The width of the unit is 2/3 · expansion · width, rounded up to a multiple of 16.
        dropout: Dropout probability after the layer and after the unit.
    """

    layer: LayerSpec | BidirectionalSpec | MixerSpec
    norm: NormName = "rms"
    expansion: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_layer(self, self.layer)
        if self.norm not in get_args(NormName):
            raise SpecError(
                f"SwiGLUBlockSpec(norm={self.norm!r}) is unknown.{suggest_name(self.norm, get_args(NormName))}"
            )
        check_size(self, expansion=self.expansion)
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)

    @property
    def width(self) -> int:
        return self.layer.width

    @property
    def inner(self) -> int:
        """Width of the SwiGLU unit."""
        return -(-2 * self.expansion * self.width // (3 * 16)) * 16

    @property
    def prenorm(self) -> bool:
        return True

    def build(self, *, device: Device = None, dtype: DType = None) -> "SwiGLUBlock":
        return SwiGLUBlock(self, device=device, dtype=dtype)


class SwiGLUBlock(Streamable):
    """The block z = x + layer(norm(x)), then z + W₃(SiLU(W₁ norm(z)) ⊙ W₂ norm(z)): (batch, time, width) in and out.

    Args:
        spec: The description of the block.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: SwiGLUBlockSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        width = spec.width
        self.norm = Norm(spec.norm, width, device=device, dtype=dtype)
        self.layer = spec.layer.build(device=device, dtype=dtype)
        self.unit_norm = Norm(spec.norm, width, device=device, dtype=dtype)
        self.enter = nn.Linear(width, 2 * spec.inner, bias=False, device=device, dtype=dtype)
        self.leave = nn.Linear(spec.inner, width, bias=False, device=device, dtype=dtype)
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
        mixed, after = self.layer(self.norm(x, keep), state, lengths=lengths, **run)
        return self._apply_unit(x + self.dropout(mixed), keep), after

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Run one step on (batch, width).

        Args:
            x: (batch, width).
            state: The state that an earlier call returned.
        """
        mixed, after = self.layer.step(self.norm(x), state)
        return self._apply_unit(x + self.dropout(mixed), None), after

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

    def _apply_unit(self, x: Tensor, keep: Tensor | None) -> Tensor:
        gate, value = self.enter(self.unit_norm(x, keep)).chunk(2, -1)
        y = x + self.dropout(self.leave(functional.silu(gate) * value))
        return y if keep is None else torch.where(keep.unsqueeze(-1), y, 0.0)
