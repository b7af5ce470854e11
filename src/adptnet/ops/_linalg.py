"""Linear equations with many matrices at once, which torch gets wrong on several threads."""

import torch
from torch import Tensor

__all__ = ["solve"]

SAFE = 128  # rows


def solve(matrices: Tensor, right: Tensor) -> Tensor:
    """X with matrices @ X = right, (*b, n, n) and (*b, n, m).

    As `torch.linalg.solve`, but a singular matrix gives NaN, which a solver reports, and large matrices are solved
    sequentially: on several threads of a CPU torch factorises many at a time with routines of MKL that do not allow it,
    and from about 150 rows on the result is an error or wrong numbers
    (https://github.com/pytorch/pytorch/issues/142815). Inside `vmap` and when compiled there is no such choice.
    """
    batch = torch.broadcast_shapes(matrices.shape[:-2], right.shape[:-2])
    together = matrices.dim() == 2 or matrices.shape[-1] <= SAFE or not batch.numel() or torch.compiler.is_compiling()
    if together or matrices.device.type != "cpu" or torch.get_num_threads() == 1:
        return _solve(matrices, right)
    each = (t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in (matrices, right))
    found = [_solve(matrix, columns) for matrix, columns in zip(*each, strict=True)]
    return torch.stack(found).reshape(*batch, *right.shape[-2:])


def _solve(matrices: Tensor, right: Tensor) -> Tensor:
    solved, failed = torch.linalg.solve_ex(matrices, right)
    return torch.where((failed == 0)[..., None, None], solved, torch.nan)
