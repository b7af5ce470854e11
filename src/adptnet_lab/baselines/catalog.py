"""What ADPTNet is compared with, by name and at a given number of parameters, all for the same block."""

from collections.abc import Callable
from typing import TypeVar

from adptnet.cells import GRU, LSTM, ADPTSpec, OrthogonalRNN, ReLURNN, TanhRNN
from adptnet.errors import InputError
from adptnet.nn.layer import LayerSpec
from adptnet.nn.mixer import MixerSpec
from adptnet.recurrence.conjugates import Diagonal
from adptnet.recurrence.drive import LRU, ZOH
from adptnet.recurrence.projections import Dense, Expand
from adptnet.recurrence.spectra import LRURing, S4DInv
from adptnet.spec import ModuleSpec, nearest

from .attention import Attention
from .delta import DeltaNet, GatedDeltaNet
from .gated_linear_attention import GatedLinearAttention
from .hawk import Hawk
from .mamba import Mamba

__all__ = ["BASELINES", "baseline", "lru", "matched", "parameter_count", "s4d"]


def s4d(width: int, *, expansion: int = 64) -> LayerSpec:
    """S4D: each channel has `expansion` numbers of state, half as many complex pairs; β = 0 of the same program."""
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
    """The linear recurrent unit: complex pairs on a ring, dense maps in and out; β = 0 of the same program."""
    size = 2 * width if state_size is None else state_size
    cell = ADPTSpec(width, state_size=size, beta=0, conjugate=Diagonal(), spectrum=LRURing(), gain=LRU(tied=False))
    return LayerSpec(cell, readout=Dense())


def _heads(width: int, *, size: int = 1) -> int:
    """The most of 8, 4 and 2 heads that divide `width` into multiples of `size`; otherwise one."""
    return next((n for n in (8, 4, 2) if width % (n * size) == 0), 1)


BASELINES: dict[str, Callable[[int], LayerSpec | MixerSpec]] = {
    "relu-rnn": lambda width: LayerSpec(ReLURNN(width)),
    "tanh-rnn": lambda width: LayerSpec(TanhRNN(width)),
    "orthogonal-rnn": lambda width: LayerSpec(OrthogonalRNN(width)),
    "gru": lambda width: LayerSpec(GRU(width)),
    "lstm": lambda width: LayerSpec(LSTM(width)),
    "s4d": s4d,
    "lru": lru,
    "hawk": lambda width: Hawk(width, num_heads=_heads(width)),
    "mamba": Mamba,
    "gated-linear-attention": lambda width: GatedLinearAttention(width, _heads(width, size=2)),
    "delta-net": lambda width: DeltaNet(width, _heads(width)),
    "gated-delta-net": lambda width: GatedDeltaNet(width, _heads(width)),
    "attention": lambda width: Attention(width, _heads(width, size=2)),
}


def baseline(name: str, width: int) -> LayerSpec | MixerSpec:
    """A baseline of that name and width, for `BlockSpec`; the names are those of `BASELINES`."""
    if name not in BASELINES:
        raise InputError(f"there is no baseline {name!r}.{nearest(str(name), BASELINES)}")
    return BASELINES[name](width)


def parameter_count(spec: ModuleSpec) -> int:
    """Numbers that a module of this spec learns, counted without making them."""
    return sum(p.numel() for p in spec.build(device="meta").parameters() if p.requires_grad)


_Described = TypeVar("_Described", bound=ModuleSpec)


def matched(make: Callable[[int], _Described], parameters: int, *, multiple_of: int = 1) -> _Described:
    """The model, among those of every width, whose number of parameters is nearest to `parameters`.

    Args:
        make: The spec of a model for a width, such as
            `lambda width: task.model(BlockSpec(baseline("gru", width)), depth=2)`.
        parameters: How many it should have: `parameter_count(spec)` of the model to compare with.
        multiple_of: Try only widths that are multiples of this, for heads or pairs.
    """
    counts: dict[int, int] = {}

    def count(step: int) -> int:
        if step not in counts:
            counts[step] = parameter_count(make(step * multiple_of))
        return counts[step]

    if parameters < 1 or multiple_of < 1:
        raise InputError(f"parameters={parameters}, multiple_of={multiple_of}: both must be at least 1.")
    low, high = 1, 2
    while count(high) < parameters:
        if count(high) <= count(low):
            raise InputError(f"a width of {high * multiple_of} gives no more parameters than half of it. Use it.")
        low, high = high, 2 * high
    while high - low > 1:  # more width, more parameters
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < parameters else (low, middle)
    best = min((low, high), key=lambda step: abs(count(step) - parameters))
    return make(best * multiple_of)
