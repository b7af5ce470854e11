"""Libraries and compilers that another user could have written, or that are damaged, are never executed."""

import ctypes
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest
import torch

from adptnet._io.cache import make_private_folder, preferred_cache_folder, process_folder
from adptnet.errors import BackendWarning, BuildError
from adptnet.ops import _build, _trusted_files
from adptnet.ops.plane_rotation import cpu, reference
from support.kernels import needs_compiler, run_python

OTHER = 65534  # the id of another user, not root
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners and modes of files here")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user"
)
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Compile a library that creates a marker file as soon as it is loaded."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.c").write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void run(void) "
        '{ FILE* file = fopen(getenv("MARKER"), "w"); if (file) fclose(file); }'
    )
    command = [_build.find_compiler()[0], "-shared", "-fPIC", "-xc", folder / "planted.c", "-o", folder / "planted.so"]
    subprocess.run(command, check=True)
    return folder / "planted.so"


class Stage:
    """A cache folder with a real library, a planted one, and a fake compiler that only copies the real one."""

    def __init__(self, root, planted, monkeypatch):
        self.marker, self.folder = root / "planted-code-was-run", root / "cache" / "adptnet"
        self.planted, self.good = planted, _build.build("plane_rotation", "double").path
        monkeypatch.setenv("MARKER", str(self.marker))
        compiler = root / "copying"
        compiler.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && exec echo copying 1.0\n'
            f'while [ "$1" != -o ]; do shift; done\ncp \'{self.good}\' "$2"\n'
        )
        compiler.chmod(0o700)
        make_private_folder(self.folder)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("ADPTNET_CACHE", str(self.folder))
        monkeypatch.setattr(_build, "_warned", set())
        monkeypatch.setattr(_build, "_loaded", {})
        self.library = _build.build("plane_rotation", "double").path
        assert self.library.parent == self.folder

    def plant(self, place=None):
        """Replace the real library by the planted one, with a matching record."""
        place = place or self.library
        place.unlink(missing_ok=True)
        shutil.copy(self.planted, place)
        place.chmod(0o700)
        _trusted_files.write_record(place)

    def check(self):
        """Load the library and run it."""
        inputs = [torch.randn(3, 5) for _ in range(3)] + [torch.randn(3, 1) for _ in range(3)]
        assert cpu.has_kernel(torch.float64)
        assert not self.marker.exists()
        torch.testing.assert_close(cpu.forward(*inputs), reference.rotate(*inputs))


@pytest.fixture
def stage(tmp_path, planted, monkeypatch):
    return Stage(tmp_path, planted, monkeypatch)


def test_loading_the_planted_library_creates_the_marker(stage):
    """Otherwise the tests below would prove nothing."""
    subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(stage.planted)!r})"], check=True)
    assert stage.marker.exists()


def give(*paths):
    """Give files and folders to another user."""
    for path in paths:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


def folder_of_another(stage):
    stage.plant()
    give(stage.folder, stage.library, _trusted_files.record_path(stage.library))


def folder_above_of_another(stage):
    stage.plant()
    give(stage.folder.parent)


def folder_for_all(stage):
    stage.plant()
    stage.folder.chmod(0o777)


def folder_for_all_with_sticky_bit(stage):
    stage.plant()
    stage.folder.chmod(0o1777)


def folder_for_a_group(stage):
    stage.plant()
    stage.folder.chmod(0o770)


def folder_above_for_all(stage):
    stage.plant()
    stage.folder.parent.chmod(0o777)


def link_of_another(stage):
    """Add a link that another user can create and swap, as in /tmp; its current target is safe."""
    stage.plant()
    stage.folder.rename(stage.folder.with_name("elsewhere"))
    stage.folder.symlink_to("elsewhere")
    give(stage.folder)


def link_through_a_folder_for_all(stage):
    stage.plant()
    open_to_all = stage.folder.parent / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    stage.folder.rename(open_to_all / "inside")
    stage.folder.symlink_to(open_to_all / "inside")


def link_to_a_sticky_folder(stage):
    stage.plant()
    for path in (stage.library, _trusted_files.record_path(stage.library)):
        path.rename(stage.folder.parent / path.name)
    stage.folder.rmdir()
    stage.folder.symlink_to(".")  # the last entry of the path is then the folder that holds the link
    stage.folder.parent.chmod(0o1777)


UNSAFE_FOLDERS = [
    pytest.param(folder_of_another, marks=as_root),
    pytest.param(folder_above_of_another, marks=as_root),
    folder_for_all,
    folder_for_all_with_sticky_bit,
    folder_for_a_group,
    folder_above_for_all,
    pytest.param(link_of_another, marks=as_root),
    link_through_a_folder_for_all,
    link_to_a_sticky_folder,
]


@posix
@pytest.mark.parametrize("variable", ["ADPTNET_CACHE", "XDG_CACHE_HOME", "HOME"])
@pytest.mark.parametrize("expose", UNSAFE_FOLDERS)
def test_no_library_is_loaded_from_a_folder_that_others_can_write(stage, expose, variable, monkeypatch):
    if variable == "XDG_CACHE_HOME":
        monkeypatch.delenv("ADPTNET_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(stage.folder.parent))
    elif variable == "HOME":
        stage.folder.parent.rename(stage.folder.parent.with_name(".cache"))
        stage.folder = stage.folder.parent.with_name(".cache") / "adptnet"
        stage.library = stage.folder / stage.library.name
        monkeypatch.delenv("ADPTNET_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(stage.folder.parent.parent))
    expose(stage)
    assert preferred_cache_folder() == stage.folder
    with pytest.warns(BackendWarning, match="Set ADPTNET_CACHE to a folder that only you can write to"):
        stage.check()
    path = _build.build("plane_rotation", "double").path
    assert path.parent == process_folder(os.getpid())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert str(stage.folder) in loaded_reason()
    with pytest.raises(BuildError, match="only you can write to"):
        _build.build_all()


def loaded_reason():
    return _build._loaded["plane_rotation", "double"].reason


def library_of_another(stage):
    stage.plant()
    give(stage.library)


def record_of_another(stage):
    stage.plant()
    give(_trusted_files.record_path(stage.library))


def library_for_all(stage):
    stage.plant()
    stage.library.chmod(0o777)


def record_for_a_group(stage):
    stage.plant()
    _trusted_files.record_path(stage.library).chmod(0o660)


def link_to_a_library_of_another(stage):
    stage.plant()
    stage.library.rename(stage.folder.parent / "planted")
    stage.library.symlink_to(stage.folder.parent / "planted")
    give(stage.folder.parent / "planted")


def link_to_a_library_in_a_folder_for_all(stage):
    open_to_all = stage.folder.parent / "open"
    open_to_all.mkdir()
    stage.plant(open_to_all / "planted")
    open_to_all.chmod(0o777)
    stage.library.unlink()
    stage.library.symlink_to(open_to_all / "planted")
    _trusted_files.record_path(open_to_all / "planted").rename(_trusted_files.record_path(stage.library))


def another_library(stage):
    content = _trusted_files.record_path(stage.library).read_text()
    stage.plant()
    _trusted_files.record_path(stage.library).write_text(content)


def another_checksum(stage):
    _trusted_files.record_path(stage.library).write_text("0" * 64 + "\n")


def no_checksum(stage):
    stage.plant()
    _trusted_files.record_path(stage.library).unlink()


def empty_checksum(stage):
    stage.plant()
    _trusted_files.record_path(stage.library).write_bytes(b"")


def checksum_that_is_not_text(stage):
    stage.plant()
    _trusted_files.record_path(stage.library).write_bytes(bytes(range(128, 256)))


def empty_library(stage):
    replace(stage.library, b"")


def truncated_library(stage):
    content = stage.library.read_bytes()
    replace(stage.library, content[: len(content) // 2])


def flipped_bits(stage):
    replace(stage.library, with_flipped_bits(stage.library.read_bytes(), 40))


def pipe(stage):
    stage.library.unlink()
    os.mkfifo(stage.library, 0o600)


def pipe_as_checksum(stage):
    _trusted_files.record_path(stage.library).unlink()
    os.mkfifo(_trusted_files.record_path(stage.library), 0o600)


def replace(path, content):
    path.unlink()  # writing into the same file would change a loaded library
    path.write_bytes(content)
    path.chmod(0o600)


def with_flipped_bits(content, count):
    changed = bytearray(content)
    for bit in random.sample(range(8 * len(changed)), count):
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


FAULTS = [
    pytest.param(library_of_another, marks=as_root),
    pytest.param(record_of_another, marks=as_root),
    pytest.param(link_to_a_library_of_another, marks=as_root),
    *(
        pytest.param(fault, marks=posix)
        for fault in (
            library_for_all,
            record_for_a_group,
            link_to_a_library_in_a_folder_for_all,
            pipe,
            pipe_as_checksum,
        )
    ),
    *(another_library, another_checksum, no_checksum, empty_checksum, checksum_that_is_not_text),
    *(empty_library, truncated_library, flipped_bits),
]


@pytest.mark.parametrize("spoil", FAULTS)
def test_a_library_that_differs_from_its_record_is_rebuilt(stage, spoil):
    spoil(stage)
    assert _trusted_files.find_recorded_fault(stage.library) is not None
    stage.check()
    assert loaded_reason().startswith(str(stage.library))
    assert _trusted_files.find_recorded_fault(stage.library) is None
    assert stage.library.read_bytes() == stage.good.read_bytes()
    assert sorted(path.name for path in stage.folder.iterdir()) == [stage.library.name, f"{stage.library.name}.sha256"]


@pytest.mark.parametrize("spoil", FAULTS)
def test_without_a_compiler_it_is_not_loaded_either(stage, spoil, monkeypatch):
    spoil(stage)
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    with pytest.warns(BackendWarning, match="compiled kernels are unavailable"):
        assert not cpu.has_kernel(torch.float64)
    assert not stage.marker.exists()
    assert f"No library of {stage.folder} is loaded" in loaded_reason()
    spoiled = _trusted_files.find_recorded_fault(stage.library)
    assert spoiled in loaded_reason()


def test_every_flipped_bit_changes_the_checksum(stage):
    content = stage.library.read_bytes()
    for _ in range(200):
        replace(stage.library, with_flipped_bits(content, 1))
        assert "SHA-256" in _trusted_files.find_recorded_fault(stage.library)


def test_a_library_with_an_expected_checksum_is_checked_in_the_same_way(stage):
    """Libraries shipped with the package are checked in this way, against checksums in the package."""
    expected = _trusted_files.record_path(stage.library).read_text()[:64]
    assert _trusted_files.find_fault(stage.library, expected) is None
    assert "SHA-256" in _trusted_files.find_fault(stage.library, "0" * 64)
    assert "cannot be" in _trusted_files.find_fault(stage.folder / "none.so", expected)
    if hasattr(os, "geteuid"):
        stage.library.chmod(0o722)
        assert "can be written by other users (mode 0722; run chmod go-w " in _trusted_files.find_fault(
            stage.library, expected
        )


@posix
def test_files_of_the_cache_are_private(stage):
    old = os.umask(0)
    try:
        folder = stage.folder / "deep" / "deeper"
        os.environ["ADPTNET_CACHE"] = str(folder)  # put back by the fixture
        path = _build.build("plane_rotation", "double").path
    finally:
        os.umask(old)
    modes = [
        stat.S_IMODE(one.stat().st_mode) for one in (folder.parent, folder, path, _trusted_files.record_path(path))
    ]
    assert modes == [0o700, 0o700, 0o700, 0o600]


@posix
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_parent_folders_may_be_readable_or_sticky(stage, mode):
    stage.folder.parent.chmod(mode)
    assert _trusted_files.find_exposure(stage.folder) is None
    assert _trusted_files.find_exposure(stage.folder / ".." / "adptnet") is None
    if mode == 0o1777:
        assert "can be written" in _trusted_files.find_exposure(stage.folder / "..")


@posix
def test_a_path_is_checked_even_if_the_current_folder_was_deleted(stage, monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    stage.check()
    _build._loaded.clear()
    monkeypatch.setenv("ADPTNET_CACHE", "relative")
    with pytest.warns(BackendWarning, match="the library of plane_rotation cannot be loaded"):
        assert not cpu.has_kernel(torch.float64)


def test_circular_links_are_detected(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    if hasattr(os, "geteuid"):
        assert "more than 40 symbolic links" in _trusted_files.find_exposure(tmp_path / "a" / "x")


@as_root
def test_a_user_trusts_their_own_files_and_those_of_root(stage, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    for owner, trusted in {0: True, OTHER: True, OTHER - 1: False}.items():
        os.chown(stage.library, owner, owner)
        fault = _trusted_files.find_recorded_fault(stage.library)
        assert (fault is None) == trusted
        assert trusted or f"belongs to another user (uid {owner})" in fault


def write_program(path, command):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


@posix
def test_no_compiler_is_taken_from_the_current_folder_or_one_that_others_can_write(tmp_path, monkeypatch):
    for name in ("here", "open", "other"):
        write_program(tmp_path / name / "g++", "exit 1")
    write_program(tmp_path / "mine" / "clang++", "exit 1")
    (tmp_path / "open").chmod(0o777)
    monkeypatch.chdir(tmp_path / "here")
    entries = ["", ".", "../here", str(tmp_path / "open")]
    if os.geteuid() == 0:
        give(tmp_path / "other" / "g++")
        entries.append(str(tmp_path / "other"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join(entries))
    assert _build.find_compiler() is None
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match=r"is not used: .* set CXX to its absolute path"):
        _build.build("plane_rotation", "double")
    monkeypatch.setenv("PATH", os.pathsep.join([*entries, str(tmp_path / "mine")]))
    assert _build.find_compiler() == [str(tmp_path / "mine" / "clang++")]


@posix
def test_cxx_names_the_compiler(tmp_path, monkeypatch, caplog):
    for name in ("named", "g++"):
        write_program(tmp_path / "mine" / name, "exit 1")
    monkeypatch.setattr(_build, "_warned", set())
    monkeypatch.setenv("PATH", str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path / "mine")
    for chosen, found in {
        "named": ["named"],
        "named -m64": ["named", "-m64"],
        f"{tmp_path / 'mine' / 'named'} -x": ["named", "-x"],
        "": ["g++"],
    }.items():
        monkeypatch.setenv("CXX", chosen)
        assert _build.find_compiler() == [str(tmp_path / "mine" / found[0]), *found[1:]]
    assert not caplog.records
    for chosen in ("./named", "absent", "/absent/g++", "'named"):
        monkeypatch.setenv("CXX", chosen)
        assert _build.find_compiler() == [str(tmp_path / "mine" / "g++")]
        assert f"CXX={chosen} is not used" in caplog.records[-1].getMessage()


@posix
def test_the_compiler_takes_nothing_from_the_current_folder_or_its_environment(tmp_path, monkeypatch):
    """Headers that do not compile, and an assembler that creates a marker, lie where the compiler would search."""
    poisoned, marker = tmp_path / "poisoned", tmp_path / "run"
    write_program(poisoned / "as", f'touch "{marker}"; exit 1')
    for header in ("cmath", "cstdint", "thread", "vector", "simd.h", "algorithm"):
        (poisoned / header).write_text("#error poisoned\n")
    poisoned.chmod(0o777)
    monkeypatch.chdir(poisoned)
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"):
        monkeypatch.setenv(variable, f":{poisoned}")
    for variable in ("COMPILER_PATH", "GCC_EXEC_PREFIX"):
        monkeypatch.setenv(variable, f"{poisoned}/")
    monkeypatch.setenv("TMPDIR", str(poisoned))
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(poisoned), os.environ["PATH"]]))
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    _build._compiler_version.cache_clear()
    before = set(poisoned.iterdir())
    path = _build.build("plane_rotation", "double").path
    assert ctypes.CDLL(str(path)).plane_rotation_layout() > 0
    assert not marker.exists()
    assert set(poisoned.iterdir()) == before


def test_a_compiler_without_output_is_reported(stage, monkeypatch, tmp_path):
    write_program(tmp_path / "idle", "exit 0")
    monkeypatch.setenv("CXX", str(tmp_path / "idle"))
    with pytest.raises(BuildError, match="failed"):
        _build.build("plane_rotation", "double")


@posix
def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(stage, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", "/proc/adptnet"):
        monkeypatch.setenv("ADPTNET_CACHE", str(folder))
        built = _build.build("plane_rotation", "double")
        assert built.path.parent == process_folder(os.getpid())
        assert "Set ADPTNET_CACHE" in built.warning


@posix
def test_a_temporary_folder_is_removed_with_its_process(stage, tmp_path):
    (tmp_path / "temporary").mkdir()
    stage.folder.chmod(0o777)
    code = "from adptnet.ops import _build; print(_build.build('plane_rotation', 'double').path)"
    path = run_python(code, TMPDIR=str(tmp_path / "temporary"))[0]
    assert path.startswith(str(tmp_path / "temporary"))
    assert not list((tmp_path / "temporary").iterdir())


@posix
def test_without_any_private_folder_the_reference_runs(stage, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    for folder in (stage.folder, tmp_path / "temporary"):
        folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    process_folder.cache_clear()
    with pytest.warns(BackendWarning, match=r"compiled kernels are unavailable.*Set ADPTNET_CACHE"):
        assert not cpu.has_kernel(torch.float64)
    process_folder.cache_clear()
