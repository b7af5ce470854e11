"""Spike files: HDF5 in the layout of the Spiking Heidelberg Digits and Spiking Speech Commands (Cramer et al. 2020).

Layout: spikes/times and spikes/units of variable length, labels, extra/keys (the words), extra/speaker. Unit 0 is the
highest frequency.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from adptnet._io.files import replace_file
from adptnet._io.untrusted import limit_exceeded, unpacked_limit
from adptnet.errors import AdptnetError, InputError

from .stream import Events, to_int64

__all__ = ["SpikeFile", "write_spikes"]

GZIP, SHUFFLE = 1, 2  # HDF5 filter identifiers
MOST_WORDS = 2**16  # labels are uint16
HEAP = b"GCOL\x01\0\0\0"  # signature of a global heap collection, which holds the recordings


class SpikeFile:
    """The recordings of one file; `file[i]` is (events, label).

    Each process opens the file on first access, so that a `SpikeFile` can be passed to data-loader workers.

    Args:
        path: An HDF5 file in the layout of SHD and SSC.
        channels: Number of units; a recording with a larger unit raises `InputError`.

    Raises:
        InputError: The file is missing, damaged, in another layout, or refers to other files.
    """

    def __init__(self, path: str | Path, *, channels: int = 700):
        self.path = Path(path)
        self.channels = channels
        self._file: Any = None
        self._owner: int | None = None
        self._datasets: dict[str, Any] = {}  # validated data sets of the open file
        with _explain_errors(self.path):
            self._open()
            hole = _find_endless_heap(self.path)
            if hole is not None:
                raise InputError(
                    f"{self.path} is damaged: at byte {hole:,} recordings were overwritten with zeros or have an "
                    "impossible length, which may send HDF5 into an endless loop. Download the file again."
                )
            # Compare the lengths before reading values: an empty chunk of HDF5 can declare any number of values.
            times, units, labels = (self._dataset(name) for name in ("spikes/times", "spikes/units", "labels"))
            if not len(times) == len(units) == len(labels):
                raise InputError(f"{self.path} has {len(times)} times, {len(units)} units and {len(labels)} labels.")
            self.labels = to_int64(np.asarray(labels), f"{self.path}: labels")
            words, speakers = (self._dataset(f"extra/{name}", needed=False) for name in ("keys", "speaker"))
            if words is not None and len(words) > MOST_WORDS:
                raise InputError(f"{self.path} has {len(words):,} words; there are at most {MOST_WORDS:,}.")
            found = () if words is None else np.asarray(words)
            self.words = [key.decode(errors="replace") if isinstance(key, bytes) else str(key) for key in found]
            if speakers is not None and len(speakers) not in (0, len(self.labels)):
                raise InputError(
                    f"{self.path} has {len(speakers)} speakers for {len(self.labels)} recordings; there must be one "
                    "for each, or none."
                )
            self.speakers = np.zeros(0) if speakers is None else np.asarray(speakers)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return (
            f"SpikeFile({str(self.path)!r}, channels={self.channels}): {len(self)} recordings, "
            f"{len(self.words)} words, {len(np.unique(self.speakers))} speakers"
        )

    def __getitem__(self, index: int) -> tuple[Events, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"recording {index} of {len(self)}")
        with _explain_errors(self.path):
            times, units = self._dataset("spikes/times")[index], self._dataset("spikes/units")[index]
        where = f"{self.path.name}, recording {index}"
        return Events.of(times, units, channels=self.channels, where=where), int(self.labels[index])

    def _dataset(self, path: str, *, needed: bool = True) -> Any:
        """Return a one-dimensional data set stored in this file; None if it is absent and not `needed`."""
        h5py, found = _import_h5py(), self._open()
        if path in self._datasets:
            return self._datasets[path]
        for name in path.split("/"):
            link = found.get(name, getlink=True) if isinstance(found, h5py.Group) else None
            if link is None:
                if not needed:
                    return None
                raise InputError(f"{self.path} has no {path}; the file is not in the layout of SHD and SSC.")
            if not isinstance(link, h5py.HardLink):
                raise InputError(f"{self.path}: {path} is a link; it must be stored in the file itself.")
            found = found[name]
        if not isinstance(found, h5py.Dataset) or found.ndim != 1:
            raise InputError(f"{self.path}: {path} is not one-dimensional, as in the layout of SHD and SSC.")
        if found.external or found.is_virtual:
            raise InputError(f"{self.path}: {path} is stored in other files; it must be stored in the file itself.")
        packed = self.path.stat().st_size
        most = max((len(found), *(found.chunks or ()))) * found.id.get_type().get_size()  # HDF5 unpacks whole chunks
        if most > unpacked_limit(packed):
            raise InputError(f"{self.path}: {path}: {limit_exceeded(packed, f'{most:,}')}.")
        _check_entries(found, f"{self.path}: {path}", packed)
        self._datasets[path] = found
        return found

    def _open(self) -> Any:
        if self._file is None or self._owner != os.getpid():  # a handle does not survive a fork
            self._file, self._owner = _import_h5py().File(self.path, "r"), os.getpid()
            self._datasets = {}
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_owner": None, "_datasets": {}}


def write_spikes(
    path: str | Path,
    recordings: Iterable[tuple[Events, int]],
    *,
    words: Iterable[str] = (),
    speakers: Iterable[int] | None = None,
) -> int:
    """Write recordings in the layout of SHD and SSC, atomically, and return their number.

    Times are stored as float16, as in those files: with a resolution of 0.5 ms at 1 s and 16 ms at 30 s.

    Args:
        path: Where to write.
        recordings: Events and label of each; events are sorted by time.
        words: The word of each label.
        speakers: The speaker of each recording.

    Raises:
        InputError: A recording, label or speaker is invalid, or the file cannot be written.
    """
    h5py, path = _import_h5py(), Path(path)
    if not path.parent.is_dir() or path.is_dir():
        raise InputError(
            f"{path} cannot be written: it is a folder, or its folder does not exist. Make the folder, or pass "
            "another name."
        )
    floats, shorts = h5py.vlen_dtype(np.dtype("float16")), h5py.vlen_dtype(np.dtype("uint16"))
    with replace_file(path) as draft:
        labels: list[int] = []
        with h5py.File(draft, "w") as file:
            times = file.create_dataset("spikes/times", (0,), maxshape=(None,), dtype=floats)
            units = file.create_dataset("spikes/units", (0,), maxshape=(None,), dtype=shorts)
            for events, label in recordings:
                where = f"recording {len(labels)}"
                ordered = Events.of(*events, channels=2**16, where=where).sort_by_time()
                if ordered.times.size and ordered.times[-1] > np.finfo(np.float16).max:
                    raise InputError(
                        f"{where}: an event at {ordered.times[-1]:g}; are these seconds? The largest float16 is 65504."
                    )
                if isinstance(label, bool) or not isinstance(label, (int, np.integer)) or not 0 <= label < 2**16:
                    raise InputError(f"{where}: the label is {label!r}; labels are integers from 0 to 65535.")
                times.resize((len(labels) + 1,))
                units.resize((len(labels) + 1,))
                times[-1], units[-1] = ordered.times.astype(np.float16), ordered.units.astype(np.uint16)
                labels.append(label)
            file.create_dataset("labels", data=np.asarray(labels, np.uint16))
            file.create_dataset("extra/keys", data=np.asarray([word.encode() for word in words], "S"))
            if speakers is not None:
                numbers = list(speakers)
                if len(numbers) != len(labels):
                    raise InputError(f"{len(numbers)} speakers for {len(labels)} recordings; pass one for each.")
                file.create_dataset("extra/speaker", data=np.asarray(numbers, np.uint16))
    return len(labels)


def _find_endless_heap(path: Path) -> int | None:
    """Return the offset of a heap object of length zero or longer than its heap, at which HDF5 may loop forever.

    HDF5 reads a heap object by object: an index (0 for free space), a length, that many bytes. It adds the length to
    its position without a check, so it does not advance at sixteen zero bytes and moves backwards if the sum overflows.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(HEAP)
        while 0 <= start <= len(content) - 16:
            (size,) = struct.unpack_from("<Q", content, start + 8)
            at, end = start + 16, min(start + size, len(content))
            while at + 16 <= end:
                index, length = struct.unpack_from("<H6xQ", content, at)
                step = length if index == 0 else 16 + -(-length // 8) * 8
                if not 0 < step <= end - at:
                    return at
                at += step
            start = content.find(HEAP, start + 8)
    return None


def _check_entries(dataset: Any, what: str, packed: int) -> None:
    """Raise `InputError` if an entry of variable length claims to be longer than the file.

    HDF5 allocates that length before it reads the entry. An entry is stored as its length (four bytes) and its location
    in a heap (twelve bytes).
    """
    if not dataset.dtype.hasobject:
        return
    entry, text = _import_h5py().check_vlen_dtype(dataset.dtype), _import_h5py().check_string_dtype(dataset.dtype)
    numbers = isinstance(entry, np.dtype) and entry.kind in "fiu"
    if not (numbers or text is not None) or dataset.id.get_type().get_size() != 16:
        raise InputError(f"{what} holds variable-length entries that are not numbers. Write it with write_spikes.")
    width = 1 if entry is None else entry.itemsize
    for raw in _read_raw(dataset, what):
        lengths = np.frombuffer(raw[: len(raw) // 16 * 16], np.uint32)[::4]
        if lengths.size and int(lengths.max()) * width > packed:
            raise InputError(
                f"{what} has an entry of {int(lengths.max()):,} values, more than the {packed:,} bytes of the file. "
                "It is damaged; download the file again."
            )


def _read_raw(dataset: Any, what: str) -> Iterator[bytes]:
    """Yield the stored bytes of a data set after undoing its filters."""
    made = dataset.id.get_create_plist()
    filters = [made.get_filter(i)[0] for i in range(made.get_nfilters())]
    if dataset.chunks is None:
        offset = dataset.id.get_offset()
        if offset is not None:
            with open(dataset.file.filename, "rb") as file:
                file.seek(offset)
                yield file.read(16 * len(dataset))
        elif dataset.id.get_storage_size():
            raise InputError(f"{what} uses HDF5's compact layout, which is not supported. Write it with write_spikes.")
        return
    size = 16 * dataset.chunks[0]
    for number in range(dataset.id.get_num_chunks()):
        place = dataset.id.get_chunk_info(number)
        mask, raw = dataset.id.read_direct_chunk(place.chunk_offset)
        applied = [kind for i, kind in enumerate(filters) if not mask >> i & 1]
        for kind in reversed(applied):
            if kind == GZIP:
                raw = zlib.decompressobj().decompress(raw, size)
            elif kind == SHUFFLE:
                raw = np.frombuffer(raw, np.uint8).reshape(16, -1).T.tobytes()
            else:
                raise InputError(f"{what} is compressed by filter {kind}; only gzip and shuffle are supported.")
        yield raw


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Convert errors of HDF5 into an `InputError` that says what to do."""
    if not path.is_file():
        raise InputError(f"{path} does not exist, or is not a file.")
    try:
        yield
    except AdptnetError:
        raise
    except Exception as error:  # a damaged header makes h5py and numpy raise many kinds of errors
        raise InputError(f"{path} cannot be read as HDF5, it may be truncated: {error}. Download it again.") from None


def _import_h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise InputError("HDF5 files need h5py: pip install 'adptnet[events]'.") from None
    return h5py
