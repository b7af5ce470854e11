"""Running a stretch of a long computation now, and again when its gradient is needed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

__all__ = ["recomputed"]

Run = Callable[..., tuple[Tensor, ...]]


def recomputed(run: Run, arguments: Sequence[Tensor], parameters: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """run(*arguments), of which nothing but the arguments is kept for the backward pass.

    Unlike torch's own checkpoint it does not keep the graph either, which for thousands of small operations is what
    takes the memory. That asks for the parameters by name; where they are not known (None), torch's own is used.
    """
    if parameters is None:
        kept: tuple[Tensor, ...] = checkpoint(run, *arguments, use_reentrant=False)
        return kept
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
            again = [a.detach().requires_grad_(a.requires_grad) for a in arguments]
            outputs = ctx.run(*again)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
        wanted = [tensor for tensor in (*again, *parameters) if tensor.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        each = iter(found)
        return None, None, *(next(each) if tensor.requires_grad else None for tensor in (*again, *parameters))
