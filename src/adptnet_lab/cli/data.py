"""`adptnet data`: list, fetch and verify the data sets that tasks read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from adptnet.errors import DataError

from ..tasks import download

__all__ = ["Data", "run"]


@dataclass(frozen=True)
class Data:
    """List the data sets that tasks read, fetch some of them, or verify the hashes of those on this machine.

    Files are searched for in the folder named by the environment variable ADPTNET_DATA, then in the cache. No other
    command downloads anything.
    """

    action: Positional[Literal["list", "fetch", "verify"]] = "list"
    """Action on the data sets."""
    names: Positional[tuple[str, ...]] = ()
    """Names of data sets. fetch needs at least one; list and verify take all if none is given."""
    folder: Path | None = None
    """Folder that fetch writes to; the cache if not given."""


def run(options: Data) -> None:
    """List, fetch or verify data sets.

    Args:
        options: The options.

    Raises:
        DataError: A file could not be fetched, or its hash is wrong.
    """
    if options.action == "fetch" and not options.names:
        raise DataError(f"fetch needs a name: adptnet data fetch {next(iter(download.FILES))}")
    files = [download.get_data_file(name) for name in options.names] or list(download.FILES.values())
    if options.action == "fetch":
        for file in files:
            print(download.fetch(file.name, options.folder, report=_Progress(file.name)))
    elif options.action == "verify":
        _verify(files, named=bool(options.names))
    else:
        for file in files:
            print(f"{file.name}: {file.what}; {file.terms}\n  {file}\n  {_locate(file)}")


def _locate(file: download.DataFile) -> str:
    try:
        return f"found: {download.find_data(file.name)}"
    except DataError:
        return f"not found; adptnet data fetch {file.name}"


def _verify(files: Sequence[download.DataFile], *, named: bool) -> None:
    wrong = []
    for file in files:
        try:
            path = download.find_data(file.name)
        except DataError as error:
            if named:
                raise
            print(f"{file.name}: missing or incomplete. {error}")
            continue
        if path.name != file.filename:
            print(f"{file.name}: {path} is used instead; its hash is not known")
            continue
        is_right = download.compute_sha256(path) == file.sha256
        print(f"{file.name}: {path} {'has the expected hash' if is_right else 'has the WRONG hash'}")
        if not is_right:
            wrong.append((path, file.name))
    if wrong:
        path, name = wrong[0]
        raise DataError(f"{path} has the wrong hash. Delete it and run: adptnet data fetch {name}")


class _Progress:
    """Prints a line after every tenth of a file."""

    def __init__(self, name: str):
        self.name, self.printed = name, -1

    def __call__(self, have: int, total: int) -> None:
        tenth = 10 * have // total
        if tenth > self.printed:
            self.printed = tenth
            print(f"{self.name}: {have / 1e6:.1f} of {total / 1e6:.1f} MB", flush=True)
