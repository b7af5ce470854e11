"""Arguments of `adpt_layer`: the matrices that a call reads, and the vectors that are evaluated beforehand."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "DriveGradients",
    "Evaluated",
    "GateValues",
    "GateWeights",
    "LayerVectors",
    "LayerWeights",
    "LinearizedVectors",
    "VectorSource",
]


class GateWeights(NamedTuple):
    """Parameters of the input gate softplus(U D' u + bias)."""

    down: Tensor  # (rank, n): D'
    up: Tensor  # (n, rank): U
    bias: Tensor  # (n,)


class GateValues(NamedTuple):
    """Values of the forward pass that the gradients of the input gate softplus(a) need."""

    u: Tensor  # (rows, n)
    hidden: Tensor  # D' u, (rows, rank)
    logits: Tensor  # a = U D' u + bias, (rows, n)


class LayerWeights(NamedTuple):
    """Parameters that every call reads as they are. n is the state dimension, m that of a head."""

    input_weight: Tensor | None  # (n, width); None for the identity
    input_bias: Tensor | None  # (n,)
    directions: tuple[Tensor, ...]  # K and V of each head, each (m, m); empty without a rotation
    direction_biases: tuple[Tensor, ...]  # (m,) each; empty without biases
    readout_weight: Tensor | None  # (outputs, n); None for the identity
    readout_bias: Tensor | None  # (outputs,)
    gate: GateWeights | None = None

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are not None."""
        optional = (self.input_weight, self.input_bias, self.readout_weight, self.readout_bias)
        gate = () if self.gate is None else self.gate
        return [*(t for t in optional if t is not None), *self.directions, *self.direction_biases, *gate]


class LayerVectors(NamedTuple):
    """Vectors that are evaluated from parameters (`sources`), and evaluated again when one of these changes."""

    real: Tensor  # (n,): Λ̄
    imag: Tensor | None  # (n,): as in `adpt_scan.Constants`
    gain_real: Tensor  # (n,)
    gain_imag: Tensor | None
    beta: Tensor | None  # (heads,); None without a rotation


class DriveGradients(NamedTuple):
    """Gradients of a drive; None where there is no such tensor."""

    x: Tensor | None
    gain: Tensor
    weight: Tensor | None
    bias: Tensor | None
    gate: tuple[Tensor, ...]  # as in `GateWeights`; empty without a gate


class LinearizedVectors(NamedTuple):
    """The vectors at some sources, and what `VectorSource.pull_back` needs to differentiate them there."""

    vectors: LayerVectors
    derivatives: tuple[Tensor, ...] = ()


class VectorSource(abc.ABC):
    """A way to evaluate the vectors of a layer from differentiable tensors, its sources, and to differentiate them."""

    @abc.abstractmethod
    def evaluate(self, sources: Sequence[Any]) -> LayerVectors:
        """Return the vectors, differentiable by torch.

        Args:
            sources: The tensors that they depend on.
        """

    @abc.abstractmethod
    def linearize(self, sources: Sequence[Any]) -> LinearizedVectors:
        """Return the vectors and their derivatives.

        Args:
            sources: As in `evaluate`.
        """

    @abc.abstractmethod
    def pull_back(self, at: LinearizedVectors, gradients: LayerVectors) -> list[Any]:
        """Return the gradients of the sources.

        Args:
            at: The result of `linearize`.
            gradients: The gradients of the vectors.
        """


class Evaluated(VectorSource):
    """Vectors that were evaluated in operations of torch, which differentiates them itself."""

    def evaluate(self, sources: Sequence[Any]) -> LayerVectors:
        return LayerVectors(*sources)

    def linearize(self, sources: Sequence[Any]) -> LinearizedVectors:
        return LinearizedVectors(LayerVectors(*sources))

    def pull_back(self, at: LinearizedVectors, gradients: LayerVectors) -> list[Any]:
        return [*gradients]
