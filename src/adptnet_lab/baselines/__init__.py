"""Baselines to compare ADPTNet with, by name and at a matched number of parameters.

`catalog` lists them all: recurrent cells, diagonal state-space models and sequence mixers. The mixers (attention,
Mamba, Hawk, gated linear attention, DeltaNet) are defined here, as short reference implementations rather than fast
ones. Every baseline has the interface of a layer, (batch, time, width) in and out with an explicit state, and so fits
into the same residual block.
"""

from .attention import Attention, AttentionMixer
from .catalog import BASELINES, baseline, count_parameters, lru, match_parameters, s4d
from .delta import DeltaNet, DeltaNetMixer, GatedDeltaNet, GatedDeltaNetMixer
from .gated_linear_attention import GatedLinearAttention, GatedLinearAttentionMixer
from .hawk import Hawk, HawkMixer
from .mamba import Mamba, MambaMixer

__all__ = [
    "BASELINES",
    "Attention",
    "AttentionMixer",
    "DeltaNet",
    "DeltaNetMixer",
    "GatedDeltaNet",
    "GatedDeltaNetMixer",
    "GatedLinearAttention",
    "GatedLinearAttentionMixer",
    "Hawk",
    "HawkMixer",
    "Mamba",
    "MambaMixer",
    "baseline",
    "count_parameters",
    "lru",
    "match_parameters",
    "s4d",
]
