"""Specs of the spiking networks that the paper compares on Spiking Speech Commands."""

from typing import Any

from ..cells import SiLIF
from ..recurrence.beta import BetaValue
from ..recurrence.directions import FromState
from ..recurrence.projections import Identity, LowParam
from ..recurrence.projections.factored import square_factors
from .spiking_layer import spiking_adpt
from .spiking_model import SpikingModelSpec

__all__ = ["silif_for_speech", "spiking_adpt_for_speech"]


def silif_for_speech(
    width: int = 512, *, input_size: int = 140, output_size: int = 35, dropout: float = 0.5, dt: float = 0.004
) -> SpikingModelSpec:
    """Return the spec of the SiLIF network for Spiking Speech Commands: 359,017 parameters at the defaults.

    Args:
        width: Neurons per layer.
        input_size: Number of input channels.
        output_size: Number of classes.
        dropout: Dropout probability on the spikes.
        dt: Seconds per step.
    """
    return SpikingModelSpec(SiLIF(width, dt=dt), input_size, output_size, dropout=dropout)


def spiking_adpt_for_speech(
    width: int = 512,
    *,
    beta: BetaValue = 0.0125,
    factors: tuple[int, int] | None = None,
    rank: int | None = None,
    input_size: int = 140,
    output_size: int = 35,
    dropout: float = 0.5,
    dt: float = 0.004,
    layer_norm: bool = True,
    **options: Any,
) -> SpikingModelSpec:
    """Return the spec of the SiLIF network with the neurons of SpikingADPTNet (table:ssc_results).

    At widths 512 and 2048 it has the paper's 355,689 and 1,069,481 parameters: LowParam maps with biases, ranks 48 and
    16, factors (32, 16) and (256, 8), a LayerNorm on key and value.

    Args:
        width: Neurons per layer.
        beta: Strength of the non-linearity.
        factors: Factors of the LowParam maps; the paper's, or nearly square ones at other widths.
        rank: Rank of the LowParam maps; the paper's, or 3/32 of other widths.
        input_size: Number of input channels.
        output_size: Number of classes.
        dropout: Dropout probability on the spikes.
        dt: Seconds per step.
        layer_norm: Whether key and value have a LayerNorm.
        options: Other arguments of `nn.spiking_layer.spiking_adpt`.
    """
    published = {512: ((32, 16), 48), 2048: ((256, 8), 16)}
    default_factors, default_rank = published.get(width, (square_factors(width), max(1, 3 * width // 32)))
    low_param = LowParam(factors or default_factors, rank or default_rank, bias=True)
    threshold = options.get("threshold", 1.0)
    source: dict[str, Any] = {"spike": threshold} if options.pop("spiking_directions", False) else {"relu": True}
    neuron = spiking_adpt(
        width,
        beta=beta,
        dt=dt,
        **{
            "projection": low_param,
            "input_projection": Identity(),
            "direction": FromState(**source, layer_norm=layer_norm),
            **options,
        },
    )
    return SpikingModelSpec(neuron, input_size, output_size, between=low_param, dropout=dropout)
