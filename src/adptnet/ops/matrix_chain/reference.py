"""The specification of `matrix_chain`."""

from torch import Tensor

__all__ = ["matrix_chain"]


def matrix_chain(matrices: Tensor, frame: Tensor) -> Tensor:
    """Return A_T … A_2 A_1 F.

    Args:
        matrices: A, (batch, time, n, n).
        frame: F, (batch, n, count).
    """
    for matrix in matrices.unbind(1):
        frame = matrix @ frame
    return frame
