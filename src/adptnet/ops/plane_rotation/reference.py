"""The specification of `rotate`: the application of a plane rotation in PyTorch."""

from torch import Tensor

__all__ = ["rotate", "weights"]


def rotate(
    x: Tensor,
    key: Tensor,
    offset: Tensor,
    skew_coefficient: Tensor,
    key_coefficient: Tensor,
    offset_coefficient: Tensor,
) -> Tensor:
    """Return x + (κ (k·x) + σ (o·x)) k + (ρ (o·x) - σ (k·x)) o.

    Args:
        x: (..., n), the vector to rotate.
        key: k, (..., n).
        offset: o, (..., n).
        skew_coefficient: σ, (..., 1).
        key_coefficient: κ, (..., 1).
        offset_coefficient: ρ, (..., 1).
    """
    on_key, on_offset = weights(x, key, offset, skew_coefficient, key_coefficient, offset_coefficient)
    return x + on_key * key + on_offset * offset


def weights(
    x: Tensor,
    key: Tensor,
    offset: Tensor,
    skew_coefficient: Tensor,
    key_coefficient: Tensor,
    offset_coefficient: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the coefficients of `key` and of `offset` in the difference of the rotated vector and x.

    Args:
        x, key, offset, skew_coefficient, key_coefficient, offset_coefficient: As in `rotate`.
    """
    along_key = (x * key).sum(-1, keepdim=True)
    along_offset = (x * offset).sum(-1, keepdim=True)
    on_key = key_coefficient * along_key + skew_coefficient * along_offset
    return on_key, offset_coefficient * along_offset - skew_coefficient * along_key
