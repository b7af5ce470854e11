"""The block of language models: a layer and a SwiGLU unit, each with a norm before and its input added back."""

from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._typing import Device, DType
from ..errors import SpecError
from ..ops._fx import Proxy, record_call
from ..solvers.problem import check_lengths, valid
from ..spec import ModuleSpec, check_size, nearest, reset_from_spec, spec
from .bidirectional import BidirectionalSpec, refuse_time_major
from .block import Norm, NormName
from .layer import LayerSpec
from .mixer import MixerSpec
from .packing import check_padded

__all__ = ["SwiGLUBlock", "SwiGLUBlockSpec"]


@spec
class SwiGLUBlockSpec(ModuleSpec):
    """The block that MAD compares layers in.

    Attributes:
        layer: The layer, two of them in both directions, or a mixer.
        norm: "batch", "layer" or "rms".
        expansion: The unit is two thirds of this times as wide, rounded up to a multiple of 16.
    """

    layer: LayerSpec | BidirectionalSpec | MixerSpec
    norm: NormName = "rms"
    expansion: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.layer, (LayerSpec, BidirectionalSpec, MixerSpec)):
            raise SpecError(
                f"SwiGLUBlockSpec(layer={type(self.layer).__name__}): must be a LayerSpec, BidirectionalSpec or "
                "MixerSpec: layer.spec."
            )
        if isinstance(self.layer, LayerSpec):
            refuse_time_major(self, self.layer)
        if self.norm not in get_args(NormName):
            raise SpecError(f"SwiGLUBlockSpec(norm={self.norm!r}) is unknown.{nearest(self.norm, get_args(NormName))}")
        check_size(self, expansion=self.expansion)

    @property
    def width(self) -> int:
        return self.layer.width

    @property
    def inner(self) -> int:
        """Width of the unit."""
        return -(-2 * self.expansion * self.width // (3 * 16)) * 16

    @property
    def prenorm(self) -> bool:
        return True

    def build(self, *, device: Device = None, dtype: DType = None) -> "SwiGLUBlock":
        return SwiGLUBlock(self, device=device, dtype=dtype)


class SwiGLUBlock(nn.Module):
    """z = x + layer(norm(x)), then z + W₃(SiLU(W₁ norm(z)) ⊙ W₂ norm(z)): (batch, time, width) in and out."""

    def __init__(self, spec: SwiGLUBlockSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        width = spec.width
        self.norm = Norm(spec.norm, width, device=device, dtype=dtype)
        self.layer = spec.layer.build(device=device, dtype=dtype)
        self.unit_norm = Norm(spec.norm, width, device=device, dtype=dtype)
        self.enter = nn.Linear(width, 2 * spec.inner, bias=False, device=device, dtype=dtype)
        self.leave = nn.Linear(spec.inner, width, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: Any = None, *, lengths: Tensor | None = None, **run: Any) -> tuple[Tensor, Any]:
        """As `RecurrentLayer.forward`, on (batch, time, width)."""
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths)
        check_padded(x)
        lengths = check_lengths(lengths, x.shape[0], x.shape[1], x.device)
        keep = None if lengths is None else valid(lengths, x.shape[1])
        x = x if keep is None else torch.where(keep.unsqueeze(-1), x, 0.0)
        mixed, after = self.layer(self.norm(x, keep), state, lengths=lengths, **run)
        return self._out(x + mixed, keep), after

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """As `RecurrentLayer.step`."""
        mixed, after = self.layer.step(self.norm(x), state)
        return self._out(x + mixed, None), after

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def _out(self, x: Tensor, keep: Tensor | None) -> Tensor:
        gate, value = self.enter(self.unit_norm(x, keep)).chunk(2, -1)
        y = x + self.leave(functional.silu(gate) * value)
        return y if keep is None else torch.where(keep.unsqueeze(-1), y, 0.0)
