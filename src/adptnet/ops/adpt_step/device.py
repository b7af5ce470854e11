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

    def __call__(
        self, states: Tensor, drive: Tensor, initial: Tensor, reset_state: Tensor, reset: Tensor | None, **options: Any
    ) -> Pass:
        """Run one pass.

        Args:
            states, drive, initial, reset_state, reset: As in `reference.newton_pass`.
            options: tolerance and recent.
        """
        from . import triton

        recurrence: dict[str, Any] = {"constants": self.constants, "form": self.form, "diagonal": self.diagonal}
        return triton.newton_pass(states, drive, initial, reset_state, reset, **recurrence, **options)

    def pull_back(self, entering: Tensor, drive: Tensor, gradient: Tensor) -> Tensor:
        """Return J'g for every step, J the Jacobian of the step; see `triton.pull_back`.

        Args:
            entering, drive, gradient: As there.
        """
        from . import triton

        return triton.pull_back(entering, drive, gradient, self.constants, self.form)

    def iterate(
        self, guess: Tensor, drive: Tensor, initial: Tensor, reset_state: Tensor, reset: Tensor | None, **options: Any
    ) -> Outcome | None:
        """Iterate until all sequences have finished; see `triton.iterate`.

        Args:
            guess: (batch, time, n), the states to start from.
            drive, initial, reset_state, reset: As in `reference.newton_pass`.
            options: tolerance, recent and rules.
        """
        from . import triton

        recurrence: dict[str, Any] = {"constants": self.constants, "form": self.form, "diagonal": self.diagonal}
        return triton.iterate(guess, drive, initial, reset_state, reset, **recurrence, **options)
