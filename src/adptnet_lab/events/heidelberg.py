"""The Spiking Heidelberg Digits and Spiking Speech Commands (Cramer et al. 2020): HDF5 files of spikes.

Layout: spikes/times and spikes/units of variable length, labels, extra/keys (the words), extra/speaker. Unit 0 is the
highest frequency. The data are CC BY 4.0; get them from zenkelab.org/datasets.
"""

import functools
import gzip
import hashlib
import mmap
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from adptnet._io.files import drafted
from adptnet._io.untrusted import LimitedReader, limit_exceeded, unpacked_limit
from adptnet.errors import AdptnetError, InputError
from adptnet.spec import nearest

from .stream import Events, whole_numbers

__all__ = ["MD5", "SpikeFile", "find", "write_spikes"]

MD5 = {  # as published beside the files
    "shd_train.h5.zip": "f3252aeb598ac776c1b526422d90eecb",
    "shd_test.h5.zip": "1503a5064faa34311c398fb0a1ed0a6f",
    "ssc_train.h5.zip": "d102be95e7144fcc0553d1f45ba94170",
    "ssc_valid.h5.zip": "b4eee3516a4a90dd0c71a6ac23a8ae43",
    "ssc_test.h5.zip": "a35ff1e9cffdd02a20eb850c17c37748",
    "shd_train.h5.gz": "d47c9825dee33347913e8ce0f2be08b0",
    "shd_test.h5.gz": "3062a80ec0c5719404d5b02e166543b1",
    "shd_train.h5": "8e9877c85f29a28dd353ea6a54402667",
    "shd_test.h5": "207ad1295a0ab611e22d1734989c254e",
}
GZIP, SHUFFLE = 1, 2  # numbers of HDF5's filters
MOST_WORDS = 2**16  # labels have sixteen bits
HEAP = b"GCOL\x01\0\0\0"  # how a heap of recordings begins
SplitName = Literal["shd_train", "shd_test", "ssc_train", "ssc_valid", "ssc_test"]
SPLITS = ("shd_train", "shd_test", "ssc_train", "ssc_valid", "ssc_test")


class SpikeFile:
    """The recordings of one file: `len(file)`, `file[i]` as (events, label).

    The file is opened at the first look, in each process by itself, so that it may be handed to data-loader workers.
    """

    def __init__(self, path: str | Path, *, channels: int = 700):
        self.path = Path(path)
        self.channels = channels
        self._file: Any = None
        self._owner: int | None = None
        self._datasets: dict[str, Any] = {}  # of the open file, checked
        with _explained(self.path):
            self._open()
            hole = _endless(self.path)
            if hole is not None:
                raise InputError(
                    f"{self.path} is damaged: at byte {hole:,} recordings were overwritten with zeros or have a length "
                    "that cannot be, and HDF5 might read them without end. Get the file again."
                )
            # Counts are compared before values are read: an empty chunk of HDF5 stands for any number of values.
            times, units, labels = (self._dataset(name) for name in ("spikes/times", "spikes/units", "labels"))
            if not len(times) == len(units) == len(labels):
                raise InputError(f"{self.path} has {len(times)} times, {len(units)} units and {len(labels)} labels.")
            self.labels = whole_numbers(np.asarray(labels), f"{self.path}: labels")
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
        with _explained(self.path):
            times, units = self._dataset("spikes/times")[index], self._dataset("spikes/units")[index]
        where = f"{self.path.name}, recording {index}"
        return Events.of(times, units, channels=self.channels, where=where), int(self.labels[index])

    def _dataset(self, path: str, *, needed: bool = True) -> Any:
        """Return a one-dimensional data set whose content lies in this file; None if it is not there and not needed."""
        h5py, found = _h5py(), self._open()
        if path in self._datasets:
            return self._datasets[path]
        for name in path.split("/"):
            link = found.get(name, getlink=True) if isinstance(found, h5py.Group) else None
            if link is None:
                if not needed:
                    return None
                raise InputError(f"{self.path} has no {path}; it is not in the layout of SHD and SSC.")
            if not isinstance(link, h5py.HardLink):
                raise InputError(f"{self.path}: {path} is a link; it must lie in the file itself.")
            found = found[name]
        if not isinstance(found, h5py.Dataset) or found.ndim != 1:
            raise InputError(f"{self.path}: {path} is not a row of values; it is not in the layout of SHD and SSC.")
        if found.external or found.is_virtual:
            raise InputError(f"{self.path}: the values of {path} lie in other files; they must lie in the file itself.")
        packed = self.path.stat().st_size
        most = max((len(found), *(found.chunks or ()))) * found.id.get_type().get_size()  # HDF5 unpacks whole chunks
        if most > unpacked_limit(packed):
            raise InputError(f"{self.path}: {path}: {limit_exceeded(packed, f'{most:,}')}.")
        _check_entries(found, f"{self.path}: {path}", packed)
        self._datasets[path] = found
        return found

    def _open(self) -> Any:
        if self._file is None or self._owner != os.getpid():  # a handle does not survive a fork
            self._file, self._owner = _h5py().File(self.path, "r"), os.getpid()
            self._datasets = {}
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_owner": None, "_datasets": {}}


def find(folder: str | Path, split: SplitName, *, verify: bool = True) -> Path:
    """Return the `.h5` file of a split in `folder`, unpacked beside its `.zip` or `.gz` if need be.

    With `verify` a file is compared with its published MD5, once in a process. There is none for the unpacked files of
    SSC and for its `.gz`; those are read as any file from outside.
    """
    if split not in SPLITS:
        raise InputError(f"split={split!r} is unknown.{nearest(str(split), SPLITS)}")
    folder = Path(folder)
    target = folder / f"{split}.h5"
    if target.exists():
        if verify:
            _verify(target)
        return target
    for suffix in (".zip", ".gz"):
        archive = folder / f"{split}.h5{suffix}"
        if archive.exists():
            if verify:
                _verify(archive)
            _unpack(archive, target)
            return target
    raise InputError(
        f"{folder} has neither {target.name} nor {target.name}.zip or .gz. Download it from "
        f"https://zenkelab.org/datasets/{target.name}.zip (CC BY 4.0) into that folder."
    )


def _verify(path: Path) -> None:
    expected = MD5.get(path.name)
    if expected is None:
        return
    status = path.stat()
    found = _md5(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if found != expected:
        raise InputError(
            f"{path} has the MD5 {found}, published is {expected}: the download is damaged or another release. Get it "
            "again, or pass verify=False."
        )


@functools.lru_cache(maxsize=16)
def _md5(path: Path, *status: int) -> str:
    """Return the sum of a file; once for each `status`, and never from a note that someone else may have written."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _unpack(archive: Path, target: Path) -> None:
    """Whole or not at all."""
    with drafted(target) as draft:
        try:
            file = open(draft, "xb")  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"{archive} cannot be unpacked into its folder: {error.strerror}. Unpack it elsewhere."
            ) from None
        try:
            with file, _member(archive, target.name) as source:
                shutil.copyfileobj(LimitedReader(source, archive.stat().st_size), file, 1 << 20)
        except Exception as error:  # zipfile and gzip raise their own, zlib's, struct's, RuntimeError, ...
            raise InputError(f"{archive} cannot be unpacked: {error}. Get it again.") from None


@contextmanager
def _member(archive: Path, name: str) -> Iterator[Any]:
    if archive.suffix == ".gz":
        with gzip.open(archive, "rb") as file:
            yield file
        return
    with zipfile.ZipFile(archive) as files:
        inside = [item for item in files.infolist() if Path(item.filename).name == name]
        if not inside:
            raise ValueError(f"there is no {name} in it")
        if inside[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("it is compressed by another method than deflate")
        with files.open(inside[0]) as member:
            yield member


def write_spikes(
    path: str | Path,
    recordings: Iterable[tuple[Events, int]],
    *,
    words: Iterable[str] = (),
    speakers: Iterable[int] | None = None,
) -> int:
    """Writes recordings in the layout of SHD and SSC, whole or not at all; returns how many.

    Times are float16, as there: to 0.5 ms at 1 s, 16 ms at 30 s.
    """
    h5py, path = _h5py(), Path(path)
    if not path.parent.is_dir() or path.is_dir():
        raise InputError(
            f"{path} cannot be written: it is a folder, or in none. Make the folder, or pass another name."
        )
    floats, shorts = h5py.vlen_dtype(np.dtype("float16")), h5py.vlen_dtype(np.dtype("uint16"))
    with drafted(path) as draft:
        labels: list[int] = []
        with h5py.File(draft, "w") as file:
            times = file.create_dataset("spikes/times", (0,), maxshape=(None,), dtype=floats)
            units = file.create_dataset("spikes/units", (0,), maxshape=(None,), dtype=shorts)
            for events, label in recordings:
                where = f"recording {len(labels)}"
                ordered = Events.of(*events, channels=2**16, where=where).sorted()
                if ordered.times.size and ordered.times[-1] > np.finfo(np.float16).max:
                    raise InputError(
                        f"{where}: an event at {ordered.times[-1]:g}; are these seconds? Float16 ends at 65504."
                    )
                if isinstance(label, bool) or not isinstance(label, (int, np.integer)) or not 0 <= label < 2**16:
                    raise InputError(f"{where}: the label is {label!r}; labels are whole numbers from 0 to 65535.")
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


def _endless(path: Path) -> int | None:
    """Return where HDF5 might read a heap without end: an object of length zero, or longer than the heap.

    HDF5 reads a heap object by object: an index (0 for free space), a length, that many bytes. It adds the length to
    its position without a check: it stays where it is at sixteen bytes of zeros, and goes back where the sum overflows.
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
    """Raise `InputError` if an entry of variable length says that it is longer than the file.

    HDF5 allocates that length before it looks for the entry. An entry is stored as its length (four bytes) and its
    place in a heap (twelve).
    """
    if not dataset.dtype.hasobject:
        return
    entry, text = _h5py().check_vlen_dtype(dataset.dtype), _h5py().check_string_dtype(dataset.dtype)
    numbers = isinstance(entry, np.dtype) and entry.kind in "fiu"
    if not (numbers or text is not None) or dataset.id.get_type().get_size() != 16:
        raise InputError(f"{what} holds entries of variable length that are not numbers. Write it with write_spikes.")
    width = 1 if entry is None else entry.itemsize
    for raw in _stored(dataset, what):
        lengths = np.frombuffer(raw[: len(raw) // 16 * 16], np.uint32)[::4]
        if lengths.size and int(lengths.max()) * width > packed:
            raise InputError(
                f"{what} has an entry of {int(lengths.max()):,} values, more than the {packed:,} bytes of the file. "
                "It is damaged; get the file again."
            )


def _stored(dataset: Any, what: str) -> Iterator[bytes]:
    """Yield the bytes of a data set as they are in the file, without its filters."""
    made = dataset.id.get_create_plist()
    filters = [made.get_filter(i)[0] for i in range(made.get_nfilters())]
    if dataset.chunks is None:
        offset = dataset.id.get_offset()
        if offset is not None:
            with open(dataset.file.filename, "rb") as file:
                file.seek(offset)
                yield file.read(16 * len(dataset))
        elif dataset.id.get_storage_size():
            raise InputError(f"{what} is stored in a compact form that is not read. Write it with write_spikes.")
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
                raise InputError(f"{what} is compressed by filter {kind}; only gzip and shuffle are read.")
        yield raw


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what HDF5 says of a file that it cannot read into an error that says what to do."""
    if not path.is_file():
        raise InputError(f"{path} does not exist, or is not a file.")
    try:
        yield
    except AdptnetError:
        raise
    except Exception as error:  # h5py and numpy raise whatever a damaged header leads to
        raise InputError(f"{path} cannot be read as HDF5, it may be cut off: {error}. Get the file again.") from None


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise InputError("HDF5 files need h5py: pip install 'adptnet[events]'.") from None
    return h5py
