"""The ADPT cell: x_t = M(x_{t-1}) x_{t-1} + drive_t with M = Q Λ̄ Q' (eq:recurrence_eq)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..beta import Beta, TrainableBeta
from ..conjugates import Conjugate, ConjugateSpec, Exact
from ..directions import FromState, KeyValue
from ..drive import EMA, Drive, GainSpec, SoftplusGate
from ..errors import IncompatibleError
from ..projections import Dense, Expand, ProjectionSpec
from ..retractions import Exponential, Retraction
from ..spec import check_kind, check_nonnegative, check_size, spec
from ..spectra import BlockDiagonal, Linspace, SpectrumSpec
from ..typing import Matrix, Positions, Vector
from .base import Cell, CellSpec

__all__ = ["ADPTCell", "ADPTSpec"]


@spec
class ADPTSpec(CellSpec):
    """Every choice of the model in one place; what does not fit together is refused here.

    Attributes:
        width: Features of the input.
        state_size: Numbers in the state; `width` if not given.
        beta: How far the state may turn itself in a step; 0 is a linear model.
        spectrum: The timescales.
        retraction: How far a step turns.
        conjugate: How the rotation acts on the timescales.
        direction: Where key and value come from.
        projection: What K and V are.
        input_projection: What B is.
        gain: What normalises the input.
        gate: A gate on the input, or None.
    """

    width: int
    state_size: int | None = None
    beta: float | TrainableBeta = 0.125
    spectrum: SpectrumSpec = Linspace()
    retraction: Retraction = Exponential()
    conjugate: ConjugateSpec = Exact()
    direction: FromState = FromState()
    projection: ProjectionSpec = Dense()
    input_projection: ProjectionSpec = Dense()
    gain: GainSpec = EMA()
    gate: SoftplusGate | None = None

    def __post_init__(self) -> None:
        check_size(self, width=self.width)
        if self.state_size is None:
            object.__setattr__(self, "state_size", self.width)
        check_size(self, state_size=self.size)
        if not isinstance(self.beta, TrainableBeta):
            check_nonnegative(self, beta=self.beta)
        check_kind(self, SpectrumSpec, "spectra.Linspace()", spectrum=self.spectrum)
        check_kind(self, Retraction, "retractions.Exponential()", retraction=self.retraction)
        check_kind(self, ConjugateSpec, "conjugates.Exact()", conjugate=self.conjugate)
        check_kind(self, FromState, "directions.FromState()", direction=self.direction)
        check_kind(
            self,
            ProjectionSpec,
            "projections.Dense()",
            projection=self.projection,
            input_projection=self.input_projection,
        )
        check_kind(self, GainSpec, "drive.EMA()", gain=self.gain)
        if self.gate is not None:
            check_kind(self, SoftplusGate, "drive.SoftplusGate()", gate=self.gate)
        if not self.conjugate.turns and self.beta != 0:
            raise IncompatibleError(
                f"ADPTSpec(conjugate={self.conjugate}, beta={self.beta}): this conjugate does not turn. "
                "Pass beta=0, or conjugate=conjugates.Exact()."
            )
        if isinstance(self.projection, Expand):
            raise IncompatibleError(
                "ADPTSpec(projection=Expand()): K and V are square; an expansion would only scale each number of the "
                "state. Pass projection=projections.Dense(), and Expand() as input_projection."
            )
        if isinstance(self.input_projection, Expand) and self.size % self.width:
            raise IncompatibleError(
                f"ADPTSpec(width={self.width}, state_size={self.size}, input_projection=Expand()): the state must be a "
                f"multiple of the width. Pass state_size={(self.size // self.width + 1) * self.width}."
            )

    @property
    def size(self) -> int:
        """The state size, resolved."""
        return self.width if self.state_size is None else self.state_size

    @property
    def expansion(self) -> int:
        """Numbers of the state for each channel of the input, if the input is expanded; 1 otherwise."""
        return self.size // self.width if isinstance(self.input_projection, Expand) else 1

    def build(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "ADPTCell":
        return ADPTCell(self, device=device, dtype=dtype)


class ADPTCell(Cell):
    """The recurrence of the paper. Its parameters are the spectrum, K and V, B, the gain, the gate and β."""

    def __init__(self, spec: ADPTSpec, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.spec = spec
        self.input_size = spec.width
        self.state_size = spec.size
        self.spectrum = spec.spectrum.build(spec.size, expansion=spec.expansion, device=device, dtype=dtype)
        self.beta = Beta(spec.beta, device=device, dtype=dtype)
        self.directions = (
            spec.direction.build(spec.size, spec.projection, device=device, dtype=dtype)
            if spec.conjugate.turns
            else None
        )
        self.drive = Drive(
            spec.input_projection.build(spec.width, spec.size, device=device, dtype=dtype),
            spec.gain.build(self.spectrum),
            None if spec.gate is None else spec.gate.build(spec.size, device=device, dtype=dtype),
        )

    def prepare(self, inputs: Tensor, position: Positions) -> Tensor:
        drive: Tensor = self.drive(inputs, self.spectrum)
        return drive

    def step(self, state: Vector, drive: Vector) -> Vector:
        return self._bound().step(state, drive)

    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self._bound().step

    def eigenvalues(self) -> BlockDiagonal:
        lambda_bar: BlockDiagonal = self.spectrum()
        return lambda_bar

    def conjugate(self, state: Vector, drive: Vector) -> Conjugate:
        return self._bound().conjugate(state)

    def define_conjugate(self, state: Vector) -> Matrix:
        """M at `state` by its definition, with dense matrices: the slow reference of `conjugate`."""
        bound = self._bound()
        dense = self.spec.conjugate.define(bound.lambda_bar, bound.planes(state), bound.beta, self.spec.retraction)
        return dense.expand(*state.shape, self.state_size)

    def _bound(self) -> "_Bound":
        lambda_bar = self.eigenvalues()
        directions = None if self.directions is None else self.directions.bound(lambda_bar.real.dtype)
        return _Bound(self.spec, lambda_bar, self.beta(), directions)


class _Bound(NamedTuple):
    """A cell with its parameters evaluated: what is the same at every step."""

    spec: ADPTSpec
    lambda_bar: BlockDiagonal
    beta: float | Tensor
    directions: Callable[[Tensor], KeyValue] | None

    def planes(self, state: Tensor) -> KeyValue | None:
        return None if self.directions is None else self.directions(state)

    def conjugate(self, state: Tensor) -> Conjugate:
        return self.spec.conjugate.operator(self.lambda_bar, self.planes(state), self.beta, self.spec.retraction)

    def step(self, state: Tensor, drive: Tensor) -> Tensor:
        return self.conjugate(state).mv(state) + drive


def axes() -> tuple[str, ...]:
    """The names of the model axes, as `ADPTNet` takes them."""
    return tuple(f.name for f in dataclasses.fields(ADPTSpec) if f.name != "width")
