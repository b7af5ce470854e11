"""Data files: where they are looked for, how they are checked, and how they are fetched when asked for.

Nothing is downloaded unasked. `find` looks in the folder that ADPTNET_DATA names, then in the cache that `fetch`
fills.
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

from adptnet.errors import DataError
from adptnet.ops._build import cache
from adptnet.spec import nearest

__all__ = ["FILES", "DataFile", "fetch", "find", "folders", "sha256_of"]

TIMEOUT = 30.0  # seconds without an answer
CHUNK = 1 << 20

Report = Callable[[int, int], None]  # bytes here, bytes in all


@dataclass(frozen=True)
class DataFile:
    """A file of known size and hash, and where it may be had."""

    name: str
    filename: str
    size: int
    sha256: str
    urls: tuple[str, ...]
    what: str
    terms: str
    instead: tuple[str, ...] = ()  # patterns of files that serve as well; their content is not checked

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


def known(name: str) -> DataFile:
    """The file of that name."""
    if name not in FILES:
        raise DataError(f"there is no data set {name!r}.{nearest(str(name), FILES)}")
    return FILES[name]


def folders() -> tuple[Path, ...]:
    """Where files are looked for, in order."""
    chosen = os.environ.get("ADPTNET_DATA")
    if not chosen:
        return (cache() / "data",)
    if not Path(chosen).is_dir():
        raise DataError(f"ADPTNET_DATA={chosen} is no folder. Set it to one that holds data files, or unset it.")
    return (Path(chosen), cache() / "data")


def find(name: str) -> Path:
    """Return the path of a data set that is here already, its content compared with the published SHA-256.

    Raises:
        DataError: It is not here, or its content is another; the message says what to do.
    """
    return _found(known(name), folders())


@functools.lru_cache(maxsize=16)
def _found(file: DataFile, places: tuple[Path, ...]) -> Path:
    """Asked for at every batch, so a file is searched and checked once; tasks hold the content of one that is gone."""
    fault = None
    for path in _candidates(file, places):
        if path.name != file.filename:
            return path
        size = path.stat().st_size
        if size != file.size:
            fault = f"{path} has {size:,} bytes, so it is not the whole file."
        elif sha256_of(path) != file.sha256:
            fault = f"{path} has another SHA-256 than it should: it is damaged, or not the published file."
        else:
            return path
    raise DataError(
        (fault or f"{file.name} is not in {' and '.join(map(str, places))}.")
        + f" Fetch it: adptnet data fetch {file.name}. Or put {file} into a folder and set ADPTNET_DATA to that folder."
    )


def _candidates(file: DataFile, places: tuple[Path, ...]) -> Iterator[Path]:
    for folder in places:
        for pattern in (file.filename, *file.instead):
            yield from sorted(path for path in folder.rglob(pattern) if path.is_file())


def sha256_of(path: Path) -> str:
    """The hash of a file's content."""
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fetch(name: str, folder: Path | None = None, *, report: Report | None = None) -> Path:
    """Downloads a data set, unless it is there already, and returns its path.

    The file appears under its name only when all of it has come and its hash is right. A download that was cut off
    goes on where it stopped, also from another mirror.

    Args:
        name: One of `FILES`.
        folder: Where to put it; the cache if not given.
        report: Called with the number of bytes here and in all.
    """
    try:
        import pooch
    except ImportError:
        raise DataError("downloads need pooch. Install it: pip install 'adptnet[data]'.") from None
    file = known(name)
    target = cache() / "data" if folder is None else Path(folder)
    path = target / file.filename
    try:
        target.mkdir(parents=True, exist_ok=True)
        if path.is_file() and sha256_of(path) == file.sha256:
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
        return "the content has another hash than it should; nothing of it was kept"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _Resumable:
    """What pooch calls to download: keeps what has come in a file of its own, and asks for the rest of it."""

    def __init__(self, part: Path, size: int, report: Report | None):
        self.part, self.size, self.report = part, size, report

    def __call__(self, url: str, output_file: str, mover: Any) -> None:
        have = self.part.stat().st_size if self.part.exists() else 0
        if have >= self.size:
            self.part.unlink()
            have = 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            goes_on = answer.status == http.client.PARTIAL_CONTENT
            have = have if goes_on else 0
            with open(self.part, "ab" if goes_on else "wb") as content:
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
            raise OSError(
                f"the connection ended after {have:,} of {self.size:,} bytes; fetch again to go on from there"
            )
        os.replace(self.part, output_file)
