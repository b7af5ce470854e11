"""Conversion of values to strict JSON and back."""

import json
import math

import torch

from adptnet._io.json_values import from_json_value, to_json_value


def test_values_survive_strict_json():
    value = {"a": (1, True, "x", None), 2: {"b": [0.1, math.inf, -math.inf]}, "c": torch.tensor([[1.5, 2.0]])}
    text = json.dumps(to_json_value(value), allow_nan=False)
    assert from_json_value(json.loads(text)) == {
        "a": [1, True, "x", None],
        "2": {"b": [0.1, math.inf, -math.inf]},
        "c": [[1.5, 2.0]],
    }
    assert math.isnan(from_json_value(to_json_value(math.nan)))


def test_floats_are_rounded_to_significant_digits_and_nothing_else_is():
    assert to_json_value([1 / 3, 12345678901, True], digits=3) == [0.333, 12345678901, True]
    assert to_json_value(1 / 3) == 1 / 3
