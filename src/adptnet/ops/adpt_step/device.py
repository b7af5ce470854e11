"""Newton passes and whole iterations on a GPU, as one object per system. Needs no Triton until it is used."""

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from ..adpt_scan.form import Constants, Form
from .reference import Pass

__all__ = ["DevicePass", "Outcome", "Rules"]


class Rules(NamedTuple):
    """When the iteration of a sequence stops; see `solvers.fixed_point.Limits`."""

    most: int
    least: int
    patience: int | None
    slack: float  # the largest estimated error of a converged step, in tolerances
    rounding: float  # the residual of an exact solution, in tolerances
    total: int  # the length of the whole sequence


class Outcome(NamedTuple):
    """The result of an iteration, (batch,) except for the states and the history."""

    states: Tensor  # (batch, time, n)
    converged: Tensor  # bool
    rising: Tensor  # bool
    iterations: Tensor  # int64
    residual: Tensor
    converged_steps: Tensor  # int64
    residuals: Tensor  # (iterations + 1, batch)
    prefixes: Tensor  # (iterations + 1, batch), int64
    all_converged: bool


@dataclasses.dataclass(frozen=True)
class DevicePass:
    """Newton passes of one recurrence on a GPU.

    Attributes:
        constants, form: As in `adpt_scan`.
        diagonal: Whether the transition is diag(M), as in Forward-DEER, instead of Λ̄, as in Conv-DEER.
    """

    constants: Constants
    form: Form
    diagonal: bool

    def __call__(self, states: Tensor, *system: Any, **options: Any) -> Pass:
        """Run one pass; arguments as in `reference.newton_pass`.

        Args:
            states: (batch, time, n), the iterate.
            system: drive, initial, reset_state and reset.
            options: tolerance and recent.
        """
        from . import triton

        return triton.newton_pass(states, *system, self.constants, self.form, diagonal=self.diagonal, **options)

    def iterate(self, guess: Tensor, *system: Any, **options: Any) -> Outcome | None:
        """Iterate until all sequences have finished; see `triton.iterate`.

        Args:
            guess: (batch, time, n), the states to start from.
            system: drive, initial, reset_state and reset.
            options: tolerance, recent and rules.
        """
        from . import triton

        return triton.iterate(guess, *system, self.constants, self.form, diagonal=self.diagonal, **options)
