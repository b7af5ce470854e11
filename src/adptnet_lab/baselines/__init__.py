"""Sequence mixers that are not cells, to compare with: attention, selective state spaces, fast weights.

Plain and short rather than fast. They have the contract of a layer, (batch, time, width) in and out with an explicit
state, and so go into the same residual block.
"""

from .attention import Attention, AttentionMixer
from .catalog import BASELINES, baseline, lru, matched, parameter_count, s4d
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
    "lru",
    "matched",
    "parameter_count",
    "s4d",
]
