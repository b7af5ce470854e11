"""Whether torch looks into every operation, which a kernel does not allow."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["transformed", "watched"]


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a tensor is inside vmap, jvp or another transform, or carries a forward-mode derivative."""
    if torch.compiler.is_compiling():
        return False
    forward_mode = forward_ad._current_level >= 0
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(t)
        or (forward_mode and forward_ad.unpack_dual(t).tangent is not None)
        for t in tensors
        if t is not None
    )


def watched() -> bool:
    """Whether a dispatch mode is to see every operation: one that counts them, or that has no numbers."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
