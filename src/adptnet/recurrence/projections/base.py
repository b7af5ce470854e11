"""What a projection is: a linear map with a matrix, and a way to apply it many times."""

import abc
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..._typing import Device, DType
from ...spec import Spec

__all__ = ["Biased", "Projection", "ProjectionSpec", "apply_map", "bind_map", "is_hooked", "with_bias"]


# Forward pre-hooks of torch that compute a weight and look at no input: they are run once for all applications.
_WEIGHT_HOOKS = (BasePruningMethod, WeightNorm, SpectralNorm)


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of `module` does more, or other, than its class says: hooks, or a forward of its own."""
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks or "forward" in module.__dict__:
        return True
    return not all(isinstance(hook, _WEIGHT_HOOKS) for hook in module._forward_pre_hooks.values())


def apply_map(module: nn.Module, x: Tensor) -> Tensor:
    """Call a map on `x`, in the dtype of its weights if it is not a `Projection`; the result has the dtype of `x`."""
    if isinstance(module, Projection):
        projected: Tensor = module(x)
        return projected
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), x.dtype)
    return module(x.to(own)).to(x.dtype)  # type: ignore[no-any-return]


def bind_map(module: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a map in `dtype`: a projection evaluated once, or the module itself where its call must happen.

    That is a module with hooks, and one of another kind in the place of a projection, such as an adapter.
    """
    if isinstance(module, Projection) and module.is_stock():
        module.refresh()
        return module.bound(dtype)
    return lambda x: apply_map(module, x)


class Projection(nn.Module, abc.ABC):
    """A linear map on the last dimension."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """The matrix, (out_features, in_features)."""

    def bound(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The map in `dtype`, with all that does not depend on its argument evaluated once."""
        transposed = self.dense().to(dtype).mT
        return lambda x: x @ transposed

    def forward(self, x: Tensor) -> Tensor:
        return self.bound(x.dtype)(x)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The maps that this one is made of."""
        return ()

    def is_stock(self) -> bool:
        """Return whether a call is `bound` and nothing else: no hooks or adapters, here and in its parts."""
        if type(self).forward is not Projection.forward or is_hooked(self):
            return False
        return all(isinstance(part, Projection) and part.is_stock() for part in self.parts)

    def refresh(self) -> None:
        """Run the hooks that compute weights, such as those of pruning."""
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, _WEIGHT_HOOKS):
                hook(self, ())
        for part in self.parts:
            if isinstance(part, Projection):
                part.refresh()

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one application."""
        return self.in_features * self.out_features

    @property
    def parameter_count(self) -> int:
        """Numbers that are stored and learn."""
        return sum(parameter.numel() for parameter in self.parameters())

    def condition_number(self) -> Tensor:
        """Largest over smallest singular value of the matrix; infinite if it is singular."""
        dense = self.dense().detach()
        singular = torch.linalg.svdvals(dense.double())
        tiny = singular[0] * max(self.in_features, self.out_features) * torch.finfo(dense.dtype).eps
        return torch.where(singular[-1] > tiny, singular[0] / singular[-1].clamp(min=tiny), torch.inf)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Biased(Projection):
    """A projection and a bias, which starts at zero."""

    def __init__(self, projection: Projection):
        super().__init__(projection.in_features, projection.out_features)
        self.projection = projection
        like = next(projection.parameters())
        self.bias = nn.Parameter(torch.zeros(projection.out_features, device=like.device, dtype=like.dtype))

    def dense(self) -> Tensor:
        return self.projection.dense()

    def bound(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        project, bias = bind_map(self.projection, dtype), self.bias.to(dtype)
        return lambda x: project(x) + bias

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return (self.projection,)

    @property
    def macs(self) -> int:
        return self.projection.macs


def with_bias(projection: Projection, bias: bool) -> Projection:
    """`projection`, with a bias if asked for."""
    return Biased(projection) if bias else projection


class ProjectionSpec(Spec, abc.ABC):
    """The description of a projection.

    Attributes:
        bias: Whether a bias is added. On K or V it takes the layer outside the lemmas (deviations.md, point 13).
    """

    bias: bool

    @abc.abstractmethod
    def build(self, in_features: int, out_features: int, *, device: Device = None, dtype: DType = None) -> Projection:
        """Makes the map from `in_features` to `out_features`, with fresh weights."""
