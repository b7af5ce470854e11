"""The known models that a table shows beside a user's: ADPTNet, RNNs, linear recurrences and attention."""

import functools
from collections.abc import Callable, Mapping

from adptnet.nn import BlockSpec, ModelSpec, SwiGLUBlockSpec

from ...baselines import baseline, count_parameters, match_parameters
from ..studies.comparison import MODELS
from .factory import ModelSource
from .suites import Suite

__all__ = ["KNOWN", "find_known"]

_NAMES = {"adptnet": "preset", "adptnet-linear": "preset, β = 0"}  # as the comparison of this project calls them
_SAME = ("gru", "lstm", "relu-rnn", "s4d", "mamba", "gated-delta-net", "attention")


def _delta_net(width: int, preset: str) -> SwiGLUBlockSpec:
    return SwiGLUBlockSpec(baseline("delta-net", width), expansion=2)


KNOWN: Mapping[str, Callable[[int, str], BlockSpec | SwiGLUBlockSpec]] = {
    **{name: MODELS[other] for name, other in _NAMES.items()},
    **{name: MODELS[name] for name in _SAME},
    "delta-net": _delta_net,
}


def find_known(name: str, suite: Suite) -> ModelSource:
    """Return a known model, whose width gives it the parameter count of the suite on every task.

    Args:
        name: One of `KNOWN`.
        suite: The suite.
    """

    def make(vocabulary: int, output_size: int, parameters: int) -> object:
        return _match(name, suite.preset, suite.depth, vocabulary, output_size, parameters).build()

    return ModelSource(name, make, None)


@functools.cache
def _match(name: str, preset: str, depth: int, vocabulary: int, output_size: int, parameters: int) -> ModelSpec:
    """Return the spec of the width, of those that the layer can have, whose parameter count is the nearest."""

    def make(width: int) -> ModelSpec:
        return ModelSpec(KNOWN[name](width, preset), depth, vocabulary, None, output_size)

    near = match_parameters(make, parameters, multiple_of=4)
    found = {abs(count_parameters(near) - parameters): near}
    for width in range(max(1, near.block.width - 3), near.block.width + 4):
        try:
            found.setdefault(abs(count_parameters(make(width)) - parameters), make(width))
        except ValueError:  # rotary positions and heads need even widths
            continue
    return found[min(found)]
