"""Conversion of Python values to values that strict JSON can hold, and back."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["from_json_value", "to_json_value"]

_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json_value(value: Any, *, digits: int | None = None) -> Any:
    """Return `value` with tensors and tuples as lists, keys as text, and infinities and NaN as text.

    Args:
        value: Numbers, text, tensors, and mappings and lists of them.
        digits: Significant digits to which floats are rounded; all of them by default.
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item, digits=digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item, digits=digits) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return float(f"{value:.{digits}g}") if isinstance(value, float) and digits is not None else value


def from_json_value(value: Any) -> Any:
    """Return `value` with the texts "inf", "-inf" and "nan", which `to_json_value` writes, as floats again.

    Args:
        value: A parsed JSON value.
    """
    if isinstance(value, dict):
        return {key: from_json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json_value(item) for item in value]
    return _SPECIAL.get(value, value) if isinstance(value, str) else value
