"""Helpers of the scan tests: random transitions of every shape, and gradients."""

import pytest
import torch

real_or_complex = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
either_way = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])

# Shapes that broadcast to the transition of every step of every sequence.
transition_shapes = {
    "constant": lambda batch, steps, n: (n,),
    "constant row": lambda batch, steps, n: (1, n),
    "per sequence": lambda batch, steps, n: (*batch, 1, n),
    "per step": lambda batch, steps, n: (steps, n),
    "per sequence and step": lambda batch, steps, n: (*batch, steps, n),
}


def randn(*shape, dtype=torch.float64, generator=None):
    return torch.randn(*shape, dtype=dtype, generator=generator)


def random_eigenvalues(*shape, dtype=torch.float64, generator=None):
    """Return numbers of modulus up to 1.1, some of them zero; real ones of either sign."""
    drawn = randn(*shape, dtype=dtype, generator=generator)
    modulus = 1.1 * torch.rand(*shape, generator=generator, dtype=torch.float64)
    return drawn / drawn.abs() * torch.where(modulus < 0.1, 0.0, modulus)


def run_with_gradients(function, tensors):
    """Return the result of a function, and the gradients of a fixed linear combination of it."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    values = function(*leaves)
    weights = randn(*values.shape, dtype=values.dtype, generator=torch.Generator().manual_seed(9))
    total = (values * weights).sum()
    gradients = torch.autograd.grad(total.real, leaves, materialize_grads=True)
    return values, gradients
