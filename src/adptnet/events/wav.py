"""Sound files."""

import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import InputError

__all__ = ["read_wav"]


def read_wav(path: str | Path, *, mix: bool = False) -> tuple[npt.NDArray[np.float64], int]:
    """The samples of a wav file, and how many there are a second.

    Args:
        path: PCM or floating point, any rate.
        mix: Take the mean of several channels; without it they are refused.
    """
    try:
        from scipy.io import wavfile
    except ImportError:
        raise InputError("sound files need scipy: pip install 'adptnet[events]'.") from None
    if not Path(path).is_file():
        raise InputError(f"{path} is no file.")
    with warnings.catch_warnings():
        warnings.simplefilter("error", wavfile.WavFileWarning)
        warnings.filterwarnings("ignore", "Chunk .non-data. not understood", wavfile.WavFileWarning)
        try:
            rate, samples = wavfile.read(path)
        except (ValueError, wavfile.WavFileWarning, EOFError, OSError) as error:
            raise InputError(
                f"{path} cannot be read as a wav file, it may be cut off: {str(error).rstrip('.')}."
            ) from None
    if samples.dtype == np.uint8:  # 128 is silence
        samples = samples.astype(np.float64) - 128
    if samples.ndim == 2:
        if samples.shape[1] > 1 and not mix:
            raise InputError(f"{path} has {samples.shape[1]} channels; a cochlea is one ear. Pass mix=True (--mix).")
        samples = samples.mean(-1)
    if not samples.size:
        raise InputError(f"{path} holds no samples.")
    return samples.astype(np.float64), int(rate)
