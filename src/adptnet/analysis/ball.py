"""A ball that the state never leaves."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Ball"]


class Ball(NamedTuple):
    """The bound ‖x_t‖ ≤ a ‖x_{t-1}‖ + ‖drive_t‖ (bounds.md). For a state of two parts, a is a 2×2 matrix."""

    transition: Tensor  # (parts, parts), non-negative: a
    entry: Tensor  # (parts,): factor of the norm of the drive in each part
    sizes: tuple[int, ...]  # state dimensions of each part; dimensions beyond them are bounded on their own
    drive_size: int  # number of features of the prepared drive that are added to the state

    @property
    def contraction(self) -> float:
        """Asymptotic decay factor per step of an old state: the spectral radius of a. Below 1 the state is bounded."""
        return float(torch.linalg.eigvals(self.transition).abs().max())

    def radius(self, largest_drive: float) -> float:
        """Return the asymptotic bound on the norm of the state.

        Args:
            largest_drive: Upper bound on ‖drive_t‖.
        """
        if self.contraction >= 1:
            return float("inf")
        eye = torch.eye(len(self.entry), dtype=self.entry.dtype)
        return float(torch.linalg.solve(eye - self.transition, self.entry).norm() * largest_drive)

    def along(self, drive: Tensor, state: Tensor) -> Tensor:
        """Return upper bounds on the norm of the state after each step, (batch, time).

        Args:
            drive: (batch, time, features), from the cell's `prepare`.
            state: (batch, n), the initial state.
        """
        parts = state.double().split((*self.sizes, state.shape[-1] - sum(self.sizes)), -1)
        norms = torch.stack([part.norm(dim=-1) for part in parts[: len(self.sizes)]], -1)
        pushes = drive[..., : self.drive_size].double().norm(dim=-1, keepdim=True) * self.entry
        radii = []
        for push in pushes.unbind(1):
            norms = norms @ self.transition.mT + push
            radii.append(norms.norm(dim=-1))
        return torch.stack(radii, 1)
