"""Atomic writes."""

import os

import pytest

from adptnet._io.files import replace_file, write_atomic

posix = pytest.mark.skipif(os.name == "nt", reason="permissions")


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == mode
    with replace_file(path) as draft:
        draft.write_bytes(b"newer")
    assert path.read_bytes() == b"newer"
    assert path.stat().st_mode & 0o777 == mode
    assert os.listdir(tmp_path) == ["file"]


@posix
def test_a_new_file_has_the_default_permissions(tmp_path):
    (tmp_path / "usual").touch()
    write_atomic(tmp_path / "new", b"content")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


@posix
def test_the_content_of_a_private_file_is_never_readable_by_others(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    path.touch(0o600)
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(os.fstat(number).st_mode & 0o777), real(number)))
    write_atomic(path, b"secret")
    assert seen == [0o600]
