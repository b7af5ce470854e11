"""Events: spike files, event cameras, frames, and a cochlea that makes spikes of sound.

h5py (spike files) and scipy (the cochlea) are imported when they are used: pip install 'adptnet[events]'.
"""

from .aer import PixelEvents, read_aer, write_aer
from .archives import FrameFile, PixelFile, open_archive
from .augment import Augmentation, ChannelShift, Drop, TimeJitter
from .cochlea import Cochlea
from .dataset import EventBatch, EventDataset, collate
from .heidelberg import SpikeFile, find, write_spikes
from .stream import Bins, Events
from .wav import read_wav

__all__ = [
    "Augmentation",
    "Bins",
    "ChannelShift",
    "Cochlea",
    "Drop",
    "EventBatch",
    "EventDataset",
    "Events",
    "FrameFile",
    "PixelEvents",
    "PixelFile",
    "SpikeFile",
    "TimeJitter",
    "collate",
    "find",
    "open_archive",
    "read_aer",
    "read_wav",
    "write_aer",
    "write_spikes",
]
