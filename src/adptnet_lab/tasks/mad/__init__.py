"""The MAD suite: six synthetic tasks, their settings and the score of a task (sec:mad_results)."""

from .compression import MadCompression
from .fuzzy import MadFuzzyRecall
from .grid import MAD_OPTIMIZERS, mad_score, mad_settings
from .memorisation import MadMemorisation
from .recall import MadInContextRecall, MadNoisyRecall
from .selective_copying import MadSelectiveCopying

__all__ = [
    "MAD_OPTIMIZERS",
    "MadCompression",
    "MadFuzzyRecall",
    "MadInContextRecall",
    "MadMemorisation",
    "MadNoisyRecall",
    "MadSelectiveCopying",
    "mad_score",
    "mad_settings",
]
