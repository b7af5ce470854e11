"""Data files: locating, verifying and downloading them.

Nothing is downloaded unless `fetch` is called. `find_data` searches the folder named by ADPTNET_DATA, then the cache
that `fetch` fills.
"""

import functools
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adptnet._io.cache import cache_folder
from adptnet.errors import DataError
from adptnet.spec import suggest_name

__all__ = ["FILES", "DataFile", "compute_sha256", "data_folders", "fetch", "find_data"]

TIMEOUT = 30.0  # seconds without a response
CHUNK = 1 << 20

Report = Callable[[int, int], None]  # bytes downloaded, total bytes


@dataclass(frozen=True)
class DataFile:
    """A file of known size and SHA-256, and the addresses to download it from."""

    name: str
    filename: str
    size: int
    sha256: str
    urls: tuple[str, ...]
    what: str
    terms: str
    instead: tuple[str, ...] = ()  # patterns of files accepted in its place; their content is not checked

    def __str__(self) -> str:
        return f"{self.filename} ({self.size:,} bytes, sha256 {self.sha256})"


FILES = {
    file.name: file
    for file in (
        DataFile(
            "cifar10",
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
                "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/cifar-10-binary.tar.gz",
            ),
            "CIFAR-10, 60 000 colour images of 32 × 32 in 10 classes",
            "no licence stated; cite Krizhevsky 2009",
            ("cifar10*.npz",),
        ),
        DataFile(
            "tiny-shakespeare",
            "tinyshakespeare.txt",
            1_115_394,
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            (
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                "https://cdn.jsdelivr.net/gh/karpathy/char-rnn@master/data/tinyshakespeare/input.txt",
            ),
            "about a million characters of Shakespeare's plays",
            "public domain",
        ),
    )
}


def get_data_file(name: str) -> DataFile:
    """Return the data file called `name`.

    Args:
        name: Name of the data file.

    Raises:
        DataError: There is none; the message suggests the nearest name.
    """
    if name not in FILES:
        raise DataError(f"there is no data set {name!r}.{suggest_name(str(name), FILES)}")
    return FILES[name]


def data_folders() -> tuple[Path, ...]:
    """Return the folders that are searched for data files, in order."""
    chosen = os.environ.get("ADPTNET_DATA")
    if not chosen:
        return (cache_folder() / "data",)
    if not Path(chosen).is_dir():
        raise DataError(f"ADPTNET_DATA={chosen} is not a folder. Set it to one that holds data files, or unset it.")
    return (Path(chosen), cache_folder() / "data")


def find_data(name: str) -> Path:
    """Return the path of a data set on this machine, after comparing its content with the published SHA-256.

    Args:
        name: One of `FILES`.

    Raises:
        DataError: The file is missing, or its content differs; the message says what to do.
    """
    return _find_verified(get_data_file(name), data_folders())


@functools.lru_cache(maxsize=16)
def _find_verified(file: DataFile, places: tuple[Path, ...]) -> Path:
    """Search for a file and check its hash once per process: tasks call this for every batch.

    A file that is deleted later is not noticed; tasks keep its content in memory.
    """
    fault = None
    for path in _iterate_candidates(file, places):
        if path.name != file.filename:
            return path
        size = path.stat().st_size
        if size != file.size:
            fault = f"{path} has {size:,} bytes, so it is not the whole file."
        elif compute_sha256(path) != file.sha256:
            fault = f"{path} has the wrong SHA-256: it is damaged, or not the published file."
        else:
            return path
    raise DataError(
        (fault or f"{file.name} is not in {' and '.join(map(str, places))}.")
        + f" Fetch it: adptnet data fetch {file.name}. Or put {file} into a folder and set ADPTNET_DATA to that folder."
    )


def _iterate_candidates(file: DataFile, places: tuple[Path, ...]) -> Iterator[Path]:
    for folder in places:
        for pattern in (file.filename, *file.instead):
            yield from sorted(path for path in folder.rglob(pattern) if path.is_file())


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal.

    Args:
        path: The file.
    """
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fetch(name: str, folder: Path | None = None, *, report: Report | None = None) -> Path:
    """Download a data set, unless it is already there, and return its path.

    The file appears under its name only when it is complete and its hash is right. An interrupted download resumes
    where it stopped, also from another mirror.

    Args:
        name: One of `FILES`.
        folder: Destination; the cache by default.
        report: Called with the number of bytes downloaded and the total.

    Raises:
        DataError: pooch is not installed, the folder cannot be written, or every mirror failed.
    """
    try:
        import pooch
    except ImportError:
        raise DataError("downloads need pooch. Install it: pip install 'adptnet[data]'.") from None
    file = get_data_file(name)
    target = cache_folder() / "data" if folder is None else Path(folder)
    path = target / file.filename
    try:
        target.mkdir(parents=True, exist_ok=True)
        if path.is_file() and compute_sha256(path) == file.sha256:
            return path
    except OSError as error:
        raise DataError(f"{path} cannot be read or written: {error}. Pass another folder with --folder.") from None
    pooch.get_logger().setLevel("ERROR")
    failures = []
    for url in file.urls:
        download = _Resumable(target / f".{file.filename}.part", file.size, report)
        try:
            pooch.retrieve(url, f"sha256:{file.sha256}", file.filename, target, downloader=download)
            return path
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures.append(f"  {url}: {_reason(error)}")
    raise DataError(
        f"{name} could not be fetched:\n" + "\n".join(failures) + f"\nFetch it some other way and put {file} into "
        f"{target}, or into a folder that ADPTNET_DATA names."
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, ValueError) and "hash" in str(error):
        return "the content has the wrong hash; it was discarded"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _Resumable:
    """Downloader for pooch that keeps a partial file and requests only the missing bytes."""

    def __init__(self, part: Path, size: int, report: Report | None):
        self.part, self.size, self.report = part, size, report

    def __call__(self, url: str, output_file: str, mover: Any) -> None:
        have = self.part.stat().st_size if self.part.exists() else 0
        if have >= self.size:
            self.part.unlink()
            have = 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            resumes = answer.status == http.client.PARTIAL_CONTENT
            have = have if resumes else 0
            with open(self.part, "ab" if resumes else "wb") as content:
                while chunk := answer.read(CHUNK):
                    have += len(chunk)
                    if have > self.size:
                        content.close()
                        self.part.unlink()
                        raise OSError(f"the server sends more than the {self.size:,} bytes of the file")
                    content.write(chunk)
                    if self.report is not None:
                        self.report(have, self.size)
        if have < self.size:
            raise OSError(f"the connection ended after {have:,} of {self.size:,} bytes; fetch again to resume")
        os.replace(self.part, output_file)
