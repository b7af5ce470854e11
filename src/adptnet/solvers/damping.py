"""Damping of the Newton iteration, for problems where the undamped iteration diverges."""

import abc
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import InputError
from .iterates import Iterate, newton_update
from .system import System
from .transitions import Transition

__all__ = ["Adaptive", "Damping", "Proximal", "Scale", "TrustRegion", "Undamped"]


class Damping(abc.ABC):
    """Base class of dampings: modifications of the Newton update.

    A damping must not change the fixed point: if the current iterate is the solution, `update` must return it.

    `strength` is the state of a damping that varies between iterations: one number per sequence, (batch,), 0 for an
    undamped update. `begin` returns the first one, and `adapt` each next one. Every subclass defines how its update
    depends on the strength; those with a constant setting, such as `Scale`, ignore it.

    Attributes:
        needs_radius: Whether `update` needs `system.radius`, the radius of a ball that contains each state.
        has_fused_pass: Whether the kernels of a Newton iteration compute its update.
        supports_ranks: Whether its update is implemented for a time axis that is split over processes.
    """

    needs_radius: ClassVar[bool] = False
    has_fused_pass: ClassVar[bool] = False
    supports_ranks: ClassVar[bool] = False

    def begin(self, like: Tensor) -> Tensor:
        """Return the strength of the first iteration, (batch,).

        Args:
            like: A tensor (batch, ...) with the dtype and device of the states.
        """
        return torch.zeros(like.shape[0], dtype=like.dtype, device=like.device)

    def adapt(self, strength: Tensor, residual: Tensor, previous: Tensor) -> Tensor:
        """Return the strength of the next iteration, (batch,).

        Args:
            strength: (batch,), the strength of this iteration.
            residual: (batch,), the residual after this iteration. Under `torch.compile`, the largest change of the
                states in it.
            previous: (batch,), the same quantity before this iteration.
        """
        return strength

    @abc.abstractmethod
    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        """Return the states of the next iteration, (batch, time, n).

        Args:
            transition: The linearization A of the step.
            system: The equations s_t = f(s_{t-1}) of all steps.
            at: The current iterate. Its `values` may be overwritten when gradients are disabled.
            strength: (batch,), the strength of the damping in this iteration.
        """


class Undamped(Damping):
    """No damping."""

    has_fused_pass = True
    supports_ranks = True

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        return newton_update(transition, system, at)

    def __repr__(self) -> str:
        return "Undamped()"


class Scale(Damping):
    """Multiply the transition by a constant, as in Scale-ELK (eq:damping_error_and_info).

    Args:
        scale: Factor in [0, 1]. 1 is no damping, 0 the Jacobi iteration. In between, the influence of distant steps
            decays.
    """

    supports_ranks = True

    def __init__(self, scale: float):
        if not isinstance(scale, (int, float)) or not 0 <= scale <= 1:
            raise InputError(f"Scale({scale!r}): must be in [0, 1]. 0.99 damps mildly.")
        self.scale = float(scale)

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        return newton_update(transition.scale(self.scale), system, at)

    def __repr__(self) -> str:
        return f"Scale({self.scale:g})"


class TrustRegion(Damping):
    """Penalize the distance from the current iterate, as in ELK (a Levenberg-Marquardt step by a Kalman filter).

    The Kalman filter takes the current iterate as observations, and is parallel over time.

    Args:
        strength: 0 is no damping; a large strength keeps the states close to the current iterate.
    """

    def __init__(self, strength: float = 0.1):
        if not strength >= 0 or strength == float("inf"):
            raise InputError(f"TrustRegion(strength={strength!r}): must be a finite number >= 0.")
        self.strength = float(strength)

    def begin(self, like: Tensor) -> Tensor:
        return torch.full((like.shape[0],), self.strength, dtype=like.dtype, device=like.device)

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        # Filtering the change towards zero is the same as filtering the states towards the current iterate.
        initial, target = torch.zeros_like(system.initial), torch.zeros_like(at.states)
        change = transition.filter(at.values - at.states, target, strength.unsqueeze(-1), initial, system.reset)
        return at.states + change

    def __repr__(self) -> str:
        return f"TrustRegion({self.strength:g})"


class Adaptive(Damping):
    """Scale the transition of a sequence down when its residual rises, and back up when it falls.

    The transition is multiplied by 1 - strength, and the strength starts at 0, so a sequence that converges without
    damping is not damped. If the residual rises, the strength is multiplied by `factor` and kept in [`least`, 1]. At
    strength 1 the update is a Jacobi iteration, whose iterates cannot grow without bound. If the residual falls, the
    strength is divided by `factor`; below `least` it becomes 0.

    Args:
        least: The smallest nonzero strength.
        factor: The factor by which the strength grows and shrinks.
    """

    supports_ranks = True

    def __init__(self, least: float = 1 / 64, factor: float = 4.0):
        if not 0 < least <= 1 or not factor > 1:
            raise InputError(f"Adaptive(least={least!r}, factor={factor!r}): needs 0 < least <= 1 and factor > 1.")
        self.least = float(least)
        self.factor = float(factor)

    def adapt(self, strength: Tensor, residual: Tensor, previous: Tensor) -> Tensor:
        more = (strength * self.factor).clamp(self.least, 1.0)
        less = strength / self.factor
        return torch.where(residual > previous, more, torch.where(less < self.least, 0.0, less))

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        return newton_update(transition.scale(1 - strength[:, None, None]), system, at)

    def __repr__(self) -> str:
        return f"Adaptive(least={self.least:g}, factor={self.factor:g})"


class Proximal(Damping):
    """Project each iterate onto the ball that provably contains the state, ‖x_t‖ <= |λ̄|_max ‖x_{t-1}‖ + ‖drive_t‖.

    The exact trajectory lies in these balls, so the projection leaves it unchanged.

    Args:
        damping: A further damping, applied before the projection; none if not given.
    """

    needs_radius = True

    def __init__(self, damping: Damping | None = None):
        if damping is not None and not isinstance(damping, Damping):
            raise InputError(
                f"Proximal({damping!r}): takes a damping object. Pass for instance solvers.Scale(0.99), or nothing."
            )
        self.damping = Undamped() if damping is None else damping

    def begin(self, like: Tensor) -> Tensor:
        return self.damping.begin(like)

    def adapt(self, strength: Tensor, residual: Tensor, previous: Tensor) -> Tensor:
        return self.damping.adapt(strength, residual, previous)

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        states = self.damping.update(transition, system, at, strength)
        assert system.radius is not None
        size = torch.linalg.vector_norm(states, dim=-1)
        outside = size > system.radius * (1 + 64 * torch.finfo(states.dtype).eps)
        shrink = torch.where(outside, system.radius / torch.where(outside, size, 1.0), 1.0)
        return states * shrink.unsqueeze(-1)

    def __repr__(self) -> str:
        return f"Proximal({'' if isinstance(self.damping, Undamped) else self.damping})"
