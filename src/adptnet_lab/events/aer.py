"""Address-event (AER) files of N-MNIST: five bytes per event, x, y, 1 bit of polarity and 23 bits of microseconds."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adptnet._io.files import write_atomic
from adptnet.errors import InputError

from .stream import Events

__all__ = ["PixelEvents", "read_aer", "write_aer"]

LONGEST = 2**23  # end of the range of time stamps, in microseconds


class PixelEvents(NamedTuple):
    """Events of an event camera, one array per property."""

    x: npt.NDArray[np.int64]
    y: npt.NDArray[np.int64]
    polarity: npt.NDArray[np.int64]  # 0 darker, 1 brighter
    microseconds: npt.NDArray[np.int64]

    def to_events(self, width: int = 34, height: int = 34) -> Events:
        """Return the events with one unit per pixel and polarity: pixels row by row, first those that became darker.

        Args:
            width: Columns of the camera.
            height: Rows of the camera.

        Raises:
            InputError: An array is invalid, or a pixel lies outside the camera.
        """
        x, y, polarity, microseconds = self.validate()
        for name, values, argument, size in (("x", x, "width", width), ("y", y, "height", height)):
            if values.size and values.max() >= size:
                raise InputError(
                    f"{name} ranges from {values.min()} to {values.max()}; the camera has {argument}={size}. "
                    f"Pass {argument}={values.max() + 1}."
                )
        units = (polarity * height + y) * width + x
        return Events.of(microseconds / 1e6, units, channels=2 * width * height)

    def validate(self) -> "PixelEvents":
        """Return the arrays as int64, so that products do not overflow.

        Raises:
            InputError: The arrays differ in length, or do not hold integers >= 0.
        """
        for name, values in zip(self._fields, map(np.asarray, self), strict=True):
            if values.shape != (np.size(self.x),):
                raise InputError(
                    f"{name} has shape {values.shape}, x has {np.shape(self.x)}; each event needs one of each."
                )
            if values.size and not (np.issubdtype(values.dtype, np.integer) or values.dtype == bool):
                raise InputError(f"{name} is {values.dtype}; it must hold integers.")
            if values.size and (values.min() < 0 or (name == "polarity" and values.max() > 1)):
                hint = " Pass (polarity > 0).astype(int)." if name == "polarity" else ""
                needed = "0 and 1" if name == "polarity" else "integers >= 0"
                raise InputError(f"{name} ranges from {values.min()} to {values.max()}; it must hold {needed}.{hint}")
            if values.size and int(values.max()) >= 2**63:
                raise InputError(f"{name} has the value {values.max()}; it must fit into 63 bits.")
        return PixelEvents(*(np.asarray(values).astype(np.int64) for values in self))


def read_aer(path: str | Path) -> PixelEvents:
    """Return the events of a file, in the order of the file.

    Args:
        path: An AER file of N-MNIST.

    Raises:
        InputError: There is no such file, or its size is not a multiple of five bytes.
    """
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}.")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    if len(content) % 5:
        raise InputError(
            f"{path} has {len(content)} bytes; events take five each. The file is truncated, or not an AER file."
        )
    raw = np.frombuffer(content, np.uint8).reshape(-1, 5).astype(np.int64)
    microseconds = ((raw[:, 2] & 127) << 16) | (raw[:, 3] << 8) | raw[:, 4]
    return PixelEvents(raw[:, 0], raw[:, 1], raw[:, 2] >> 7, microseconds)


def write_aer(path: str | Path, pixels: PixelEvents) -> None:
    """Write a file that `read_aer` reads, atomically.

    Args:
        path: Where to write.
        pixels: The events.

    Raises:
        InputError: A value does not fit into the format.
    """
    pixels = pixels.validate()
    for name, values, end in zip(pixels._fields, pixels, (256, 256, 2, LONGEST), strict=True):
        if values.size and values.max() >= end:
            raise InputError(f"{name} ranges from {values.min()} to {values.max()}; the format holds 0 to {end - 1}.")
    x, y, polarity, microseconds = pixels
    high = (polarity << 7) | (microseconds >> 16)
    raw = np.stack((x, y, high, (microseconds >> 8) & 255, microseconds & 255), -1)
    write_atomic(path, raw.astype(np.uint8).tobytes())
