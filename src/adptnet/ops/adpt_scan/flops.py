"""FLOP formulas for torch's counter. It counts matrix products only, here those with K and V."""

import math
import sys
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .form import Constants, Factors, Form, decode_form

__all__ = ["backward_flops", "forward_flops", "register"]

_COUNTER = "torch.utils.flop_counter"
_WEIGHT = 2 + Constants._fields.index("weight")
_FACTORS = 2 + len(Constants._fields) + 2

Shape = Sequence[int]


def register(formulas: dict[Any, Any]) -> None:
    """Register formulas with torch's FLOP counter, and with counters that are active.

    This is not done at import, because the module of the counter imports Triton.

    Args:
        formulas: From operations to functions of shapes.
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
    """Count the FLOPs of `adptnet::adpt_scan`: K x and V x at every step.

    Args:
        inputs: The arguments of the operation, with shapes instead of tensors.
        out_shape: The shapes of the results; not used.
    """
    return _total_flops(inputs, decode_form(inputs[-2]), _product_macs(inputs))


def backward_flops(gradient: Shape, states: Shape, saved: Shape, *inputs: Any, out_shape: Any = None, **_: Any) -> int:
    """Count the FLOPs of `adptnet::adpt_scan_backward`.

    These are the products with K' and V', the gradients of K and V, and K x and V x unless they were saved.

    Args:
        gradient, states, saved, inputs: The arguments of the operation, with shapes instead of tensors.
        out_shape: The shapes of the results; not used.
    """
    form, macs = decode_form(inputs[-1]), _product_macs(inputs)
    recomputed = 0 if 0 not in saved else macs
    return _total_flops(inputs, form, macs + recomputed + _dense_macs(inputs))


def _total_flops(inputs: Sequence[Any], form: Form, macs: int) -> int:
    """Return the FLOPs of all steps of all sequences: two for each multiply-accumulate of a step."""
    if not form.has_products:
        return 0
    batch, steps, _ = inputs[0]
    return int(2 * batch * steps * macs)


def _dense_macs(inputs: Sequence[Any]) -> int:
    weight: Shape | None = inputs[_WEIGHT]
    return 0 if weight is None else math.prod(weight)


def _product_macs(inputs: Sequence[Any]) -> int:
    """Return the multiply-accumulates of K x and V x, with the factors if there are any."""
    left, _, outer, inner = inputs[_FACTORS : _FACTORS + len(Factors._fields)]
    if left is None and outer is None:
        return _dense_macs(inputs)
    low_rank = 0 if left is None else 2 * left[-1]
    kronecker = 0 if outer is None else outer[-1] + inner[-1]
    heads, both, size, _ = inputs[_WEIGHT]
    return int(heads * both * size * (low_rank + kronecker))
