"""A frame carried through matrices: the definition."""

from torch import Tensor

__all__ = ["matrix_chain"]


def matrix_chain(matrices: Tensor, frame: Tensor) -> Tensor:
    """A_T … A_2 A_1 F."""
    for matrix in matrices.unbind(1):
        frame = matrix @ frame
    return frame
