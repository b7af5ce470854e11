"""Blocks by purpose: `SequenceModel(presets.text(64), depth=2, vocabulary=65)`.

Each function returns a spec, which prints as the settings it stands for and is stored as JSON. How each was chosen, and
what it reaches, is in docs/how-to/choose.md.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..cells import ADPTSpec
from ..recurrence.directions import FromState
from ..recurrence.drive import LRU, SoftplusGate
from ..recurrence.projections import Expand, Identity
from ..recurrence.spectra import Negative, S4DReal, SpectrumSpec, Timescales
from .adpt_layer import LayerSpec, choose_spectrum
from .block import BlockSpec
from .gated import GatedSpec
from .swiglu import SwiGLUBlockSpec

__all__ = ["PRESETS", "forecast", "general", "memory", "paper", "recall", "signals", "text", "tracking"]


def general(width: int, length: int | None = None) -> SwiGLUBlockSpec:
    """Return a block for features or tokens of any kind: the default `ADPTNet` and a SwiGLU unit.

    Args:
        width: Features in and out.
        length: Steps of a sequence, which set the timescales; 0.5 to 200 steps if not given.
    """
    return _with_unit(_plain(width, choose_spectrum(length=length)))


def text(width: int, length: int | None = None) -> SwiGLUBlockSpec:
    """Return a block for text and other tokens: a gated layer twice as wide, with timescales of 0.5 to 10 steps.

    Args:
        width: Features in and out.
        length: Has no effect: the last few tokens matter most, whatever the length.
    """
    return _with_unit(_gated(width, Timescales(0.5, 10.0), expansion=2))


def signals(width: int, length: int | None = None) -> SwiGLUBlockSpec:
    """Return a block for images pixel by pixel and other long signals: a gated layer twice as wide.

    Args:
        width: Features in and out.
        length: Steps of a sequence, which set the timescales; 0.5 to 2000 steps if not given.
    """
    return _with_unit(_gated(width, _long(length), expansion=2))


def memory(width: int, length: int | None = None) -> SwiGLUBlockSpec:
    """Return a block for inputs that must be stored over many steps: a gated layer with long timescales.

    Args:
        width: Features in and out.
        length: Steps of a sequence, which set the timescales; 0.5 to 2000 steps if not given.
    """
    return _with_unit(_gated(width, _long(length), expansion=1))


def recall(width: int, length: int | None = None) -> SwiGLUBlockSpec:
    """Return a block for selective recall: two state dimensions per channel, a real spectrum and β = 0.125.

    Args:
        width: Features in and out.
        length: Has no effect.
    """
    cell = ADPTSpec(width, state_size=2 * width, spectrum=S4DReal(), input_projection=Expand())
    return _with_unit(LayerSpec(cell))


def forecast(width: int, length: int | None = None) -> SwiGLUBlockSpec:
    """Return a block for forecasts of time series: a gated layer with timescales of 0.5 to 10 samples.

    Args:
        width: Features in and out.
        length: Has no effect.
    """
    return _with_unit(_gated(width, Timescales(0.5, 10.0), expansion=1))


def tracking(width: int, length: int | None = None) -> SwiGLUBlockSpec:
    """Return a block for state tracking: β = 4, half of the eigenvalues negative, no convolution.

    Args:
        width: Features in and out.
        length: Has no effect.
    """
    return _with_unit(_plain(width, Negative(S4DReal(), 0.5), beta=4.0))


def paper(width: int, length: int | None = None) -> BlockSpec:
    """Return the block and the layer of the paper with their defaults, on which its reproduction relies.

    Args:
        width: Features in and out.
        length: Has no effect.
    """
    return BlockSpec(LayerSpec(ADPTSpec(width)))


PRESETS: Mapping[str, Callable[..., BlockSpec | SwiGLUBlockSpec]] = {
    "general": general,
    "text": text,
    "signals": signals,
    "memory": memory,
    "recall": recall,
    "forecast": forecast,
    "tracking": tracking,
    "paper": paper,
}


def _plain(width: int, spectrum: SpectrumSpec, **axes: Any) -> LayerSpec:
    """Return the default layer with another spectrum."""
    return LayerSpec(
        ADPTSpec(width, **{"beta": 1.0, "spectrum": spectrum, "gain": LRU(), "gate": SoftplusGate(), **axes})
    )


def _gated(width: int, spectrum: SpectrumSpec, expansion: int) -> GatedSpec:
    """Return a gated layer whose recurrence has no input projection, since the gated layer has one."""
    inner = expansion * width
    heads = next(count for count in (4, 2, 1) if inner % count == 0)
    axes: dict[str, Any] = {"direction": FromState(heads=heads), "input_projection": Identity()}
    return GatedSpec(_plain(inner, spectrum, gate=SoftplusGate(rank=16), **axes), width)


def _long(length: int | None) -> SpectrumSpec:
    return Timescales(0.5, 2000.0) if length is None else choose_spectrum(length=length)


def _with_unit(layer: LayerSpec | GatedSpec) -> SwiGLUBlockSpec:
    return SwiGLUBlockSpec(layer, expansion=2)
