"""Image files: CIFAR-10's binary archive, or any npz of images and labels. Nothing is unpickled."""

import functools
import gzip
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adptnet._io.untrusted import LimitedReader, read_npz
from adptnet.errors import AdptnetError, DataError

__all__ = ["Images", "read_images"]

RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue


class Images(NamedTuple):
    """Images and labels of one file."""

    x_train: Tensor  # (images, height, width, channels) uint8
    y_train: Tensor  # (images,) int64
    x_test: Tensor
    y_test: Tensor


@functools.lru_cache(maxsize=2)
def read_images(path: Path) -> Images:
    """Return the images of cifar-10-binary.tar.gz, or of an npz with x_train, y_train, x_test and y_test.

    Args:
        path: The archive; an npz by its suffix.

    Raises:
        DataError: There is no such file, it is damaged, in another layout, or too large when unpacked.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}. Pass the path of an npz with images, or data='cifar10'.")
    try:
        return _from_npz(path) if path.suffix == ".npz" else _from_archive(path)
    except AdptnetError:
        raise
    except Exception as error:  # tarfile, gzip and zipfile raise their own errors, those of zlib, of struct, ...
        raise DataError(f"{path} cannot be read: {error}. Fetch it again, or check it: adptnet data verify") from None


def _from_archive(path: Path) -> Images:
    members = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    found = {}
    with open(path, "rb") as packed:
        compressed = packed.read(2) == b"\x1f\x8b"
    # Read as a stream, so that the limit counts every unpacked byte: the header of a member may claim any size.
    with (
        (gzip.open if compressed else open)(path, "rb") as stream,
        tarfile.open(fileobj=LimitedReader(stream, path.stat().st_size), mode="r|") as archive,
    ):
        for member in archive:
            name = Path(member.name).name
            content = archive.extractfile(member) if name in members else None
            if content is not None:
                found[name] = np.frombuffer(content.read(), dtype=np.uint8)
    for name in members:
        if name not in found or not found[name].size or found[name].size % RECORD:
            what = f"{found[name].size:,} bytes" if name in found else "nothing"
            raise DataError(
                f"{path} is not CIFAR-10's binary archive: it has {what} under {name}, where records of {RECORD} "
                "bytes are needed. Pass cifar-10-binary.tar.gz."
            )
    train, test = np.concatenate([found[name] for name in members[:-1]]), found[members[-1]]
    return Images(*_parse_records(train), *_parse_records(test))


def _parse_records(content: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return images (count, 32, 32, 3) and labels of CIFAR-10 records."""
    rows = torch.from_numpy(content.reshape(-1, RECORD).copy())
    return rows[:, 1:].reshape(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous(), rows[:, 0].long()


def _from_npz(path: Path) -> Images:
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not an npz file. Save it with np.savez(path, x_train=..., y_train=..., ...).")
    try:
        found, there = read_npz(path, Images._fields)
    except ValueError as error:
        raise DataError(f"{path}: {error}.") from None
    missing = [name for name in Images._fields if name not in found]
    if missing:
        raise DataError(
            f"{path} has no array {missing[0]!r}; it has {', '.join(there) or 'none'}. Save it with "
            "np.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)."
        )
    parts = []
    for split in ("train", "test"):
        x, y = found[f"x_{split}"], found[f"y_{split}"]
        if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size:
            raise DataError(
                f"{path}: x_{split} is {x.dtype} of shape {x.shape}; images are uint8, (images, height, width) or "
                "(images, height, width, channels)."
            )
        if (
            y.shape != x.shape[:1]
            or not np.issubdtype(y.dtype, np.integer)
            or int(y.min()) < 0
            or int(y.max()) >= 2**63
        ):
            raise DataError(
                f"{path}: y_{split} is {y.dtype} of shape {y.shape}; it must hold {len(x)} labels, integers >= 0."
            )
        images = torch.from_numpy(x)
        parts += [images.unsqueeze(-1) if x.ndim == 3 else images, torch.from_numpy(y.astype(np.int64))]
    return Images(*parts)
