"""The drive: the map from the input of a layer to the vector that is added to the state."""

import torch
from torch import Tensor, nn

from ...ops._torch_state import is_autocast_enabled
from ...ops.products import multiply
from ..projections import Projection
from ..projections.base import apply_map, is_hooked
from ..projections.dense import DenseProjection
from ..projections.expand import ExpandProjection
from ..spectra import Spectrum
from .gain import Gain
from .gate import Gate
from .rope import RotaryPositions

__all__ = ["Drive", "is_scaling_faster"]

MIN_ROWS = 64  # with fewer rows, scaling B first does not save time


def is_scaling_faster(inputs: Tensor) -> bool:
    """Return whether (gain B) o is faster than gain ⊙ (B o).

    Args:
        inputs: o, (*b, t, width).
    """
    rows = inputs.numel() // max(1, inputs.shape[-1])
    return rows >= MIN_ROWS and rows > inputs.shape[-1]


class Drive(nn.Module):
    """The drive gain ⊙ gate(u) ⊙ R(u) of an input o, with u = B o (eq:recurrence_fn_redo, eq:input_gate_ADPTNet).

    Args:
        input_projection: B.
        gain: The normalisation of the input.
        gate: The input gate, or None.
        rope: The rotary positions R, or None.
    """

    def __init__(self, input_projection: Projection, gain: Gain, gate: Gate | None, rope: RotaryPositions | None):
        super().__init__()
        self.input_projection = input_projection
        self.gain = gain
        self.gate = gate
        self.rope = rope

    def project(self, inputs: Tensor) -> Tensor:
        """Return u = B o.

        Args:
            inputs: o, (*b, t, width).

        Returns:
            (*b, t, state_size).
        """
        return apply_map(self.input_projection, inputs)

    def forward(self, u: Tensor, position: Tensor, spectrum: Spectrum, dt: Tensor | None = None) -> Tensor:
        """Return the drive of a projected input.

        Args:
            u: B o, (*b, t, state_size).
            position: Steps since the sequence began, (*b, t).
            spectrum: The spectrum that a tied gain follows.
            dt: The length of each step, (*b, t, 1); None if all are 1.

        Returns:
            (*b, t, state_size).
        """
        rotated: Tensor = u if self.rope is None else self.rope(u, position, spectrum)
        gated = rotated if self.gate is None else self.gate(u) * rotated
        return self.gain(spectrum, dt).mv(gated)  # type: ignore[no-any-return]

    def project_and_scale(self, inputs: Tensor, spectrum: Spectrum) -> Tensor | None:
        """Return the drive as one product (gain B) o; None if the modules must be called one by one.

        Scaling the rows of B costs as many multiplications as B has entries, forward and backward, and allocates no
        tensor as long as the sequence. It is used only without gate and rotary positions, for modules that were
        neither replaced nor hooked, with a dense B or an expansion, and where it saves time.

        Args:
            inputs: o, (*b, t, width).
            spectrum: The spectrum that a tied gain follows.
        """
        if self.gate is not None or self.rope is not None or torch.compiler.is_compiling():
            return None
        if not is_scaling_faster(inputs) or is_autocast_enabled(inputs.device):
            return None
        kind = ExpandProjection if isinstance(self.input_projection, ExpandProjection) else DenseProjection
        modules = ((self, Drive), (self.input_projection, kind), (self.gain, Gain))
        if not all(type(module) is kind and not is_hooked(module) for module, kind in modules):
            return None
        self.input_projection.refresh()
        gain = self.gain(spectrum)
        if inputs.dtype != gain.real.dtype:
            return None
        if isinstance(self.input_projection, ExpandProjection):
            return None if gain.imag is not None else self.input_projection.expand(inputs, gain.real)
        both: Tensor = gain.mv(self.input_projection.dense().to(inputs.dtype).mT)
        return multiply(inputs, both)
