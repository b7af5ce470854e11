"""Parsers for untrusted files: JSON, npz and compressed streams, within limits on memory and disk.

All of them raise `ValueError` for invalid content, whatever the underlying parser raised; callers add the name of the
file and the class of the error. The limit on unpacked sizes is defined only here.
"""

import io
import json
import math
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

__all__ = ["LimitedReader", "parse_json", "read_npz", "unpacked_limit"]

ALWAYS_ALLOWED = 64 * 2**20  # bytes that any file may unpack to
LARGEST_RATIO = 200  # unpacked over packed; sparse event frames reach about 100, a deflate bomb 1000
RAISE_LIMIT = "ADPTNET_UNPACK_LIMIT"  # environment variable: bytes, instead of the rule above


def parse_json(text: str | bytes) -> Any:
    """Return the content of JSON text.

    Args:
        text: The text, or its bytes.

    Raises:
        ValueError: Bytes that are not text, text that is not JSON, nesting beyond Python's limit, integers of thousands
            of digits, NaN and infinities.
    """

    def reject(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(text, parse_constant=reject)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unpacked_limit(packed: int) -> int:
    """Return the largest allowed unpacked size of a compressed file of `packed` bytes.

    Args:
        packed: Size of the compressed file in bytes.
    """
    chosen = os.environ.get(RAISE_LIMIT)
    if chosen is None:
        return max(ALWAYS_ALLOWED, LARGEST_RATIO * packed)
    if not chosen.isascii() or not chosen.isdigit() or len(chosen) > 18:
        raise ValueError(f"{RAISE_LIMIT}={chosen[:40]} is not a number of bytes. Set it to one, or unset it")
    return int(chosen)


def limit_exceeded(packed: int, unpacked: str) -> ValueError:
    """Return the error that states the limit and how to raise it.

    Args:
        packed: Size of the compressed file in bytes.
        unpacked: Its unpacked size, in words.
    """
    return ValueError(
        f"its {packed:,} bytes unpack to {unpacked}, and {unpacked_limit(packed):,} are allowed. If you trust the "
        f"file, set the environment variable {RAISE_LIMIT} to a larger number of bytes"
    )


class LimitedReader(io.RawIOBase):
    """Reads a decompressed stream and raises `ValueError` once it exceeds the limit for its compressed file.

    Args:
        stream: The decompressed stream.
        packed: Size of the compressed file in bytes.
    """

    def __init__(self, stream: Any, packed: int):
        super().__init__()
        self._stream = stream
        self._packed = packed
        self._left = unpacked_limit(packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise limit_exceeded(self._packed, "more")
        buffer[: len(content)] = content
        return len(content)


def read_npz(path: Path, names: Iterable[str] | None = None) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    """Return arrays of an npz and the names of all its arrays. Nothing is unpickled.

    Sizes are checked against the directory of the archive before memory is allocated.

    Args:
        path: The file.
        names: Names of the arrays to read, if they exist; all arrays by default.

    Raises:
        ValueError: Not an npz, damaged, or larger than `unpacked_limit`.
        OSError: The file cannot be read.
    """
    packed = path.stat().st_size
    selected = None if names is None else set(names)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if len(members) < len(archive.infolist()):
                raise ValueError("two of its arrays have one name")
            for info in members.values():
                archive.open(info).close()  # raises if the directory and the member have different names
            chosen = {name: info for name, info in members.items() if selected is None or name in selected}
            total = sum(info.file_size for info in chosen.values())
            if total > unpacked_limit(packed):
                raise limit_exceeded(packed, f"{total:,}")
            return {name: _read_array(archive, name, info) for name, info in chosen.items()}, sorted(members)
    except (ValueError, OSError):
        raise
    except Exception as error:  # zipfile raises its own, zlib's, struct's, NotImplementedError, RuntimeError, ...
        raise ValueError(str(error) or type(error).__name__) from None


def _read_array(archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> npt.NDArray[Any]:
    if info.compress_type not in (
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    ):  # others trust the size in the file
        raise ValueError(f"{name} is compressed by another method than np.savez uses")
    with archive.open(info) as member:
        shape, fortran, dtype = _read_header(member)
        size = info.file_size - member.tell()
        if dtype.hasobject:
            raise ValueError(f"Object arrays need pickle, which is never run ({name}). Save plain arrays of numbers")
        if not dtype.itemsize or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"{name} has {size:,} bytes, which do not fit {dtype} of shape {shape}")
        content = np.empty(size, np.uint8)
        filled = 0
        while chunk := member.read(1 << 20):
            content[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
            filled += len(chunk)
    if filled != size:
        raise ValueError(f"{name} is cut off after {filled:,} of {size:,} bytes")
    return content.view(dtype).reshape(shape, order="F" if fortran else "C")


def _read_header(member: BinaryIO | Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"arrays of format {version} are not supported. Save plain arrays of numbers")
    return readers[version](member)
