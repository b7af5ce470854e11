"""How many floating-point operations torch's counter counts: those of products with K and V, as it does elsewhere."""

import math
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
    """Count the FLOPs of `adptnet::adpt_scan`: K x and V x at every step."""
    return _products(inputs, form_of(inputs[-2]), _applied(inputs))


def backward_flops(gradient: Shape, states: Shape, kept: Shape, *inputs: Any, out_shape: Any = None, **_: Any) -> int:
    """Count those of `adptnet::adpt_scan_backward`: K', V', their gradients, and K x and V x if not saved."""
    form, applied = form_of(inputs[-1]), _applied(inputs)
    again = 0 if 0 not in kept else applied
    return _products(inputs, form, applied + again + _dense(inputs))


def _products(inputs: Sequence[Any], form: Form, multiplications: int) -> int:
    """Two for each multiply-accumulate of one step, for all steps of all sequences."""
    if not form.turns or form.given or form.linear:
        return 0
    batch, steps, _ = inputs[0]
    return int(2 * batch * steps * multiplications)


def _dense(inputs: Sequence[Any]) -> int:
    weight: Shape | None = inputs[_WEIGHT]
    return 0 if weight is None else math.prod(weight)


def _applied(inputs: Sequence[Any]) -> int:
    """Multiplications of K x and V x: by the factors, where there are any."""
    left, _, outer, inner = inputs[_FACTORS : _FACTORS + len(Factors._fields)]
    if left is None and outer is None:
        return _dense(inputs)
    low_rank = 0 if left is None else 2 * left[-1]
    kronecker = 0 if outer is None else outer[-1] + inner[-1]
    heads, both, size, _ = inputs[_WEIGHT]
    return int(heads * both * size * (low_rank + kronecker))
