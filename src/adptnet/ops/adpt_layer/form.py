"""Arguments of `adpt_layer`: the matrices that a call reads, and the vectors that are evaluated beforehand."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["LayerVectors", "LayerWeights"]


class LayerWeights(NamedTuple):
    """Parameters that every call reads as they are. n is the state dimension, m that of a head."""

    input_weight: Tensor  # (n, width)
    input_bias: Tensor | None  # (n,)
    directions: tuple[Tensor, ...]  # K and V of each head, each (m, m); empty without a rotation
    direction_biases: tuple[Tensor, ...]  # (m,) each; empty without biases
    readout_weight: Tensor | None  # (outputs, n); None for the identity
    readout_bias: Tensor | None  # (outputs,)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are not None."""
        optional = (self.input_weight, self.input_bias, self.readout_weight, self.readout_bias)
        return [*(t for t in optional if t is not None), *self.directions, *self.direction_biases]


class LayerVectors(NamedTuple):
    """Vectors that are evaluated from parameters (`sources`), and evaluated again when one of these changes."""

    real: Tensor  # (n,): Λ̄
    imag: Tensor | None  # (n,): as in `adpt_scan.Constants`
    gain_real: Tensor  # (n,)
    gain_imag: Tensor | None
    beta: Tensor | None  # (heads,); None without a rotation
