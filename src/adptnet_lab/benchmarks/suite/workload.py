"""The recurrence that the benchmarks of the operation itself run: the same at every size and in every benchmark."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adptnet.ops.adpt_scan import DENSE, Constants, Form, adpt_scan, cpu

from ..benchmark import Size

__all__ = ["RecurrenceWorkload", "use_reference_backend"]


class RecurrenceWorkload:
    """A recurrence with dense K and V, β = 0.125, timescales from one step to thousands, and a drive of noise.

    Args:
        size: Its size.
    """

    def __init__(self, size: Size):
        torch.manual_seed(0)
        self.size = size
        n = size.state
        real = torch.exp(-0.5 * torch.exp(torch.linspace(-7, -2.3, n)))
        weight = (torch.rand(1, 2, n, n) * 2 - 1) / n**0.5
        self.form = Form()
        self.state = torch.zeros(size.batch, n)
        drive, beta = torch.randn(size.batch, size.steps, n) * (1 - real), torch.tensor([0.125])
        self._fixed = drive, Constants(real, weight=weight, beta=beta)
        self.drive, real, weight, beta = (t.detach().requires_grad_() for t in (drive, real, weight, beta))
        self.constants = Constants(real, weight=weight, beta=beta)
        self.upstream = torch.randn(size.batch, size.steps, n)
        self._inputs = (self.drive, self.state, *self.constants, None, None, *DENSE)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors whose gradients training computes."""
        return [self.drive, *(t for t in self.constants if t is not None)]

    @property
    def weight(self) -> Tensor:
        """K and V, (1, 2, n, n)."""
        assert self.constants.weight is not None
        return self.constants.weight.detach()

    def forward(self) -> Tensor:
        """Run the forward pass on tensors without gradients, since `torch.no_grad` would be timed as well."""
        drive, constants = self._fixed
        return adpt_scan(drive, self.state, constants, self.form)

    def training(self, *, lean: bool = False) -> None:
        """Run the forward and the backward pass; `lean` saves memory by recomputing projections.

        Args:
            lean: Whether to save memory by recomputing projections in the backward pass.
        """
        states = adpt_scan(self.drive, self.state, self.constants, self.form, lean=lean)
        torch.autograd.grad(states, self.leaves, self.upstream)

    def products(self, *which: str) -> None:
        """Run only the matrix products of the kernel.

        Args:
            *which: "forward", "backward" and "weights": the products of the forward pass, of the backward pass, and of
                the gradient of the weights.
        """
        for one in which:
            cpu.run_products(self._inputs, self.form, one)

    def first_steps(self, run: Callable[..., Tensor], steps: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return forward and training of the first steps by another implementation.

        Args:
            run: A function of drive, state and constants.
            steps: The number of steps.
        """
        drive, upstream = self.drive.detach()[:, :steps].clone().requires_grad_(), self.upstream[:, :steps]
        leaves = [drive, *self.leaves[1:]]

        def forward() -> Tensor:
            with torch.no_grad():
                return run(drive, self.state, self.constants)

        return forward, lambda: torch.autograd.grad(run(drive, self.state, self.constants), leaves, upstream)


@contextmanager
def use_reference_backend() -> Iterator[None]:
    """Run every operation by its PyTorch reference inside the block."""
    before = os.environ.get("ADPTNET_BACKEND")
    os.environ["ADPTNET_BACKEND"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["ADPTNET_BACKEND"]
        else:
            os.environ["ADPTNET_BACKEND"] = before
