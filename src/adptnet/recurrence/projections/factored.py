"""Projections with few parameters (sec:low_param_linear): low rank, Kronecker products, and their sum."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..._typing import Device, DType
from ...errors import SpecError
from ...ops.products import multiply
from ...spec import check_size, spec
from .base import Projection, ProjectionSpec, bind_map, with_bias

__all__ = ["Kronecker", "LowParam", "LowRank", "square_factors"]


@spec
class LowRank(ProjectionSpec):
    """A Bᵀ with `rank` columns each (eq:low_rank_matrix): (in + out)·rank weights, a matrix of at most this rank.

    Its entries are initialised with the variance of `Dense`, 1/(3 in_features).

    Attributes:
        rank: Number of columns of A and B.
        bias: Whether a bias is added.
    """

    rank: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_size(self, rank=self.rank)

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        left = torch.randn(out_features, self.rank, device=device, dtype=dtype) * self.rank**-0.5
        right = torch.randn(in_features, self.rank, device=device, dtype=dtype) * (3 * in_features) ** -0.5
        return with_bias(LowRankProjection(left, right), self.bias)


class LowRankProjection(Projection):
    """left rightᵀ.

    Args:
        left: (out_features, rank).
        right: (in_features, rank).
    """

    def __init__(self, left: Tensor, right: Tensor):
        super().__init__(len(right), len(left))
        self.left = nn.Parameter(left)
        self.right = nn.Parameter(right)

    def dense(self) -> Tensor:
        return self.left @ self.right.mT

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        left, right = self.left.to(dtype).mT, self.right.to(dtype)
        return lambda x: multiply(multiply(x, right), left)

    def factors(self) -> dict[str, Tensor]:
        return {"left": self.left, "right": self.right}

    @property
    def macs(self) -> int:
        return self.left.numel() + self.right.numel()


@spec
class Kronecker(ProjectionSpec):
    """C ⊗ D with square factors of sizes a and b (eq:kronecker_product): full rank from a² + b² weights.

    It is applied by the vec trick, C X Dᵀ with X the rows of x of length b (eq:vec_trick, which is printed transposed);
    the product matrix is never formed. Its entries are initialised with the variance of `Dense`.

    Attributes:
        factors: The sizes (a, b) of C and D.
        bias: Whether a bias is added.
    """

    factors: tuple[int, int]
    bias: bool = False

    def __post_init__(self) -> None:
        _check_factors(self, self.factors)

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        _check_product(self, self.factors, in_features, out_features)
        a, b = self.factors
        outer = torch.randn(a, a, device=device, dtype=dtype) * a**-0.5
        inner = torch.randn(b, b, device=device, dtype=dtype) * (3 * b) ** -0.5
        return with_bias(KroneckerProjection(outer, inner), self.bias)


class KroneckerProjection(Projection):
    """outer ⊗ inner.

    Args:
        outer: (a, a).
        inner: (b, b).
    """

    def __init__(self, outer: Tensor, inner: Tensor):
        size = len(outer) * len(inner)
        super().__init__(size, size)
        self.outer = nn.Parameter(outer)
        self.inner = nn.Parameter(inner)

    def dense(self) -> Tensor:
        return torch.kron(self.outer, self.inner)

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        outer, inner = self.outer.to(dtype), self.inner.to(dtype).mT
        a, b = len(outer), len(inner)
        return lambda x: (outer @ (x.unflatten(-1, (a, b)) @ inner)).flatten(-2)

    def factors(self) -> dict[str, Tensor]:
        return {"outer": self.outer, "inner": self.inner}

    @property
    def macs(self) -> int:
        a, b = len(self.outer), len(self.inner)
        return a * b * (a + b)


@spec
class LowParam(ProjectionSpec):
    """A Bᵀ + C ⊗ D (eq:low_param_linear): full rank once trained, from few weights.

    Initialised as in the paper: B = 0, A ~ N(0, 1/rank), C = 1, D uniform in ±√(1/(a·b)). The outputs then have the
    variance of those of `nn.Linear`, but the matrix has rank b or less, because C is all ones. So K x can be zero
    before training, and then the rotation is the identity.

    Attributes:
        factors: The sizes (a, b) of C and D.
        rank: Number of columns of A and B.
        bias: Whether a bias is added.
    """

    factors: tuple[int, int]
    rank: int
    bias: bool = False

    def __post_init__(self) -> None:
        _check_factors(self, self.factors)
        check_size(self, rank=self.rank)

    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        _check_product(self, self.factors, in_features, out_features)
        a, b = self.factors
        low = LowRankProjection(
            torch.randn(out_features, self.rank, device=device, dtype=dtype) * self.rank**-0.5,
            torch.zeros(in_features, self.rank, device=device, dtype=dtype),
        )
        reach = in_features**-0.5
        kronecker = KroneckerProjection(
            torch.ones(a, a, device=device, dtype=dtype),
            torch.empty(b, b, device=device, dtype=dtype).uniform_(-reach, reach),
        )
        return with_bias(LowParamProjection(low, kronecker), self.bias)


class LowParamProjection(Projection):
    """The sum of a low-rank and a Kronecker projection.

    Args:
        low_rank: A Bᵀ.
        kronecker: C ⊗ D.
    """

    def __init__(self, low_rank: LowRankProjection, kronecker: KroneckerProjection):
        super().__init__(kronecker.in_features, kronecker.out_features)
        self.low_rank = low_rank
        self.kronecker = kronecker

    def dense(self) -> Tensor:
        return self.low_rank.dense() + self.kronecker.dense()

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        low_rank, kronecker = bind_map(self.low_rank, dtype), bind_map(self.kronecker, dtype)
        return lambda x: low_rank(x) + kronecker(x)

    def factors(self) -> dict[str, Tensor]:
        low_rank, kronecker = self.low_rank.find_factors(), self.kronecker.find_factors()
        return {**low_rank, **kronecker} if low_rank and kronecker else {}

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return self.low_rank, self.kronecker

    @property
    def macs(self) -> int:
        return self.low_rank.macs + self.kronecker.macs


def _check_factors(owner: ProjectionSpec, factors: tuple[int, int]) -> None:
    if not isinstance(factors, tuple) or len(factors) != 2:
        raise SpecError(f"{type(owner).__name__}(factors={factors!r}): factors are two sizes, e.g. factors=(32, 16).")
    for factor in factors:
        check_size(owner, factors=factor)


def _check_product(owner: ProjectionSpec, factors: tuple[int, int], in_features: int, out_features: int) -> None:
    a, b = factors
    name = type(owner).__name__
    if in_features != out_features:
        raise SpecError(
            f"{name}(factors={factors}) is square; it cannot map {in_features} features to {out_features}. "
            "Pass Dense() for this map, or state_size equal to the width."
        )
    if a * b != in_features:
        raise SpecError(
            f"{name}(factors={factors}) has size {a * b}, but the map has {in_features} features. "
            f"Pass factors={square_factors(in_features)}."
        )


def square_factors(size: int) -> tuple[int, int]:
    """Return the two factors of `size` that are closest to each other, the larger first.

    Args:
        size: An integer >= 1.
    """
    if not isinstance(size, int) or size < 1:
        raise SpecError(f"a width of {size!r}: must be an integer >= 1.")
    smaller = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
    return size // smaller, smaller
