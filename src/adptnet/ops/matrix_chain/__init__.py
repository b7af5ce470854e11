"""The product of a frame of vectors with a sequence of matrices."""

import torch
from torch import Tensor

from .. import _gpu
from .._torch_state import has_dispatch_mode, is_transformed
from . import cpu, reference

__all__ = ["matrix_chain"]


def matrix_chain(matrices: Tensor, frame: Tensor) -> Tensor:
    """Return A_T … A_2 A_1 F.

    Args:
        matrices: A, (batch, time, n, n).
        frame: F, (batch, n, count).

    Returns:
        (batch, n, count).
    """
    recorded = torch.is_grad_enabled() and (matrices.requires_grad or frame.requires_grad)
    if recorded or has_dispatch_mode() or is_transformed(matrices, frame) or not _gpu.is_cpu(matrices.device):
        return reference.matrix_chain(matrices, frame)
    run = cpu.matrix_chain if cpu.has_kernel(frame.dtype) else reference.matrix_chain
    return run(matrices, frame)
