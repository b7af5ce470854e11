"""Address-event files of N-MNIST: five bytes an event, x, y, one bit of polarity and 23 of microseconds."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..files import write_whole
from .stream import Events

__all__ = ["PixelEvents", "read_aer", "write_aer"]

LONGEST = 2**23  # microseconds that fit


class PixelEvents(NamedTuple):
    """Events of an event camera, one array each."""

    x: npt.NDArray[np.int64]
    y: npt.NDArray[np.int64]
    polarity: npt.NDArray[np.int64]  # 0 darker, 1 brighter
    microseconds: npt.NDArray[np.int64]

    def events(self, width: int = 34, height: int = 34) -> Events:
        """As events of width · height · 2 units: rows of pixels, first those that became darker."""
        for name, values, size in (("x", self.x, width), ("y", self.y, height)):
            if values.size and (values.min() < 0 or values.max() >= size):
                raise InputError(
                    f"{name} goes from {values.min()} to {values.max()}; the camera has {size}. "
                    f"Pass {'width' if name == 'x' else 'height'}={values.max() + 1}."
                )
        units = (self.polarity * height + self.y) * width + self.x
        return Events.of(self.microseconds / 1e6, units, channels=2 * width * height)


def read_aer(path: str | Path) -> PixelEvents:
    """The events of a file, in its order."""
    content = Path(path).read_bytes()
    if len(content) % 5:
        raise InputError(
            f"{path} has {len(content)} bytes; events have five each. The file is cut off, or of another kind."
        )
    raw = np.frombuffer(content, np.uint8).reshape(-1, 5).astype(np.int64)
    microseconds = ((raw[:, 2] & 127) << 16) | (raw[:, 3] << 8) | raw[:, 4]
    return PixelEvents(raw[:, 0], raw[:, 1], raw[:, 2] >> 7, microseconds)


def write_aer(path: str | Path, pixels: PixelEvents) -> None:
    """Writes a file that `read_aer` reads, whole or not at all."""
    for name, values, end in zip(pixels._fields, pixels, (256, 256, 2, LONGEST), strict=True):
        if values.size and (values.min() < 0 or values.max() >= end):
            raise InputError(f"{name} goes from {values.min()} to {values.max()}; the file holds 0 to {end - 1}.")
    x, y, polarity, microseconds = pixels
    high = (polarity << 7) | (microseconds >> 16)
    raw = np.stack((x, y, high, (microseconds >> 8) & 255, microseconds & 255), -1)
    write_whole(path, raw.astype(np.uint8).tobytes())
