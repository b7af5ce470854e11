"""Event data: spike files, event cameras, frames, and a cochlea model that converts sound to spikes.

h5py (spike files) and scipy (the cochlea) are imported on first use: pip install 'adptnet[events]'.
"""

from .aer import PixelEvents, read_aer, write_aer
from .archives import FrameFile, PixelFile, open_archive
from .augment import Augmentation, ChannelShift, Drop, TimeJitter
from .cochlea import Cochlea
from .dataset import EventBatch, EventDataset, collate
from .shd import find_split
from .spike_files import SpikeFile, write_spikes
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
    "find_split",
    "open_archive",
    "read_aer",
    "read_wav",
    "write_aer",
    "write_spikes",
]
