"""Baseline cells: vanilla recurrent networks."""

import abc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._typing import Device, DType, Positions, Vector
from ..recurrence.projections import Dense, Orthogonal, Projection, ProjectionSpec
from ..spec import spec
from .base import Cell, SizedCellSpec
from .structure import Structure

__all__ = ["OrthogonalRNN", "OrthogonalRNNCell", "ReLURNN", "ReLURNNCell", "TanhRNN", "TanhRNNCell"]


class _VanillaCell(Cell):
    """A vanilla recurrent network, x_t = f(W x_{t-1} + U o_t + b) with the input o_t (eq vanilla_rnn)."""

    def __init__(self, spec: SizedCellSpec, recurrent: ProjectionSpec, device: Device, dtype: DType):
        super().__init__()
        self.spec = spec
        self.input_size = spec.width
        self.state_size = spec.size
        reach = spec.size**-0.5

        def uniform(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype).uniform_(-reach, reach))

        self.recurrent: Projection = recurrent.build(spec.size, spec.size, device=device, dtype=dtype)
        self.input_weight = uniform(spec.size, spec.width)
        self.bias = uniform(spec.size)

    @abc.abstractmethod
    def activation(self, x: Tensor) -> Tensor:
        """Return f(x)."""

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        return inputs @ self.input_weight.to(inputs.dtype).mT + self.bias.to(inputs.dtype)

    def step(self, state: Vector, drive: Vector) -> Vector:
        return self.activation(self.recurrent(state) + drive)

    def structure(self) -> Structure:
        return Structure(stepper=self._stepper)

    def _stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        recurrent = self.recurrent.bind(self.input_weight.dtype if self.dtype is None else self.dtype)
        return lambda state, drive: self.activation(recurrent(state) + drive)


@spec
class ReLURNN(SizedCellSpec):
    """A vanilla network, x_t = ReLU(W x_{t-1} + U o_t + b) with the input o_t, initialised like `nn.RNN`.

    Attributes:
        width: Features of the input.
        state_size: State dimension; `width` if None.
    """

    width: int
    state_size: int | None = None

    def build(self, *, device: Device = None, dtype: DType = None) -> "ReLURNNCell":
        return ReLURNNCell(self, Dense(), device, dtype)


class ReLURNNCell(_VanillaCell):
    """The cell of `ReLURNN`."""

    def activation(self, x: Tensor) -> Tensor:
        return x.relu()


@spec
class TanhRNN(SizedCellSpec):
    """A vanilla network, x_t = tanh(W x_{t-1} + U o_t + b) with the input o_t, initialised like `nn.RNN`.

    Attributes:
        width: Features of the input.
        state_size: State dimension; `width` if None.
    """

    width: int
    state_size: int | None = None

    def build(self, *, device: Device = None, dtype: DType = None) -> "TanhRNNCell":
        return TanhRNNCell(self, Dense(), device, dtype)


class TanhRNNCell(_VanillaCell):
    """The cell of `TanhRNN`."""

    def activation(self, x: Tensor) -> Tensor:
        return x.tanh()


@spec
class OrthogonalRNN(SizedCellSpec):
    """A network whose recurrent matrix Q stays orthogonal during training (eq:orthogonal_rnn_expriment).

    x_t = ReLU(Q x_{t-1} + U o_t + b) with the input o_t.

    Attributes:
        width: Features of the input.
        state_size: State dimension; `width` if None.
    """

    width: int
    state_size: int | None = None

    def build(self, *, device: Device = None, dtype: DType = None) -> "OrthogonalRNNCell":
        return OrthogonalRNNCell(self, Orthogonal(), device, dtype)


class OrthogonalRNNCell(_VanillaCell):
    """The cell of `OrthogonalRNN`."""

    def activation(self, x: Tensor) -> Tensor:
        return x.relu()
