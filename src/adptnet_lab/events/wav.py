"""Sound files."""

import struct
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from adptnet.errors import InputError, NonFiniteError

__all__ = ["read_wav"]

FASTEST = 10_000_000  # samples per second, beyond any microphone; limits buffers, which hold a second or more


def read_wav(path: str | Path, *, mix: bool = False) -> tuple[npt.NDArray[np.float64], int]:
    """Return the samples of a wav file and their rate, in samples per second.

    Args:
        path: PCM or floating point, any rate.
        mix: Average several channels; without it a file with several channels raises `InputError`.

    Raises:
        InputError: Not a wav file, truncated, empty, with a rate of 0, or with NaN or infinite samples.
    """
    try:
        from scipy.io import wavfile
    except ImportError:
        raise InputError("sound files need scipy: pip install 'adptnet[events]'.") from None
    if not Path(path).is_file():
        raise InputError(f"{path} is not a file.")
    with warnings.catch_warnings():
        warnings.simplefilter("error", wavfile.WavFileWarning)
        warnings.filterwarnings("ignore", "Chunk .non-data. not understood", wavfile.WavFileWarning)
        try:
            _check_size(Path(path))
            rate, samples = wavfile.read(path)
        except InputError:
            raise
        except Exception as error:  # malformed headers make scipy divide by zero, use unset names, allocate 4 GB, ...
            reason = str(error).rstrip(".") if isinstance(error, (ValueError, OSError, Warning)) else "malformed header"
            raise InputError(f"{path} cannot be read as a wav file, it may be truncated: {reason}.") from None
    if not 1 <= rate <= FASTEST:
        raise InputError(f"{path} has a rate of {rate}; it must be from 1 to {FASTEST:,} samples per second.")
    if samples.dtype.kind not in "iuf":
        raise InputError(f"{path} holds samples of {samples.dtype}; they must be integers or floating-point numbers.")
    if samples.dtype == np.uint8:  # 128 is silence
        samples = samples.astype(np.float64) - 128
    if samples.ndim == 2:
        if samples.shape[1] > 1 and not mix:
            raise InputError(f"{path} has {samples.shape[1]} channels; the cochlea takes one. Pass mix=True (--mix).")
        with np.errstate(all="ignore"):  # overflow is rejected below
            samples = samples.astype(np.float64).mean(-1) if samples.size else np.zeros(0)
    if not samples.size:
        raise InputError(f"{path} holds no samples.")
    samples = samples.astype(np.float64)
    if not np.isfinite(samples).all():
        first = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise NonFiniteError(f"{path}: sample {first} is {samples[first]}; samples must be finite.")
    return samples, int(rate)


def _check_size(path: Path) -> None:
    """Raise `InputError` if the samples need more bytes than the file has; scipy would return a truncated sound."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        kind = file.read(12)[:4]
        long = 0  # 64-bit length of RF64, whose samples may take more than 4 GB
        while len(head := file.read(8)) == 8:
            (length,) = struct.unpack(">I" if kind == b"RIFX" else "<I", head[4:])
            if head[:4] == b"ds64" and length >= 16:
                _, long = struct.unpack("<QQ", file.read(16).ljust(16, b"\0"))
                length -= 16
            if head[:4] == b"data":
                length = long if kind == b"RF64" else length
                if length > size - file.tell():
                    raise InputError(
                        f"{path} cannot be read as a wav file, it may be truncated: its samples take {length:,} "
                        f"bytes, and {size - file.tell():,} are present."
                    )
            file.seek(min(length + length % 2, size), 1)
