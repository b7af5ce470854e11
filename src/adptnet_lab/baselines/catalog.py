"""Baselines by name and at a matched number of parameters, all for the same residual block."""

from collections.abc import Callable
from typing import TypeVar

from adptnet.cells import GRU, LSTM, ADPTSpec, OrthogonalRNN, ReLURNN, TanhRNN
from adptnet.errors import InputError
from adptnet.nn.adpt_layer import LayerSpec
from adptnet.nn.mixer import MixerSpec
from adptnet.recurrence.conjugates import Diagonal
from adptnet.recurrence.drive import LRU, ZOH
from adptnet.recurrence.projections import Dense, Expand
from adptnet.recurrence.spectra import LRURing, S4DInv
from adptnet.spec import ModuleSpec, suggest_name

from .attention import Attention
from .delta import DeltaNet, GatedDeltaNet
from .gated_linear_attention import GatedLinearAttention
from .hawk import Hawk
from .mamba import Mamba

__all__ = ["BASELINES", "baseline", "count_parameters", "lru", "match_parameters", "s4d"]


def s4d(width: int, *, expansion: int = 64) -> LayerSpec:
    """Return the spec of S4D, an ADPT cell at β = 0.

    Args:
        width: Features in and out.
        expansion: State dimensions per channel, half as many complex modes.
    """
    cell = ADPTSpec(
        width,
        state_size=expansion * width,
        beta=0,
        conjugate=Diagonal(),
        spectrum=S4DInv(),
        gain=ZOH(),
        input_projection=Expand(),
    )
    return LayerSpec(cell, readout=Expand())


def lru(width: int, *, state_size: int | None = None) -> LayerSpec:
    """Return the spec of the linear recurrent unit, an ADPT cell at β = 0 with dense input and output maps.

    Args:
        width: Features in and out.
        state_size: State dimensions, half as many complex modes on a ring; twice the width by default.
    """
    size = 2 * width if state_size is None else state_size
    cell = ADPTSpec(width, state_size=size, beta=0, conjugate=Diagonal(), spectrum=LRURing(), gain=LRU(tied=False))
    return LayerSpec(cell, readout=Dense())


def _choose_heads(width: int, *, size: int = 1) -> int:
    """Return the largest of 8, 4 and 2 heads that divides `width` into multiples of `size`; otherwise 1."""
    return next((n for n in (8, 4, 2) if width % (n * size) == 0), 1)


BASELINES: dict[str, Callable[[int], LayerSpec | MixerSpec]] = {
    "relu-rnn": lambda width: LayerSpec(ReLURNN(width)),
    "tanh-rnn": lambda width: LayerSpec(TanhRNN(width)),
    "orthogonal-rnn": lambda width: LayerSpec(OrthogonalRNN(width)),
    "gru": lambda width: LayerSpec(GRU(width)),
    "lstm": lambda width: LayerSpec(LSTM(width)),
    "s4d": s4d,
    "lru": lru,
    "hawk": lambda width: Hawk(width, num_heads=_choose_heads(width)),
    "mamba": Mamba,
    "gated-linear-attention": lambda width: GatedLinearAttention(width, _choose_heads(width, size=2)),
    "delta-net": lambda width: DeltaNet(width, _choose_heads(width)),
    "gated-delta-net": lambda width: GatedDeltaNet(width, _choose_heads(width)),
    "attention": lambda width: Attention(width, _choose_heads(width, size=2)),
}


def baseline(name: str, width: int) -> LayerSpec | MixerSpec:
    """Return the spec of a baseline, for `BlockSpec`.

    Args:
        name: One of `BASELINES`.
        width: Features in and out.

    Raises:
        InputError: There is no such baseline.
    """
    if name not in BASELINES:
        raise InputError(f"there is no baseline {name!r}.{suggest_name(str(name), BASELINES)}")
    return BASELINES[name](width)


def count_parameters(spec: ModuleSpec) -> int:
    """Return the number of trainable parameters of a module of this spec, without allocating them.

    Args:
        spec: The spec of a layer or model.
    """
    return sum(p.numel() for p in spec.build(device="meta").parameters() if p.requires_grad)


_SpecT = TypeVar("_SpecT", bound=ModuleSpec)


def match_parameters(make: Callable[[int], _SpecT], parameters: int, *, multiple_of: int = 1) -> _SpecT:
    """Return the spec, over all widths, whose number of parameters is nearest to `parameters`.

    Args:
        make: Function from a width to the spec of a model, such as
            `lambda width: task.model(BlockSpec(baseline("gru", width)), depth=2)`.
        parameters: Number to match: `count_parameters(spec)` of the model to compare with.
        multiple_of: Try only widths that are multiples of this, for heads or pairs.

    Raises:
        InputError: The number of parameters does not grow with the width.
    """
    counts: dict[int, int] = {}

    def count(step: int) -> int:
        if step not in counts:
            counts[step] = count_parameters(make(step * multiple_of))
        return counts[step]

    if parameters < 1 or multiple_of < 1:
        raise InputError(f"parameters={parameters}, multiple_of={multiple_of}: both must be at least 1.")
    low, high = 1, 2
    while count(high) < parameters:
        if count(high) <= count(low):
            raise InputError(
                f"a width of {high * multiple_of} gives no more parameters than half of it. Let make use the width."
            )
        low, high = high, 2 * high
    while high - low > 1:  # bisection: the number of parameters grows with the width
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < parameters else (low, middle)
    best = min((low, high), key=lambda step: abs(count(step) - parameters))
    return make(best * multiple_of)
