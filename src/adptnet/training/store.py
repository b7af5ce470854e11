"""Checkpoints on disk: folders that are there whole or not at all, and whose every byte is checked when read."""

import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path

from ..errors import CheckpointError
from ..files import write_whole
from ..untrusted import parse_json

__all__ = ["CheckpointWarning", "Store", "read_folder", "write_folder"]

VERSION = 1
_MANIFEST = "manifest.json"


class CheckpointWarning(UserWarning):
    """A checkpoint could not be used or written, or is of other versions; the run goes on."""


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Writes `files` and a manifest of their sums; the folder is there at once, in place of an older one."""
    draft = folder.with_name(f".draft-{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        for name, content in files.items():
            write_whole(draft / name, content)
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        body = json.dumps({"adptnet_checkpoint": VERSION, "sha256": sums}, indent=1).encode()
        write_whole(draft / _MANIFEST, body + b"\n" + hashlib.sha256(body).hexdigest().encode())
        _sync(draft)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(draft, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def read_folder(folder: Path) -> dict[str, bytes]:
    """What `write_folder` wrote; a `CheckpointError` that names the file if a byte of it is missing or changed."""
    sums = _read_manifest(folder)
    files = {name: _bytes(folder / name) for name in sums}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != sums[name]:
            raise CheckpointError(f"{folder / name} is not as it was written.")
    return files


def _read_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a checkpoint, by names that stay inside the folder."""
    path = folder / _MANIFEST
    body, _, own = _bytes(path).rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != own:
        raise CheckpointError(f"{path} is not as it was written.")
    try:
        manifest = parse_json(body)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a manifest: {error}.") from None
    version = manifest.get("adptnet_checkpoint") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f'{path} is not a manifest: it has no "adptnet_checkpoint", a whole number from 1.')
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


class Store:
    """The newest checkpoints of a run, by step."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, the newest first; whether they can be read is not known."""
        named = [re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*")]
        return sorted((int(match[1]) for match in named if match), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def save(self, step: int, files: dict[str, bytes]) -> None:
        """Adds a checkpoint, then removes the oldest beyond `keep`."""
        write_folder(self.path(step), files)
        for old in self.steps()[self.keep :]:
            os.rename(self.path(old), self.folder / f".draft-{old}")  # never a checkpoint that is half removed
        for leftover in self.folder.glob(".draft-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def newest(self, *, put_aside: bool = False) -> tuple[int, dict[str, bytes]] | None:
        """The newest checkpoint that is as it was written. Newer ones are named in a warning.

        With `put_aside` they are renamed, to leave room for the checkpoints of a run that goes on.
        """
        refused: list[tuple[int, CheckpointError]] = []
        for step in self.steps():
            try:
                files = read_folder(self.path(step))
            except CheckpointError as reason:
                refused.append((step, reason))
                continue
            for other, error in refused:
                aside = self.folder / f"refused-{self.path(other).name}"
                if put_aside:
                    shutil.rmtree(aside, ignore_errors=True)
                    self.path(other).rename(aside)
                done = f"The checkpoint was put aside as {aside.name}; the" if put_aside else "The"
                warnings.warn(f"{error} {done} one of step {step} is used.", CheckpointWarning, stacklevel=2)
            return step, files
        if refused:
            reasons = " ".join(str(error) for _, error in refused)
            raise CheckpointError(f"No checkpoint in {self.folder} can be used. {reasons} Start in another folder.")
        return None


def _bytes(path: Path) -> bytes:
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"{path} is not a regular file. A checkpoint consists of its own files.")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None


def _sync(folder: Path) -> None:
    """Makes the names in `folder` last, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
