"""`adptnet data list | fetch | verify`: the data sets that tasks read."""

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
    """Show which data sets there are and where they are; fetch one; check the hashes of those that are here.

    Files are looked for in the folder that the environment variable ADPTNET_DATA names, then in the cache. Nothing is
    downloaded by any other command.
    """

    action: Positional[Literal["list", "fetch", "verify"]] = "list"
    """What to do."""
    names: Positional[tuple[str, ...]] = ()
    """Data sets: for fetch at least one; for list all if none is given, for verify all that are here."""
    folder: Path | None = None
    """Where fetch puts files; the cache if not given."""


def run(options: Data) -> None:
    """Does what `options` say; raises if a file that was fetched or verified is not right."""
    if options.action == "fetch" and not options.names:
        raise DataError(f"fetch needs a name: adptnet data fetch {next(iter(download.FILES))}")
    files = [download.known(name) for name in options.names] or list(download.FILES.values())
    if options.action == "fetch":
        for file in files:
            print(download.fetch(file.name, options.folder, report=_Progress(file.name)))
    elif options.action == "verify":
        _verify(files, named=bool(options.names))
    else:
        for file in files:
            print(f"{file.name}: {file.what}; {file.terms}\n  {file}\n  {_where(file)}")


def _where(file: download.DataFile) -> str:
    try:
        return f"here: {download.find(file.name)}"
    except DataError:
        return f"not here; adptnet data fetch {file.name}"


def _verify(files: Sequence[download.DataFile], *, named: bool) -> None:
    wrong = []
    for file in files:
        try:
            path = download.find(file.name)
        except DataError as error:
            if named:
                raise
            print(f"{file.name}: missing or incomplete. {error}")
            continue
        if path.name != file.filename:
            print(f"{file.name}: {path} serves instead; its content is not known")
            continue
        right = download.sha256_of(path) == file.sha256
        print(f"{file.name}: {path} {'is right' if right else 'is NOT the file it should be'}")
        if not right:
            wrong.append((path, file.name))
    if wrong:
        path, name = wrong[0]
        raise DataError(f"{path} has another hash than it should. Delete it and run: adptnet data fetch {name}")


class _Progress:
    """Prints a line for every tenth of a file."""

    def __init__(self, name: str):
        self.name, self.said = name, -1

    def __call__(self, have: int, total: int) -> None:
        tenth = 10 * have // total
        if tenth > self.said:
            self.said = tenth
            print(f"{self.name}: {have / 1e6:.1f} of {total / 1e6:.1f} MB", flush=True)
