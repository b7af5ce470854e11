"""Batched linear solves, which are incorrect in torch for large matrices on several threads."""

import torch
from torch import Tensor

from . import _gpu

__all__ = ["solve_linear"]

MAX_BATCHED_ROWS = 128  # larger matrices are solved one at a time


def solve_linear(matrices: Tensor, right: Tensor) -> Tensor:
    """Return X with matrices @ X = right.

    This is `torch.linalg.solve` except that a singular matrix gives NaN, which solvers report, and that large matrices
    are solved sequentially: on several CPU threads torch factorises many at a time with MKL routines that are not
    thread-safe, and from about 150 rows on it raises an error or returns wrong results
    (https://github.com/pytorch/pytorch/issues/142815). Inside `vmap` and compiled programs this cannot be avoided.

    Args:
        matrices: (*b, n, n).
        right: (*b, n, m).
    """
    batch = torch.broadcast_shapes(matrices.shape[:-2], right.shape[:-2])
    small = matrices.dim() == 2 or matrices.shape[-1] <= MAX_BATCHED_ROWS or not batch.numel()
    if small or torch.compiler.is_compiling() or not _gpu.is_cpu(matrices.device) or torch.get_num_threads() == 1:
        return _solve(matrices, right)
    each = (t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in (matrices, right))
    solutions = [_solve(matrix, columns) for matrix, columns in zip(*each, strict=True)]
    return torch.stack(solutions).reshape(*batch, *right.shape[-2:])


def _solve(matrices: Tensor, right: Tensor) -> Tensor:
    solution, failed = torch.linalg.solve_ex(matrices, right)
    return torch.where((failed == 0)[..., None, None], solution, torch.nan)
