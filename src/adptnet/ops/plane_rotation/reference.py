"""A vector turned in a plane, in torch: the specification of `turned`."""

from torch import Tensor

__all__ = ["turned", "weights"]


def turned(x: Tensor, key: Tensor, offset: Tensor, turn: Tensor, shrink_key: Tensor, shrink_offset: Tensor) -> Tensor:
    """x + (a (k·x) + t (o·x)) k + (b (o·x) - t (k·x)) o, of key k, offset o, turn t, and a and b that shrink them.

    Vectors are (..., n) and numbers (..., 1), broadcast against each other.
    """
    on_key, on_offset = weights(x, key, offset, turn, shrink_key, shrink_offset)
    return x + on_key * key + on_offset * offset


def weights(
    x: Tensor, key: Tensor, offset: Tensor, turn: Tensor, shrink_key: Tensor, shrink_offset: Tensor
) -> tuple[Tensor, Tensor]:
    """What is added to x: weights of the key and of the offset."""
    along = (x * key).sum(-1, keepdim=True)
    across = (x * offset).sum(-1, keepdim=True)
    return shrink_key * along + turn * across, shrink_offset * across - turn * along
