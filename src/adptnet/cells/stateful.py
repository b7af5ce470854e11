"""A cell whose rotation is part of the state (eq:naive_ortho_update): for small state sizes."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .._typing import Device, DType, Positions, Vector
from ..recurrence.conjugates import Exact
from .adpt import ADPTCell
from .base import Cell
from .spec import ADPTSpec
from .structure import Structure

__all__ = ["StatefulCell"]


class StatefulCell(Cell):
    """A cell with the rotation Q in its state, which is x, then the rows of Q.

    x_t = Q_t Λ̄ Q_t' x_{t-1} + drive_t,  Q_t = Q_{t-1} R(k, Q_{t-1} v), where R rotates in the plane of its arguments.

    Args:
        spec: All choices of the model; `spec.conjugate` is `Stateful()`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: ADPTSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        self.input_size = spec.width
        self.state_size = spec.size + spec.size**2
        self.output_size = spec.size
        self.memoryless = ADPTCell(dataclasses.replace(spec, conjugate=Exact()), device=device, dtype=dtype)

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        return self.memoryless.prepare(inputs, position)

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self.stepper()(state, drive)

    def structure(self) -> Structure:
        return Structure(stepper=self.stepper)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the step as a function, with the parameters evaluated once."""
        size, retraction = self.spec.size, self.spec.retraction
        parameters = self.memoryless.evaluate()
        blocks, beta = parameters.blocks, parameters.beta
        assert blocks is not None
        assert beta is not None
        assert parameters.directions is not None
        directions = parameters.directions[0]

        def step(state: Tensor, drive: Tensor) -> Tensor:
            x, rows = state[..., :size], state[..., size:].unflatten(-1, (size, size))
            key, value = directions(x)
            rotated = (rows @ value.unsqueeze(-1)).squeeze(-1)
            rotation = retraction(key.unsqueeze(-2), rotated.unsqueeze(-2), beta)
            rows = rotation.apply_transposed(rows)  # each row of Q R is R' times the row of Q
            decayed = blocks.mv((x.unsqueeze(-2) @ rows).squeeze(-2))
            x = (rows @ decayed.unsqueeze(-1)).squeeze(-1) + drive
            return torch.cat((x, rows.flatten(-2)), -1)

        return step

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        """Return x = 0 and Q = I. Arguments as for `Cell.initial_state`."""
        zero = super().initial_state(batch, device=device, dtype=dtype)
        zero[:, self.spec.size :] = torch.eye(self.spec.size, dtype=zero.dtype, device=zero.device).flatten()
        return zero

    def output(self, state: Tensor) -> Tensor:
        return state[..., : self.spec.size]

    def rotation(self, state: Tensor) -> Tensor:
        """Return Q, (*b, n, n).

        Args:
            state: (*b, state_size).
        """
        rows: Tensor = state[..., self.spec.size :].unflatten(-1, (self.spec.size, self.spec.size))
        return rows
