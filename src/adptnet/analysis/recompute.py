"""Gradient checkpointing that keeps neither activations nor the autograd graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

__all__ = ["run_recomputed"]

Run = Callable[..., tuple[Tensor, ...]]


def run_recomputed(run: Run, arguments: Sequence[Tensor], parameters: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """Return run(*arguments) and keep only the arguments for the backward pass, which runs it again.

    Unlike `torch.utils.checkpoint`, it does not keep the autograd graph, which dominates memory for thousands of small
    operations. This requires the list of parameters; where it is not known (None), `torch.utils.checkpoint` is used.

    Args:
        run: A function of tensors that returns a tuple of tensors.
        arguments: Its arguments.
        parameters: The parameters that `run` depends on.
    """
    if parameters is None:
        results: tuple[Tensor, ...] = checkpoint(run, *arguments, use_reentrant=False)
        return results
    apply: Run = _Recomputed.apply
    return apply(run, len(arguments), *arguments, *parameters)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.count = run, count
        ctx.save_for_backward(*tensors)
        return tuple(run(*tensors[:count]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments, parameters = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        with torch.enable_grad():
            leaves = [a.detach().requires_grad_(a.requires_grad) for a in arguments]
            outputs = ctx.run(*leaves)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
        sources = [tensor for tensor in (*leaves, *parameters) if tensor.requires_grad]
        derivatives: Sequence[Tensor | None] = [None] * len(sources)
        if pairs and sources:
            derivatives = torch.autograd.grad([o for o, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
        remaining = iter(derivatives)
        return None, None, *(next(remaining) if tensor.requires_grad else None for tensor in (*leaves, *parameters))
