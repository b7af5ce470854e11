"""The drive: everything between the input of a layer and what is added to the state."""

import torch
from torch import Tensor, nn

from ...ops._torch_state import autocast_enabled
from ..projections import Projection
from ..projections.base import apply_map, is_hooked
from ..projections.dense import DenseProjection
from ..spectra import Spectrum
from .gain import Gain
from .gate import Gate
from .rope import RotaryPositions

__all__ = ["Drive"]

FEW = 64  # rows that are projected as quickly one way as the other


class Drive(nn.Module):
    """gain ⊙ gate(u) ⊙ R(u), u = B o (eq:recurrence_fn_redo, eq:input_gate_ADPTNet). Does not depend on the state."""

    def __init__(self, input_projection: Projection, gain: Gain, gate: Gate | None, rope: RotaryPositions | None):
        super().__init__()
        self.input_projection = input_projection
        self.gain = gain
        self.gate = gate
        self.rope = rope

    def project(self, inputs: Tensor) -> Tensor:
        """u = B o: (*b, t, width) to (*b, t, state_size)."""
        return apply_map(self.input_projection, inputs)

    def forward(self, u: Tensor, position: Tensor, spectrum: Spectrum, dt: Tensor | None = None) -> Tensor:
        """The drive of the projected input `u` at `position` (*b, t); `dt` (*b, t, 1) where steps differ."""
        turned: Tensor = u if self.rope is None else self.rope(u, position)
        gated = turned if self.gate is None else self.gate(u) * turned
        return self.gain(spectrum, dt).mv(gated)  # type: ignore[no-any-return]

    def by_one_product(self, inputs: Tensor, spectrum: Spectrum) -> Tensor | None:
        """The drive of `inputs` as (gain B) o, where nothing comes between; None where that would not save time.

        A gain on the rows of B takes as many multiplications as B has entries, forward and backward, and no tensor as
        long as the sequence. Parts that were replaced, or that somebody watches, are called one by one.
        """
        rows = inputs.numel() // max(1, inputs.shape[-1])
        if self.gate is not None or self.rope is not None or torch.compiler.is_compiling():
            return None
        if rows < FEW or rows <= inputs.shape[-1] or autocast_enabled(inputs.device):
            return None
        if not (_stock(self, Drive) and _stock(self.input_projection, DenseProjection) and _stock(self.gain, Gain)):
            return None
        self.input_projection.refresh()
        gain = self.gain(spectrum)
        if inputs.dtype != gain.real.dtype:
            return None
        both: Tensor = gain.mv(self.input_projection.dense().to(inputs.dtype).mT)
        return inputs @ both


def _stock(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of a module is that of its class: nothing overridden, nothing hooked."""
    return type(module) is kind and not is_hooked(module)
