"""Matrix products of the recurrence in bfloat16, for processors that have instructions for them.

Processors with AVX512-BF16 or AMX multiply matrices of bfloat16 several times faster than of float32. Only the
arguments of a product are rounded, to eight significant bits; state, rotation, gains and parameters stay in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = ["bfloat16_products", "has_bfloat16_products", "multiply"]

_enabled: ContextVar[bool] = ContextVar("bfloat16_products", default=False)


@contextmanager
def bfloat16_products(enabled: bool = True) -> Iterator[None]:
    """Run the products with K, V, B and the read-out in bfloat16 inside this context; off by default.

    It applies to float32 layers with the sequential solver. A layer whose K and V depend on the state then runs the
    eager loop over time, which pays off from about a hundred sequences of a few steps at a few hundred state
    dimensions. Programs of `torch.compile` ignore it.

    Args:
        enabled: False for products in float32.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def has_bfloat16_products() -> bool:
    """Return whether products of the recurrence run in bfloat16."""
    return not torch.compiler.is_compiling() and _enabled.get()


def multiply(x: Tensor, transposed: Tensor) -> Tensor:
    """Return `x @ transposed`, computed in bfloat16 if `has_bfloat16_products`; the result has the dtype of `x`.

    Args:
        x: (..., in_features).
        transposed: The transpose of a weight, (in_features, out_features).
    """
    if x.dtype != torch.float32 or not has_bfloat16_products():
        return x @ transposed
    return (x.bfloat16() @ transposed.bfloat16()).to(x.dtype)
