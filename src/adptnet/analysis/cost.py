"""Multiply-accumulates (MACs) of a step, counted while it runs."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..cells.structure import compute_jacobian, compute_jacobian_blocks, make_step
from .trajectory import resolve_cell

__all__ = ["Cost", "cost", "macs"]

_ELEMENTWISE = {
    "mul",
    "mul_",
    "div",
    "div_",
    "addcmul",
    "addcdiv",
    "square",
    "pow",
    "rsqrt",
    "reciprocal",
    "linalg_vector_norm",
}
_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "mv": 0,
    "dot": 0,
    "addmm": 1,
    "addmv": 1,
    "baddbmm": 1,
}  # index of the first factor among the arguments


class Cost(NamedTuple):
    """Multiply-accumulates per step and sequence."""

    prepare: int  # work that does not depend on the state
    step: int
    conjugate_diagonal: int | None  # diag M, for Forward-DEER with a real spectrum; None unless the cell is an ADPTCell
    jacobian_diagonal: int  # diag J, for Quasi-DEER
    jacobian: int  # J, for DEER

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:,}" for name, value in self._asdict().items() if value is not None)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            first = args[_PRODUCTS[name]]
            self.macs += result.numel() * first.shape[-1]
        elif name in _ELEMENTWISE:
            tensors = [a for a in args if isinstance(a, Tensor)]
            self.macs += (
                max((t.numel() for t in tensors), default=0) if name == "linalg_vector_norm" else result.numel()
            )
        return result


@torch.no_grad()
def cost(system: Any) -> Cost:
    """Count the multiply-accumulates of one step, of its preparation and of its linearizations, for one sequence.

    The operations are run and counted: matrix products, and elementwise products, quotients, squares, powers,
    reciprocals, reciprocal square roots and vector norms. Sums and other functions are not counted. Values that are
    constant along a sequence (the eigenvalues, an orthogonal weight) are not counted. For a real spectrum, the diagonal
    of M is the extra cost of Forward-DEER in table:conv_forward_flops; Conv-DEER has none.

    Args:
        system: A layer or a cell.
    """
    cell = resolve_cell(system)
    state = torch.randn(1, cell.state_size, dtype=cell.dtype, device=cell.device)
    features = 1 if cell.input_size is None else cell.input_size
    inputs = torch.randn(1, 1, features, dtype=state.dtype, device=state.device)
    position = torch.zeros(1, 1, dtype=torch.int64, device=state.device)
    drive = cell.prepare(inputs, position)
    step = make_step(cell)
    # Every call also computes values that are constant along a sequence. The difference between 8 states and 1 cancels
    # them.
    count = 8
    states, drives = state.expand(count, -1), drive[:, 0].expand(count, -1)

    def per_state(function: Any) -> int:
        macs_of_all, macs_of_one = macs(lambda: function(states, drives)), macs(lambda: function(state, drive[:, 0]))
        return math.ceil((macs_of_all - macs_of_one) / (count - 1))

    conjugate = cell.structure().conjugate
    diagonal = None if conjugate is None else macs(conjugate(state, drive[:, 0]).diagonal)
    sequence = inputs.expand(1, count, features), position.expand(1, count)
    macs_of_all, macs_of_one = macs(lambda: cell.prepare(*sequence)), macs(lambda: cell.prepare(inputs, position))
    return Cost(
        prepare=math.ceil((macs_of_all - macs_of_one) / (count - 1)),
        step=macs(lambda: step(state, drive[:, 0])),
        conjugate_diagonal=diagonal,
        jacobian_diagonal=per_state(functools.partial(compute_jacobian_blocks, cell)),
        jacobian=per_state(functools.partial(compute_jacobian, cell)),
    )


def macs(call: Callable[[], object]) -> int:
    """Return the multiply-accumulates of the torch operations that `call` runs.

    Args:
        call: A function without arguments.
    """
    counter = _Counter()
    with counter:
        call()
    return counter.macs
