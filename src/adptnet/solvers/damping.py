"""Damping: how an iteration is held back where the plain one would overshoot."""

import abc

import torch
from torch import Tensor

from ..errors import InputError
from .fixed_point import Iterate, newton_update
from .system import System
from .transitions import Transition

__all__ = ["Adaptive", "Damping", "Proximal", "Scale", "TrustRegion", "Undamped"]


class Damping(abc.ABC):
    """What becomes of a transition and a guess. `strength` is one number for each sequence, (batch,)."""

    def begin(self, like: Tensor) -> Tensor:
        """The strength of the first iteration."""
        return torch.zeros(like.shape[0], dtype=like.dtype, device=like.device)

    def adapt(self, strength: Tensor, residual: Tensor, previous: Tensor) -> Tensor:
        """The strength of the next iteration."""
        return strength

    @abc.abstractmethod
    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        """The next states. Without a graph, `at.values` may be overwritten."""


class Undamped(Damping):
    """The plain iteration."""

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        return newton_update(transition, system, at)

    def __repr__(self) -> str:
        return "Undamped()"


class Scale(Damping):
    """Scale-ELK: the transition times a number (eq:damping_error_and_info).

    Args:
        scale: 1 leaves it as it is, 0 is Jacobi. In between, what an iteration says of far steps fades.
    """

    def __init__(self, scale: float):
        if not isinstance(scale, (int, float)) or not 0 <= scale <= 1:
            raise InputError(f"Scale({scale!r}): must be from 0 to 1. 0.99 damps mildly.")
        self.scale = float(scale)

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        return newton_update(transition.scaled(self.scale), system, at)

    def __repr__(self) -> str:
        return f"Scale({self.scale:g})"


class TrustRegion(Damping):
    """ELK: a pull towards the guess, weighed as a Kalman filter weighs what it observes, parallel in time.

    Args:
        strength: 0 is the plain iteration; a large one hardly leaves the guess.
    """

    def __init__(self, strength: float = 0.1):
        if not strength >= 0 or strength == float("inf"):
            raise InputError(f"TrustRegion(strength={strength!r}): must be a finite number from 0.")
        self.strength = float(strength)

    def begin(self, like: Tensor) -> Tensor:
        return torch.full((like.shape[0],), self.strength, dtype=like.dtype, device=like.device)

    def update(self, transition: Transition, system: System, at: Iterate, strength: Tensor) -> Tensor:
        # of the change, which is pulled towards none: the same as of the states pulled towards the guess
        none, guess = torch.zeros_like(system.initial), torch.zeros_like(at.states)
        change = transition.filter(at.values - at.states, guess, strength.unsqueeze(-1), none, system.reset)
        return at.states + change

    def __repr__(self) -> str:
        return f"TrustRegion({self.strength:g})"


class Adaptive(Damping):
    """Scales the transition of a sequence down when its residual rises, and lets go when it falls.

    The transition is multiplied by 1 - strength, and strength starts at 0: a sequence that converges by itself is left
    alone. Each rise multiplies the strength by `factor` (from `least` on, up to 1, where nothing is carried over and
    no iterate can explode), each fall divides it.

    Args:
        least: The first strength above 0.
        factor: By which it grows and shrinks.
    """

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
        return newton_update(transition.scaled(1 - strength[:, None, None]), system, at)

    def __repr__(self) -> str:
        return f"Adaptive(least={self.least:g}, factor={self.factor:g})"


class Proximal(Damping):
    """Brings each guess back onto the ball that provably holds the state, ‖x_t‖ <= |λ̄|_max ‖x_{t-1}‖ + ‖drive_t‖.

    The trajectory lies in the balls, so nothing that is right is moved.

    Args:
        damping: What else to do; nothing if not given.
    """

    def __init__(self, damping: Damping | None = None):
        if damping is not None and not isinstance(damping, Damping):
            raise InputError(
                f"Proximal({damping!r}): takes another damping, for instance solvers.Scale(0.99), or none."
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
