"""A frame of vectors carried through matrices, one after another."""

import torch
from torch import Tensor

from .._torch_state import transformed, watched
from . import cpu, reference

__all__ = ["matrix_chain"]


def matrix_chain(matrices: Tensor, frame: Tensor) -> Tensor:
    """A_T … A_2 A_1 F.

    Args:
        matrices: (batch, time, n, n).
        frame: (batch, n, count).
    """
    recorded = torch.is_grad_enabled() and (matrices.requires_grad or frame.requires_grad)
    if recorded or watched() or transformed(matrices, frame) or matrices.device.type != "cpu":
        return reference.matrix_chain(matrices, frame)
    by_kernel = cpu.ready(frame.dtype)
    return cpu.matrix_chain(matrices, frame) if by_kernel else reference.matrix_chain(matrices, frame)
