"""Address-event files of N-MNIST: five bytes an event, x, y, one bit of polarity and 23 of microseconds."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adptnet._io.files import write_whole
from adptnet.errors import InputError

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
        x, y, polarity, microseconds = self.checked()
        for name, values, given, size in (("x", x, "width", width), ("y", y, "height", height)):
            if values.size and values.max() >= size:
                raise InputError(
                    f"{name} goes from {values.min()} to {values.max()}; the camera has {size}. "
                    f"Pass {given}={values.max() + 1}."
                )
        units = (polarity * height + y) * width + x
        return Events.of(microseconds / 1e6, units, channels=2 * width * height)

    def checked(self) -> "PixelEvents":
        """The same in 64 bits, whose products do not overflow; whole numbers from 0, as many of each."""
        for name, values in zip(self._fields, map(np.asarray, self), strict=True):
            if values.shape != (np.size(self.x),):
                raise InputError(f"{name} has shape {values.shape}, x {np.shape(self.x)}; one of each for an event.")
            if values.size and not (np.issubdtype(values.dtype, np.integer) or values.dtype == bool):
                raise InputError(f"{name} is {values.dtype}; events of a camera are whole numbers.")
            if values.size and (values.min() < 0 or (name == "polarity" and values.max() > 1)):
                hint = " Pass (polarity > 0).astype(int)." if name == "polarity" else ""
                needed = "0 and 1" if name == "polarity" else "whole numbers from 0"
                raise InputError(f"{name} goes from {values.min()} to {values.max()}; needed are {needed}.{hint}")
            if values.size and int(values.max()) >= 2**63:
                raise InputError(f"{name} goes up to {values.max()}; events of a camera are numbers of 63 bits.")
        return PixelEvents(*(np.asarray(values).astype(np.int64) for values in self))


def read_aer(path: str | Path) -> PixelEvents:
    """Return the events of a file, in its order.

    Raises:
        InputError: There is no such file, or it is not made of whole events.
    """
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}.")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    if len(content) % 5:
        raise InputError(
            f"{path} has {len(content)} bytes; events have five each. The file is cut off, or of another kind."
        )
    raw = np.frombuffer(content, np.uint8).reshape(-1, 5).astype(np.int64)
    microseconds = ((raw[:, 2] & 127) << 16) | (raw[:, 3] << 8) | raw[:, 4]
    return PixelEvents(raw[:, 0], raw[:, 1], raw[:, 2] >> 7, microseconds)


def write_aer(path: str | Path, pixels: PixelEvents) -> None:
    """Writes a file that `read_aer` reads, whole or not at all."""
    pixels = pixels.checked()
    for name, values, end in zip(pixels._fields, pixels, (256, 256, 2, LONGEST), strict=True):
        if values.size and values.max() >= end:
            raise InputError(f"{name} goes from {values.min()} to {values.max()}; the file holds 0 to {end - 1}.")
    x, y, polarity, microseconds = pixels
    high = (polarity << 7) | (microseconds >> 16)
    raw = np.stack((x, y, high, (microseconds >> 8) & 255, microseconds & 255), -1)
    write_whole(path, raw.astype(np.uint8).tobytes())
