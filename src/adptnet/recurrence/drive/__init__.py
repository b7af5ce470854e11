"""Drive: how the input enters the state, gain ⊙ gate(u) ⊙ R(u) with u = B o and rotary positions R; and the phase."""

from .drive import Drive
from .gain import EMA, LRU, ZOH, Gain, GainSpec
from .gate import Gate, SoftplusGate
from .phase import InputPhase, Phase, unpack_phase
from .rope import RoPE, RotaryPositions

__all__ = [
    "EMA",
    "LRU",
    "ZOH",
    "Drive",
    "Gain",
    "GainSpec",
    "Gate",
    "InputPhase",
    "Phase",
    "RoPE",
    "RotaryPositions",
    "SoftplusGate",
    "unpack_phase",
]
