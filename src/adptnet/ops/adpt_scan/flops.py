"""How many floating-point operations torch's counter counts: those of products with K and V, as it does elsewhere."""

import sys
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .form import Constants, Factors, Form, form_of

__all__ = ["backward_flops", "forward_flops", "introduce"]

_COUNTER = "torch.utils.flop_counter"
_WEIGHT = 2 + Constants._fields.index("weight")
_FACTORS = 2 + len(Constants._fields) + 2

Shape = Sequence[int]


def introduce(formulas: dict[Any, Any]) -> None:
    """Give the formulas to torch's counter, and to one that is counting now.

    Not at import: the module of the counter imports Triton.
    """
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        return
    for operation, formula in formulas.items():
        if operation not in counter.flop_registry:
            counter.register_flop_formula(operation)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update({operation: counter.flop_registry[operation] for operation in formulas})


def forward_flops(*inputs: Any, out_shape: Any = None, **_: Any) -> int:
    """Of `adptnet::adpt_scan`: K x and V x at every step."""
    return _products(inputs, form_of(inputs[-2]), _applied(inputs))


def backward_flops(gradient: Shape, states: Shape, kept: Shape, *inputs: Any, out_shape: Any = None, **_: Any) -> int:
    """Of `adptnet::adpt_scan_backward`: K' and V' at every step, their derivatives, and K x and V x if not kept."""
    form, applied = form_of(inputs[-1]), _applied(inputs)
    again = 0 if 0 not in kept else applied
    return _products(inputs, form, applied + again + _dense(inputs))


def _products(inputs: Sequence[Any], form: Form, multiplications: int) -> int:
    """Two for each multiply-accumulate of one step, for all steps of all sequences."""
    if not form.turns or form.given or form.linear:
        return 0
    batch, steps = inputs[0][:2]
    return 2 * batch * steps * multiplications


def _dense(inputs: Sequence[Any]) -> int:
    heads, both, rows, columns = inputs[_WEIGHT] or (0, 0, 0, 0)
    return heads * both * rows * columns  # type: ignore[no-any-return]


def _applied(inputs: Sequence[Any]) -> int:
    """Multiplications of K x and V x: by the factors, where there are any."""
    factors = Factors(*inputs[_FACTORS : _FACTORS + len(Factors._fields)])
    if factors == Factors():
        return _dense(inputs)
    heads, both, size = inputs[_WEIGHT][:3]
    low_rank = 0 if factors.left is None else 2 * size * factors.left[-1]
    kronecker = 0 if factors.outer is None else size * (factors.outer[-1] + factors.inner[-1])
    return heads * both * (low_rank + kronecker)  # type: ignore[no-any-return]
