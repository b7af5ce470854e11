"""The drive: everything between the input of a layer and what is added to the state."""

from torch import Tensor, nn

from ..projections import Projection
from ..spectra import Spectrum
from .gain import Gain
from .gate import Gate

__all__ = ["Drive"]


class Drive(nn.Module):
    """gain ⊙ gate(u) ⊙ u, u = B o (eq:recurrence_eq, eq:input_gate_ADPTNet). Does not depend on the state."""

    def __init__(self, input_projection: Projection, gain: Gain, gate: Gate | None):
        super().__init__()
        self.input_projection = input_projection
        self.gain = gain
        self.gate = gate

    def forward(self, inputs: Tensor, spectrum: Spectrum) -> Tensor:
        """(*b, t, width) to (*b, t, state_size)."""
        u: Tensor = self.input_projection(inputs)
        gated = u if self.gate is None else self.gate(u) * u
        return self.gain(spectrum).mv(gated)  # type: ignore[no-any-return]
