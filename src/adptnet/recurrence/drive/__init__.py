"""Drive: how the input enters the state, gain ⊙ gate(u) ⊙ R(u) with u = B o and rotary positions R."""

from .drive import Drive
from .gain import EMA, LRU, ZOH, Gain, GainSpec
from .gate import Gate, SoftplusGate
from .rope import RoPE, RotaryPositions

__all__ = ["EMA", "LRU", "ZOH", "Drive", "Gain", "GainSpec", "Gate", "RoPE", "RotaryPositions", "SoftplusGate"]
