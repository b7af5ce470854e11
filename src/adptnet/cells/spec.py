"""The spec of an ADPT cell: every choice of the model in one place."""

import dataclasses
import math
from typing import Any

from .._typing import Device, DType
from ..errors import IncompatibleError, SpecError
from ..recurrence.beta import BetaValue, TrainableBeta, count_heads, is_zero
from ..recurrence.conjugates import ConjugateSpec, Exact, Stateful, Taylor
from ..recurrence.directions import DirectionSpec, FromInput, FromState, FromWholeState
from ..recurrence.drive import EMA, LRU, GainSpec, InputPhase, RoPE, SoftplusGate
from ..recurrence.projections import Dense, Expand, Kronecker, LowParam, LowRank, ProjectionSpec
from ..recurrence.projections.factored import square_factors
from ..recurrence.retractions import Exponential, Retraction
from ..recurrence.spectra import Linspace, SpectrumSpec
from ..spec import Spec, check_kind, check_nonnegative, check_size, spec
from .base import Cell, CellSpec

__all__ = ["ADPTSpec", "SlowMemory", "axes"]


@spec
class SlowMemory(Spec):
    """A slow linear memory w beside the state (eq:coupled_ADPTNet): w_t = Γ w_{t-1} + (1 - Γ) x_t.

    It feeds back into the drive as γ ⊙ feedback ⊙ w_{t-1}.

    Attributes:
        spectrum: Γ; real, non-negative eigenvalues, slower than the state's.
        feedback: Initial feedback: one number for all state dimensions, or a range (low, high) to draw each from. It is
            trained.
    """

    spectrum: SpectrumSpec = Linspace(dt_min=1e-4, dt_max=1e-2)
    feedback: float | tuple[float, float] = 0.1

    def __post_init__(self) -> None:
        check_kind(self, SpectrumSpec, "spectra.Linspace(dt_min=1e-4, dt_max=1e-2)", spectrum=self.spectrum)
        if self.spectrum.is_complex or self.spectrum.has_negative or self.spectrum.grows:
            raise SpecError(
                f"SlowMemory(spectrum={self.spectrum}): Γ must be real, in [0, 1). Pass spectra.Linspace(...)."
            )
        ends = self.feedback if isinstance(self.feedback, tuple) else (self.feedback, self.feedback)
        if len(ends) != 2 or any(isinstance(end, bool) or not math.isfinite(end) for end in ends):
            raise SpecError(
                f"SlowMemory(feedback={self.feedback!r}): must be a finite number, or two of them: (low, high)."
            )
        if ends[0] > ends[1]:
            raise SpecError(f"SlowMemory(feedback={self.feedback!r}): low is larger than high. Exchange the two.")


@spec
class ADPTSpec(CellSpec):
    """All components of an ADPT cell. Values that do not fit together raise `IncompatibleError` or `SpecError`.

    Attributes:
        width: Features of the input.
        state_size: State dimension; `width` if None.
        beta: Strength of the non-linearity, an upper bound on the rotation angle per step; 0 is a linear model. A tuple
            has one for each head.
        spectrum: The eigenvalues Λ̄, which prescribe the timescales.
        retraction: The map from key and value to the rotation Q.
        conjugate: The form of M = Q Λ̄ Q': exact, a product of rotations, or a Taylor expansion.
        direction: How key and value are computed.
        projection: The projections K and V.
        input_projection: The input projection B.
        gain: The normalisation of the input.
        gate: A gate on the input, or None.
        rope: Rotary positions on the input, or None.
        phase: A rotation of pairs of state dimensions after M, by angles that the input sets, or None.
        rotation_aware: Rotate the drive with the state (eq:rotation_aware_normalisation). The paper's lemmas
            do not hold then.
        start: Include a learned constant rotation Q₀ in M: M = Q Q₀ Λ̄ Q₀' Q'.
        memory: A slow linear memory beside the state, or None.
    """

    width: int
    state_size: int | None = None
    beta: BetaValue = 0.125
    spectrum: SpectrumSpec = Linspace()
    retraction: Retraction = Exponential()
    conjugate: ConjugateSpec = Exact()
    direction: DirectionSpec = FromState()
    projection: ProjectionSpec = Dense()
    input_projection: ProjectionSpec = Dense()
    gain: GainSpec = EMA()
    gate: SoftplusGate | None = None
    rope: RoPE | None = None
    phase: InputPhase | None = None
    rotation_aware: bool = False
    start: bool = False
    memory: SlowMemory | None = None

    def __post_init__(self) -> None:
        check_size(self, width=self.width)
        if self.state_size is None:
            object.__setattr__(self, "state_size", self.width)
        check_size(self, state_size=self.size)
        self._check_kinds()
        self._check_beta()
        self._check_sizes()
        self._check_fit()

    @property
    def size(self) -> int:
        """The state dimension (of x, without a slow memory)."""
        return self.width if self.state_size is None else self.state_size

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.direction.heads

    @property
    def expansion(self) -> int:
        """State dimensions per channel of the input, if the input is expanded; 1 otherwise."""
        return self.size // self.width if isinstance(self.input_projection, Expand) else 1

    def has_directions_in_drive(self, *, beta_in_drive: bool) -> bool:
        """Return whether key and value come from the input. At a fixed β of 0 they are not needed, nor computed.

        Args:
            beta_in_drive: Whether a call passes a β for each sequence.
        """
        return isinstance(self.direction, FromInput) and (beta_in_drive or not is_zero(self.beta))

    @property
    def outside_lemmas(self) -> tuple[str, ...]:
        """The reasons why the bounds of the lemmas do not hold for this cell; empty if they do (deviations.md, 13)."""
        depends = self.conjugate.has_directions and not isinstance(self.direction, FromInput)  # otherwise J = M
        rank = self.projection.rank if isinstance(self.projection, LowRank) else self.size
        reasons = {
            f"direction={self.direction}": not self.direction.keeps_lemmas and depends,
            "bias on K and V": self.projection.bias and depends,
            "singular K and V": rank < self.size // self.heads and depends and not self._has_soft_directions,
            "rotation_aware": self.rotation_aware and depends,
            "memory": self.memory is not None,
            f"conjugate={self.conjugate}": self.conjugate in (Stateful(), Taylor(2)),
            "|λ̄| >= 1": self.spectrum.grows,
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    def build(self, *, device: Device = None, dtype: DType = None) -> Cell:
        """Build the cell: an `ADPTCell`, a `CoupledCell` with a slow memory, or a `StatefulCell`.

        Args:
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """
        from .adpt import ADPTCell
        from .coupled import CoupledCell
        from .stateful import StatefulCell

        if isinstance(self.conjugate, Stateful):
            return StatefulCell(self, device=device, dtype=dtype)
        kind = ADPTCell if self.memory is None else CoupledCell
        return kind(self, device=device, dtype=dtype)

    def _check_kinds(self) -> None:
        check_kind(self, SpectrumSpec, "spectra.Linspace()", spectrum=self.spectrum)
        check_kind(self, Retraction, "retractions.Exponential()", retraction=self.retraction)
        check_kind(self, ConjugateSpec, "conjugates.Exact()", conjugate=self.conjugate)
        check_kind(self, DirectionSpec, "directions.FromState()", direction=self.direction)
        projections = {"projection": self.projection, "input_projection": self.input_projection}
        check_kind(self, ProjectionSpec, "projections.Dense()", **projections)
        check_kind(self, GainSpec, "drive.EMA()", gain=self.gain)
        optional: dict[str, tuple[type, str, Any]] = {
            "gate": (SoftplusGate, "drive.SoftplusGate()", self.gate),
            "rope": (RoPE, "drive.RoPE()", self.rope),
            "phase": (InputPhase, "drive.InputPhase()", self.phase),
            "memory": (SlowMemory, "cells.SlowMemory()", self.memory),
        }
        for name, (kind, example, value) in optional.items():
            if value is not None:
                check_kind(self, kind, example, **{name: value})

    @property
    def _has_soft_directions(self) -> bool:
        return isinstance(self.direction, FromWholeState) and self.direction.softness > 0

    def _check_beta(self) -> None:
        values = self.beta.initial if isinstance(self.beta, TrainableBeta) else self.beta
        for value in values if isinstance(values, tuple) else (values,):
            check_nonnegative(self, beta=value)
            if value > 1e6:
                raise SpecError(f"ADPTSpec(beta={value!r}): an angle above 1e6 has no precision left in float32.")
        if values == ():
            raise SpecError("ADPTSpec(beta=()): β is a number, or one for each head. Pass beta=0.125.")
        count = count_heads(self.beta)
        if count is not None and count != self.heads:
            raise IncompatibleError(
                f"ADPTSpec(beta={self.beta}): beta has {count} values, but the number of heads is {self.heads}. "
                f"Pass direction={type(self.direction).__name__}(heads={count}), or one number."
            )
        if not self.conjugate.has_directions and self.beta != 0:
            raise IncompatibleError(
                f"ADPTSpec(conjugate={self.conjugate}, beta={self.beta}): this conjugate does not rotate. "
                "Pass beta=0, or conjugate=conjugates.Exact()."
            )

    def _check_sizes(self) -> None:
        if isinstance(self.projection, Expand):
            raise IncompatibleError(
                "ADPTSpec(projection=Expand()): K and V are square; an expansion would only scale each state "
                "dimension. Pass projection=projections.Dense(), and Expand() as input_projection."
            )
        if isinstance(self.input_projection, Expand) and self.size % self.width:
            raise IncompatibleError(
                f"ADPTSpec(width={self.width}, state_size={self.size}, input_projection=Expand()): the state must be a "
                f"multiple of the width. Pass state_size={(self.size // self.width + 1) * self.width}."
            )
        if self.size % self.heads:
            raise IncompatibleError(
                f"ADPTSpec(state_size={self.size}): the state size is not a multiple of {self.heads} heads. "
                f"Pass state_size={(self.size // self.heads + 1) * self.heads}."
            )
        if isinstance(self.projection, (Kronecker, LowParam)):
            a, b = self.projection.factors
            size = self.direction.projected_size(self.size)
            count = self.size // size
            if a * b != size:
                where = "the state has size" if count == 1 else f"each of {count} heads has size"
                raise IncompatibleError(
                    f"{type(self.projection).__name__}(factors={(a, b)}) has size {a * b}, but {where} "
                    f"{size}. Pass factors={square_factors(size)}, or state_size={a * b * count}."
                )
        if self.spectrum.is_complex and (self.size // self.heads) % 2:
            raise IncompatibleError(
                f"ADPTSpec(state_size={self.size}, spectrum={self.spectrum}): complex pairs need an even size of each "
                f"head. Pass state_size={self.heads * (self.size // self.heads + 1)}."
            )

    def _check_fit(self) -> None:
        if self.rope is not None and self.spectrum.is_complex:
            raise IncompatibleError(
                f"ADPTSpec(rope={self.rope}, spectrum={self.spectrum}): RoPE puts the oscillations into the input, a "
                "complex spectrum has them in the state. Pass a real spectrum, spectra.Linspace(), or rope=None."
            )
        if self.rope is not None and self.size % 2:
            raise IncompatibleError(
                f"ADPTSpec(rope=...): RoPE rotates pairs and needs an even state size. Pass state_size={self.size + 1}."
            )
        if self.phase is not None and (self.size // self.heads) % 2:
            raise IncompatibleError(
                f"ADPTSpec(state_size={self.size}, phase={self.phase}): the phase rotates pairs and needs an even size "
                f"of each head. Pass state_size={self.heads * (self.size // self.heads + 1)}."
            )
        if self.spectrum.grows and isinstance(self.gain, (EMA, LRU)):
            raise IncompatibleError(
                f"ADPTSpec(gain={self.gain}): it is defined for |λ̄| < 1, and this spectrum has |λ̄| >= 1. "
                "Pass gain=drive.ZOH()."
            )
        if self.rotation_aware and not self.conjugate.has_rotation:
            raise IncompatibleError(
                f"ADPTSpec(rotation_aware=True, conjugate={self.conjugate}): this conjugate has no rotation. "
                "Pass conjugate=conjugates.Exact()."
            )
        if self.start and self.heads > 1:
            raise IncompatibleError("ADPTSpec(start=True) with heads: the start would mix them. Pass heads=1.")
        if isinstance(self.conjugate, Stateful):
            clashes = {
                "memory": self.memory is not None,
                "start": self.start,
                "rotation_aware": self.rotation_aware,
                "heads": self.heads > 1,
                "direction=FromInput()": isinstance(self.direction, FromInput),
                "phase": self.phase is not None,
            }
            for name, clash in clashes.items():
                if clash:
                    raise IncompatibleError(f"ADPTSpec(conjugate=Stateful()) does not go with {name}. Drop {name}.")


def axes() -> tuple[str, ...]:
    """Return the names of the components of the model, which are keyword arguments of `ADPTNet`."""
    return tuple(f.name for f in dataclasses.fields(ADPTSpec) if f.name != "width")
