"""Matrices in the place of Λ̄, and helpers for block-diagonal and skew-symmetric matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..._typing import Vector
from ...ops.plane_rotation import skew
from ..directions import KeyValue
from ..spectra import BlockDiagonal

__all__ = ["Eigen", "RotatedBlocks", "block_diagonal", "nearest_blocks", "scaled_skew"]


class RotatedBlocks(NamedTuple):
    """Q₀ Λ̄ Q₀' for a learned rotation Q₀ (`ADPTSpec.start`), with the methods of Λ̄ that a conjugate uses."""

    blocks: BlockDiagonal
    start: Tensor  # Q₀, (n, n), orthogonal

    def mv(self, x: Vector) -> Vector:
        """Return Q₀ Λ̄ Q₀' x.

        Args:
            x: (*b, n).
        """
        return self.blocks.mv(x @ self.start) @ self.start.mT

    def dense(self) -> Tensor:
        """Return the matrix Q₀ Λ̄ Q₀'."""
        return self.start @ self.blocks.dense() @ self.start.mT

    @property
    def imag(self) -> Tensor | None:
        """The imaginary parts of the eigenvalues; None if all are real."""
        return self.blocks.imag


Eigen = BlockDiagonal | RotatedBlocks


def nearest_blocks(dense: Tensor, pairs: bool) -> BlockDiagonal:
    """Return the block-diagonal matrix nearest to `dense`, of the same kind as Λ̄.

    Args:
        dense: (*b, n, n).
        pairs: False for real eigenvalues: the diagonal of `dense`. True for complex pairs: of each 2-by-2 block on the
            diagonal the nearest a + ib, [[a, -b], [b, a]].

    Returns:
        The blocks, (*b, n).
    """
    diagonal = dense.diagonal(dim1=-2, dim2=-1)
    if not pairs:
        return BlockDiagonal(diagonal)
    below = dense.diagonal(-1, -2, -1)[..., ::2]
    above = dense.diagonal(1, -2, -1)[..., ::2]
    real = (diagonal[..., ::2] + diagonal[..., 1::2]) / 2
    return BlockDiagonal(real.repeat_interleave(2, -1), ((below - above) / 2).repeat_interleave(2, -1))


def block_diagonal(blocks: Tensor) -> Tensor:
    """Return the block-diagonal matrix of the blocks of all heads.

    Args:
        blocks: (*b, heads, m, m).

    Returns:
        (*b, heads·m, heads·m).
    """
    heads, size = blocks.shape[-3], blocks.shape[-1]
    eye = torch.eye(heads, dtype=blocks.dtype, device=blocks.device)
    spread = blocks.unsqueeze(-2) * eye[:, None, :, None]  # (*b, heads, m, heads, m)
    return spread.flatten(-2).flatten(-3, -2).reshape(*blocks.shape[:-3], heads * size, heads * size)


def scaled_skew(beta: float | Tensor, plane: KeyValue) -> Tensor:
    """Return the dense skew-symmetric matrix β (key value' - value key').

    Args:
        beta: β; a tensor is (*b, 1).
        plane: Key and value, (*b, n) each.

    Returns:
        (*b, n, n).
    """
    return (beta.unsqueeze(-1) if isinstance(beta, Tensor) else beta) * skew(plane.key, plane.value)
