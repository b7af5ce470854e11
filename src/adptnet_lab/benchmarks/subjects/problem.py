"""One recurrence to measure: the same at every size, and for every subject that is about the operation itself."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adptnet.ops.adpt_scan import DENSE, Constants, Form, adpt_scan, cpu

from ..subject import Size

__all__ = ["Problem", "as_reference"]


class Problem:
    """Λ̄ from a step to thousands, K and V dense, β = 0.125, a drive of noise; and what training asks for."""

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
        return [self.drive, *(t for t in self.constants if t is not None)]

    @property
    def weight(self) -> Tensor:
        assert self.constants.weight is not None
        return self.constants.weight.detach()

    def forward(self) -> Tensor:
        """Of tensors that ask for no derivative: what switches it off would be measured with it."""
        drive, constants = self._fixed
        return adpt_scan(drive, self.state, constants, self.form)

    def training(self, *, lean: bool = False) -> None:
        states = adpt_scan(self.drive, self.state, self.constants, self.form, lean=lean)
        torch.autograd.grad(states, self.leaves, self.upstream)

    def products(self, *which: str) -> None:
        """Only the matrix products of the "forward", of the "backward" or of the "weights", by our tiles."""
        for one in which:
            cpu.products(self._inputs, self.form, one)

    def some_steps(self, run: Callable[..., Tensor], steps: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Forward and training of the first steps by another program, which takes drive, state and constants."""
        drive, upstream = self.drive.detach()[:, :steps].clone().requires_grad_(), self.upstream[:, :steps]
        leaves = [drive, *self.leaves[1:]]

        def forward() -> Tensor:
            with torch.no_grad():
                return run(drive, self.state, self.constants)

        return forward, lambda: torch.autograd.grad(run(drive, self.state, self.constants), leaves, upstream)


@contextmanager
def as_reference() -> Iterator[None]:
    """Every operation as its torch program, while it lasts."""
    before = os.environ.get("ADPTNET_BACKEND")
    os.environ["ADPTNET_BACKEND"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["ADPTNET_BACKEND"]
        else:
            os.environ["ADPTNET_BACKEND"] = before
