"""An auto-encoder: every position is decoded from the vector at the last step alone."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._typing import Device, DType
from .._validate import check_lengths, make_validity_mask
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..spec import ModuleSpec, check_size, reset_from_spec, spec
from .block import BlockSpec, Norm
from .packing import check_padded
from .states import LayerStates, split_states
from .swiglu import SwiGLUBlockSpec

__all__ = ["AutoEncoder", "AutoEncoderSpec"]


@spec
class AutoEncoderSpec(ModuleSpec):
    """An auto-encoder for tokens, the backbone of the compression task of MAD (Mechanistic Architecture Design).

    Attributes:
        block: The residual block that is repeated in the encoder.
        depth: Number of blocks.
        vocabulary: Number of different tokens, in and out.
    """

    block: BlockSpec | SwiGLUBlockSpec
    depth: int = 1
    vocabulary: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.block, (BlockSpec, SwiGLUBlockSpec)):
            raise SpecError(f"AutoEncoderSpec(block={type(self.block).__name__}): must be a BlockSpec(layer.spec).")
        check_size(self, depth=self.depth, vocabulary=self.vocabulary)

    def build(self, *, device: Device = None, dtype: DType = None) -> "AutoEncoder":
        return AutoEncoder(self, device=device, dtype=dtype)


class AutoEncoder(nn.Module):
    """An auto-encoder from (batch, time) tokens to (batch, time, vocabulary) logits.

    The encoder is that of `SequenceModel`. For each position, its last vector plus a sinusoidal vector of the position
    passes through two hidden layers of the same width to the logits. Embedding and decoder weights are initialized from
    N(0, 0.02²); the recurrent layers keep their own initialization.

    Args:
        spec: The description of the model.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: AutoEncoderSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        width, block = spec.block.width, spec.block
        self.encoder = nn.Embedding(spec.vocabulary, width, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(block.build(device=device, dtype=dtype) for _ in range(spec.depth))
        self.norm = Norm(block.norm, width, device=device, dtype=dtype) if block.prenorm else None
        sizes = (width, width, spec.vocabulary)
        self.norms = nn.ModuleList(Norm(block.norm, width, device=device, dtype=dtype) for _ in sizes)
        self.maps = nn.ModuleList(nn.Linear(width, size, device=device, dtype=dtype) for size in sizes)
        nn.init.normal_(self.encoder.weight, std=0.02)
        for parameter in self.maps.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)

    def forward(
        self, x: Tensor, state: tuple[Any, ...] | None = None, *, lengths: Tensor | None = None, **run: Any
    ) -> tuple[Tensor, LayerStates]:
        """Return logits (batch, time, vocabulary) and the states of all layers.

        Args:
            x: (batch, time) tokens.
            state: The states that an earlier call returned.
            lengths: (batch,) true lengths of right-padded sequences.
            run: Keyword arguments of `RecurrentLayer.forward` for every layer, such as `solver`.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths)
        check_padded(x)
        if x.dim() != 2 or x.shape[1] < 1 or x.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"the auto-encoder takes (batch, time) tokens, one at least; got {x.dtype} of shape {tuple(x.shape)}."
            )
        steps = x.shape[1]
        lengths = check_lengths(lengths, x.shape[0], steps, x.device)
        keep = None if lengths is None else make_validity_mask(lengths, steps)
        y = self.encoder(x)
        leaving = []
        for block, before in zip(self.blocks, split_states(self.blocks, state), strict=True):
            y, after = block(y, before, lengths=lengths, **run)
            leaving.append(after)
        y = y if self.norm is None else self.norm(y, keep)
        code = y[:, -1] if lengths is None else y[torch.arange(x.shape[0], device=x.device), lengths - 1]
        y = code.unsqueeze(1) + _make_position_vectors(steps, code)
        for i, (norm, map) in enumerate(zip(self.norms, self.maps, strict=True)):
            y = map(norm(y, keep))
            y = y if i == len(self.maps) - 1 else nn.functional.gelu(y)
        return y, LayerStates(leaving)

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)


def _make_position_vectors(steps: int, like: Tensor) -> Tensor:
    """Return sines and cosines of each position at geometrically spaced frequencies, (steps, width)."""
    width = like.shape[-1]
    pair = torch.arange(0, width, 2, device=like.device, dtype=like.dtype)
    phase = torch.arange(steps, device=like.device, dtype=like.dtype).unsqueeze(-1) * torch.exp(
        -math.log(10_000.0) * pair / width
    )
    return torch.stack((phase.sin(), phase.cos()), -1).flatten(-2)[:, :width]
