"""The MAD suite: six synthetic tasks, their settings and how a suite is scored (sec:mad_results)."""

from .compression import MadCompression
from .fuzzy import MadFuzzyRecall
from .grid import MAD_OPTIMISERS, mad_score, mad_settings
from .memorisation import MadMemorisation
from .recall import MadInContextRecall, MadNoisyRecall
from .selective_copying import MadSelectiveCopying

__all__ = [
    "MAD_OPTIMISERS",
    "MadCompression",
    "MadFuzzyRecall",
    "MadInContextRecall",
    "MadMemorisation",
    "MadNoisyRecall",
    "MadSelectiveCopying",
    "mad_score",
    "mad_settings",
]
