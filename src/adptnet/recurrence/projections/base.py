"""Base classes of the projections: linear maps that give their matrix and can be bound for repeated application."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..._typing import Device, DType
from ...ops.products import multiply
from ...spec import Spec

__all__ = ["Biased", "Projection", "ProjectionSpec", "apply_map", "bind_map", "is_hooked", "with_bias"]


# Forward pre-hooks of PyTorch that compute a weight and ignore the input. They are run once for all applications.
_WEIGHT_HOOKS = (BasePruningMethod, WeightNorm, SpectralNorm)


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of a module may differ from `forward` of its class.

    Args:
        module: A module that may have hooks, or a `forward` that was replaced on the instance.
    """
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks or "forward" in module.__dict__:
        return True
    return not all(isinstance(hook, _WEIGHT_HOOKS) for hook in module._forward_pre_hooks.values())


def apply_map(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a map to `x`.

    Args:
        module: A `Projection`, or another module, which is called in the dtype of its weights.
        x: (*b, in_features).

    Returns:
        (*b, out_features), in the dtype of `x`.
    """
    if isinstance(module, Projection):
        projected: Tensor = module(x)
        return projected
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), x.dtype)
    return module(x.to(own)).to(x.dtype)  # type: ignore[no-any-return]


def bind_map(module: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that applies a map repeatedly.

    Args:
        module: A `Projection`, whose weights are evaluated once. A projection with hooks, or another module in place of
            a projection such as an adapter, is called every time.
        dtype: The dtype of the arguments.
    """
    if isinstance(module, Projection) and module.is_stock():
        module.refresh()
        return module.bind(dtype)
    return lambda x: apply_map(module, x)


class Projection(nn.Module, abc.ABC):
    """Base class of the linear maps on the last dimension.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
    """

    _is_consistent: ClassVar[bool]  # whether one class defines both `bind` and `dense`, or `bind` uses `dense`
    _has_own_factors: ClassVar[bool]  # whether one class defines `bind`, `dense` and `factors`

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        owners = [next(c for c in cls.__mro__ if name in c.__dict__) for name in ("bind", "dense", "factors")]
        cls._is_consistent = owners[0] in (Projection, owners[1])
        cls._has_own_factors = owners[0] is owners[1] is owners[2]

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """Return the matrix, (out_features, in_features)."""

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return the map as a function, with its weights evaluated once.

        Args:
            dtype: The dtype of the arguments.
        """
        transposed = self.dense().to(dtype).mT
        return lambda x: multiply(x, transposed)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to the last dimension.

        Args:
            x: (..., in_features).

        Returns:
            (..., out_features).
        """
        return self.bind(x.dtype)(x)

    def factors(self) -> dict[str, Tensor]:
        """Return the factors of the matrix A B' + C ⊗ D as "left", "right", "outer" and "inner"; empty without."""
        return {}

    def find_factors(self) -> dict[str, Tensor]:
        """Return `factors` if they are those of this map; empty if a subclass defines another map."""
        return self.factors() if self._has_own_factors else {}

    def split_heads(self) -> "list[Projection]":
        """Return the projection of each head; by default there is one."""
        return [self]

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules that this projection is composed of."""
        return ()

    def is_stock(self) -> bool:
        """Return whether a call equals `bind` and the product with `dense`.

        Neither this module nor its parts may have hooks or have been replaced, and a class that overrides only one of
        `bind` and `dense` must not inherit the other from a class that defines both.
        """
        if type(self).forward is not Projection.forward or is_hooked(self) or not self._is_consistent:
            return False
        return all(isinstance(part, Projection) and part.is_stock() for part in self.parts)

    def refresh(self) -> None:
        """Run the hooks that compute weights, such as those of pruning, here and in all parts."""
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, _WEIGHT_HOOKS):
                hook(self, ())
        for part in self.parts:
            if isinstance(part, Projection):
                part.refresh()

    @property
    def macs(self) -> int:
        """The number of multiply-accumulate operations of one application."""
        return self.in_features * self.out_features

    @property
    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def condition_number(self) -> Tensor:
        """Return the ratio of the largest to the smallest singular value; infinite if the matrix is singular."""
        dense = self.dense().detach()
        singular = torch.linalg.svdvals(dense.double())
        tiny = singular[0] * max(self.in_features, self.out_features) * torch.finfo(dense.dtype).eps
        return torch.where(singular[-1] > tiny, singular[0] / singular[-1].clamp(min=tiny), torch.inf)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Biased(Projection):
    """A projection with a bias, which is initialised at zero.

    Args:
        projection: The linear part.
    """

    def __init__(self, projection: Projection):
        super().__init__(projection.in_features, projection.out_features)
        self.projection = projection
        like = next(projection.parameters())
        self.bias = nn.Parameter(torch.zeros(projection.out_features, device=like.device, dtype=like.dtype))

    def dense(self) -> Tensor:
        return self.projection.dense()

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        project, bias = bind_map(self.projection, dtype), self.bias.to(dtype)
        return lambda x: project(x) + bias

    def factors(self) -> dict[str, Tensor]:
        return self.projection.find_factors()

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return (self.projection,)

    def is_stock(self) -> bool:
        # A kernel adds `bias` to the product with `dense`, which a subclass may define otherwise.
        return type(self).bind is Biased.bind and super().is_stock()

    @property
    def macs(self) -> int:
        return self.projection.macs


def with_bias(projection: Projection, bias: bool) -> Projection:
    """Return a projection with or without a bias.

    Args:
        projection: The linear part.
        bias: Whether to add a bias.
    """
    return Biased(projection) if bias else projection


class ProjectionSpec(Spec, abc.ABC):
    """Base class of the specs of a projection.

    Attributes:
        bias: Whether a bias is added. With a bias on K or V the lemmas do not hold (deviations.md, point 13).
    """

    bias: bool

    @abc.abstractmethod
    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        """Build the projection with newly initialised weights.

        Args:
            in_features: Size of the input.
            out_features: Size of the output.
            device: Device of the weights.
            dtype: Dtype of the weights.
        """
