"""Checkpoints on disk: folders that are written atomically, and whose files are verified by SHA-256 when read."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from adptnet._io.files import write_atomic
from adptnet._io.untrusted import parse_json
from adptnet.errors import AdptnetError, CheckpointError

__all__ = [
    "CheckpointStore",
    "CheckpointWarning",
    "explain_damage",
    "list_copies",
    "read_folder",
    "read_intact_copy",
    "write_folder",
]

VERSION = 1
_MANIFEST = "manifest.json"
_LEFTOVERS = [("draft", ".*"), ("draft", ""), ("old", ".*")]  # without a token: of adptnet 0.1.0


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used or written, or is of other versions; the run continues."""


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write `files` and a manifest of their SHA-256 as `folder`, replacing an older one.

    At every moment one of `list_copies(folder)` is complete, old or new, so that a process that is killed (kill -9)
    loses nothing.

    Args:
        folder: The folder to write.
        files: The contents of its files, by name.
    """
    token = secrets.token_hex(4)
    draft, old = (folder.with_name(f".{kind}-{folder.name}.{token}") for kind in ("draft", "old"))
    try:
        draft.mkdir(parents=True)
        for name, content in files.items():
            write_atomic(draft / name, content)
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        body = json.dumps({"adptnet_checkpoint": VERSION, "sha256": sums}, indent=1).encode()
        write_atomic(draft / _MANIFEST, body + b"\n" + hashlib.sha256(body).hexdigest().encode())
        _sync(draft)
        if folder.exists():
            os.rename(folder, old)
        os.rename(draft, folder)
        _sync(folder.parent)
    except BaseException:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(draft, ignore_errors=True)
        raise
    for leftover in list_copies(folder)[1:]:
        shutil.rmtree(leftover, ignore_errors=True)


def list_copies(folder: Path) -> list[Path]:
    """Return `folder` and the copies that an interrupted `write_folder` left beside it, in the order to read them.

    Args:
        folder: The folder that was written.
    """
    left = [sorted(folder.parent.glob(f".{kind}-{folder.name}{rest}")) for kind, rest in _LEFTOVERS]
    return [folder, *itertools.chain(*left)]


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the files that `write_folder` wrote, by name.

    Args:
        folder: The folder that was written.

    Raises:
        CheckpointError: A file is missing or changed; the message names it.
    """
    sums = _read_manifest(folder)
    files = {name: _read_bytes(folder / name) for name in sums}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != sums[name]:
            raise CheckpointError(f"{folder / name} is not as it was written.")
    return files


def _read_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a checkpoint, by names that stay inside the folder."""
    path = folder / _MANIFEST
    body, _, own = _read_bytes(path).rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != own:
        raise CheckpointError(f"{path} is not as it was written.")
    try:
        manifest = parse_json(body)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a manifest: {error}.") from None
    version = manifest.get("adptnet_checkpoint") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f'{path} is not a manifest: it has no "adptnet_checkpoint", an integer >= 1.')
    if version > VERSION:
        raise CheckpointError(
            f"{folder} has version {str(version)[:20]}; this adptnet reads versions up to {VERSION}. "
            "It was written by a newer adptnet: pip install --upgrade adptnet."
        )
    sums = manifest.get("sha256")
    if not isinstance(sums, dict) or not sums:
        raise CheckpointError(f'{path} is not a manifest: "sha256" must name the files of the checkpoint.')
    for name, digest in sums.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name == _MANIFEST:
            raise CheckpointError(f"{path} names the file {name[:80]!r}; names are letters, digits, '.', '_' and '-'.")
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise CheckpointError(f"{path} has no SHA-256 for {name}.")
    return sums


def read_intact_copy(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Read `folder`, or a copy of it that an interrupted `write_folder` left.

    Args:
        folder: The folder that was written.

    Returns:
        The folder that was read, and its files by name.

    Raises:
        CheckpointError: No copy is intact; the message is that of `folder` itself.
    """
    try:
        return folder, read_folder(folder)
    except CheckpointError as reason:
        for copy in list_copies(folder)[1:]:
            with contextlib.suppress(CheckpointError):  # half written, or half removed
                return copy, read_folder(copy)
        raise reason from None


@contextlib.contextmanager
def explain_damage(folder: Path) -> Iterator[None]:
    """Turn an error in the use of files that are intact into a `CheckpointError` that names their `folder`.

    Args:
        folder: The folder of the files.
    """
    try:
        yield
    except (AdptnetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any type: it depends on the content of the file
        raise CheckpointError(
            f"{folder} does not hold what a run writes there ({type(error).__name__}: {error}). Remove it, or start in "
            "another folder."
        ) from error


class CheckpointStore:
    """The newest checkpoints of a run, by step.

    Args:
        folder: The folder that holds them.
        keep: The number of checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, the newest first, without checking that it can be read."""
        return self._steps(r"step-([0-9]{9,})")

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step.

        Args:
            step: The step.
        """
        return self.folder / f"step-{step:09d}"

    def save(self, step: int, files: dict[str, bytes]) -> None:
        """Add a checkpoint, then remove all but the newest `keep`.

        Args:
            step: The step.
            files: The contents of its files, by name.
        """
        write_folder(self.path(step), files)
        for old in self.steps()[self.keep :]:
            removed = self.folder / f".removed-{old}-{secrets.token_hex(4)}"
            os.rename(self.path(old), removed)  # so that no checkpoint is ever partly removed
        for kind in ("draft", "old", "removed"):
            for leftover in self.folder.glob(f".{kind}-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def read_newest(self, *, repair: bool = False) -> tuple[int, dict[str, bytes]] | None:
        """Read the newest intact checkpoint and warn of damaged ones.

        Args:
            repair: Rename damaged checkpoints, and move a copy that an interrupted save left to its place. A run that
                is resumed needs both, because it writes these checkpoints again.

        Returns:
            The step and the files by name; None if there is no checkpoint.

        Raises:
            CheckpointError: There are checkpoints, and all are damaged.
        """
        damaged: list[tuple[int, CheckpointError]] = []
        for step in self._steps(r"(?:\.draft-|\.old-)?step-([0-9]{9,})(?:\.\w+)?"):
            try:
                found, files = read_intact_copy(self.path(step))
            except CheckpointError as reason:
                if self.path(step).exists():  # otherwise its first save was interrupted
                    damaged.append((step, reason))
                continue
            for other, error in damaged:
                aside = self._set_aside(other) if repair else None
                done = f"The checkpoint was renamed to {aside}; the" if aside else "The"
                warnings.warn(f"{error} {done} one of step {step} is used.", CheckpointWarning, stacklevel=2)
            if repair and found != self.path(step):
                if self.path(step).exists():
                    self._set_aside(step)
                os.rename(found, self.path(step))
            return step, files
        if damaged:
            reasons = " ".join(str(error) for _, error in damaged)
            raise CheckpointError(f"No checkpoint in {self.folder} can be used. {reasons} Start in another folder.")
        return None

    def _steps(self, pattern: str) -> list[int]:
        """Return the steps in the names that match `pattern`, the newest first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted({int(match[1]) for name in names if (match := re.fullmatch(pattern, name))}, reverse=True)

    def _set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint and return its new name."""
        aside = self.folder / f"refused-{self.path(step).name}"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(self.path(step), aside)
        return aside.name


def _read_bytes(path: Path) -> bytes:
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"{path} is not a regular file. A checkpoint consists of its own files.")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None


def _sync(folder: Path) -> None:
    """Flush the directory entries of `folder` to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
