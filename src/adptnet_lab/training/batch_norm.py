"""Batch norm over the batches of all processes, on any backend: torch's own is for GPUs only."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["SharedBatchNorm", "share_batch_norms"]


class SharedBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` on (rows, features), with mean and variance over the rows of every process."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = _summed(torch.full((), float(len(x)), device=x.device, dtype=wide.dtype))
        mean = _summed(wide.sum(0)) / count
        variance = _summed((wide - mean).square().sum(0)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            share = self.momentum or 0.1
            with torch.no_grad():
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * count / (count - 1), share)
                self.num_batches_tracked.add_(1)
        normed = (wide - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
        return normed.to(x.dtype)


def share_batch_norms(model: nn.Module) -> None:
    """Puts a `SharedBatchNorm` with the same weights and buffers in place of every batch norm of `model`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.BatchNorm1d:
                shared = SharedBatchNorm(child.num_features, child.eps, child.momentum)
                shared._parameters, shared._buffers = child._parameters, child._buffers
                setattr(module, name, shared.train(child.training))


def _summed(values: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """The sum over processes. The gradient of the sum of all losses is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total
