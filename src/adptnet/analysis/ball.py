"""The ball that a state never leaves."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Ball"]


class Ball(NamedTuple):
    """‖x_t‖ ≤ a ‖x_{t-1}‖ + ‖drive_t‖ (bounds.md); for a state of two parts, the same with a 2×2 matrix a."""

    transition: Tensor  # (parts, parts), not negative
    entry: Tensor  # (parts,): how the norm of the drive enters each part
    sizes: tuple[int, ...]  # numbers of the state in each part; what is left over is bounded by itself
    drive_size: int  # how many numbers of the prepared drive are added to the state

    @property
    def contraction(self) -> float:
        """What is left of an old state after a step, in the long run; below 1 the state is bounded."""
        return float(torch.linalg.eigvals(self.transition).abs().max())

    def radius(self, largest_drive: float) -> float:
        """What the norm of the state never exceeds in the long run, if ‖drive_t‖ never exceeds `largest_drive`."""
        if self.contraction >= 1:
            return float("inf")
        eye = torch.eye(len(self.entry), dtype=self.entry.dtype)
        return float(torch.linalg.solve(eye - self.transition, self.entry).norm() * largest_drive)

    def along(self, drive: Tensor, state: Tensor) -> Tensor:
        """What the norm of the state cannot exceed after each step, (batch, time).

        Args:
            drive: (batch, time, features), from the cell's `prepare`.
            state: (batch, n), entering the first step.
        """
        parts = state.double().split((*self.sizes, state.shape[-1] - sum(self.sizes)), -1)
        norms = torch.stack([part.norm(dim=-1) for part in parts[: len(self.sizes)]], -1)
        pushes = drive[..., : self.drive_size].double().norm(dim=-1, keepdim=True) * self.entry
        radii = []
        for push in pushes.unbind(1):
            norms = norms @ self.transition.mT + push
            radii.append(norms.norm(dim=-1))
        return torch.stack(radii, 1)
