"""The kernels of a wheel for one platform: which library is chosen, what is rejected, and how the wheel is written."""

import base64
import csv
import ctypes
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import adptnet
from adptnet.errors import BackendWarning
from adptnet.ops import _build, _prebuilt, _sources
from adptnet.ops.adpt_scan import Factors
from support.kernels import VARIANTS, make_problem, needs_compiler

OPERATION, SCALAR = "plane_rotation", "double"
SETS = ["avx512", "avx2", "baseline"]


class Wheel:
    """A folder `prebuilt` as in a wheel, with the library of one operation under several names."""

    def __init__(self, folder: Path, library: Path):
        self.folder = folder
        folder.mkdir(mode=0o700)
        for name in [*SETS, "neon"]:
            shutil.copy(library, self.path(name))
        libraries = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        self.manifest = {
            "platform": _prebuilt.current_platform(),
            "compiler": "a compiler",
            "sources": {OPERATION: _sources.hash_sources(OPERATION)},
            "libraries": libraries,
        }
        self.write()

    def path(self, name: str) -> Path:
        return self.folder / f"{OPERATION}-{SCALAR}-{name}{_prebuilt.library_suffix()}"

    def write(self, **changes):
        (self.folder / "manifest.json").write_text(json.dumps({**self.manifest, **changes}))
        _prebuilt._read_manifest.cache_clear()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    folder = tmp_path / "prebuilt"
    made = Wheel(folder, _build.build(OPERATION, SCALAR).path)
    (tmp_path / "module.py").write_text("")
    monkeypatch.setattr(_prebuilt, "FOLDER", folder)
    monkeypatch.setattr(_prebuilt, "__file__", str(tmp_path / "module.py"))  # of a package that only its user can write
    monkeypatch.setattr(_build, "_loaded", {})
    monkeypatch.setattr(_build, "_warned", set())
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    made.write(platform=_prebuilt.current_platform())
    yield made
    _prebuilt._read_manifest.cache_clear()


def use_processor(monkeypatch, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


def load():
    kernel = _build.load_kernel(OPERATION, SCALAR)
    assert kernel.library is not None
    return kernel


@needs_compiler
@pytest.mark.parametrize(
    ("capability", "name"), [("AVX512", "avx512"), ("AVX2", "avx2"), ("DEFAULT", "baseline"), ("unknown", "baseline")]
)
def test_the_best_instruction_set_of_the_processor_is_chosen(wheel, monkeypatch, capability, name):
    use_processor(monkeypatch, capability)
    kernel = load()
    assert kernel.library._name == str(wheel.path(name))
    assert kernel.reason == f"prebuilt, {name}, a compiler"


@needs_compiler
def test_without_the_best_one_the_next_is_chosen_and_never_a_better_one(wheel, monkeypatch):
    for capability, left, chosen in [
        ("AVX512", ["avx2", "baseline"], "avx2"),
        ("AVX512", ["baseline"], "baseline"),
        ("AVX2", ["avx512", "baseline"], "baseline"),
        ("DEFAULT", ["avx512", "avx2"], None),
    ]:
        wheel.write(
            libraries={wheel.path(name).name: wheel.manifest["libraries"][wheel.path(name).name] for name in left}
        )
        use_processor(monkeypatch, capability)
        found = _prebuilt.find_prebuilt(OPERATION, SCALAR)
        assert found.path == (chosen and wheel.path(chosen))
    assert "no kernel of plane_rotation for this processor" in found.description


@needs_compiler
@pytest.mark.parametrize("machine", ["aarch64", "arm64", "ARM64"])
def test_arm_processors_get_neon(wheel, monkeypatch, machine):
    monkeypatch.setattr("platform.machine", lambda: machine)
    wheel.write(platform=_prebuilt.current_platform())
    assert _prebuilt.find_prebuilt(OPERATION, SCALAR).path == wheel.path("neon")


FAULTS = {
    "changed library": (lambda wheel: wheel.path("avx2").write_bytes(b"changed"), "has the SHA-256"),
    "missing library": (lambda wheel: wheel.path("avx2").unlink(), "cannot be examined"),
    "link to a device": (
        lambda wheel: (wheel.path("avx2").unlink(), wheel.path("avx2").symlink_to("/dev/null")),
        "/dev/null|not a regular file",
    ),
    "library that others can write": (lambda wheel: wheel.path("avx2").chmod(0o666), "can be written by other users"),
    "folder that others can write": (lambda wheel: wheel.folder.chmod(0o777), "can be written by other users"),
    "other platform": (lambda wheel: wheel.write(platform="win32-amd64"), "are for win32-amd64, and this is"),
    "other sources": (lambda wheel: wheel.write(sources={OPERATION: "0" * 64}), "other sources of plane_rotation"),
    "manifest without a key": (lambda wheel: wheel.write(sources={}), "is damaged"),
    "manifest of the wrong type": (lambda wheel: wheel.write(libraries=3), "is damaged"),
    "manifest that is no JSON": (
        lambda wheel: ((wheel.folder / "manifest.json").write_bytes(b"{\xff"), _prebuilt._read_manifest.cache_clear()),
        "cannot be read",
    ),
}


@needs_compiler
@pytest.mark.skipif(os.name == "nt", reason="owners and modes")
@pytest.mark.parametrize("name", FAULTS)
def test_a_library_that_must_not_be_loaded_is_compiled_instead_and_the_fault_logged_once(
    wheel, monkeypatch, caplog, name
):
    use_processor(monkeypatch, "AVX2")
    change, message = FAULTS[name]
    change(wheel)
    with caplog.at_level(logging.WARNING, logger="adptnet"):
        kernel = load()
        _build._loaded.clear()
        load()
    assert Path(kernel.library._name).parent != wheel.folder
    assert "prebuilt" not in kernel.reason
    assert len(caplog.messages) == 1
    assert re.search(message, caplog.messages[0])


@needs_compiler
def test_a_library_that_the_system_rejects_is_compiled_instead(wheel, monkeypatch, caplog):
    use_processor(monkeypatch, "AVX2")
    wheel.path("avx2").write_bytes(b"not a library")
    name, sha256 = wheel.path("avx2").name, hashlib.sha256(b"not a library").hexdigest()
    wheel.write(libraries={name: sha256})
    assert Path(load().library._name).parent != wheel.folder
    assert "cannot be loaded" in caplog.text


@needs_compiler
@pytest.mark.skipif(os.name == "nt", reason="owners and modes")
def test_modes_do_not_matter_where_the_python_files_are_as_exposed(wheel, monkeypatch):
    """In an environment that a group can write, who can replace the library can also replace this package."""
    use_processor(monkeypatch, "AVX2")
    wheel.path("avx2").chmod(0o664)
    Path(_prebuilt.__file__).chmod(0o664)
    assert _prebuilt.find_prebuilt(OPERATION, SCALAR).path == wheel.path("avx2")
    wheel.path("avx2").write_bytes(b"changed")
    assert "has the SHA-256" in _prebuilt.find_prebuilt(OPERATION, SCALAR).description


@needs_compiler
def test_a_prebuilt_kernel_needs_no_compiler_and_gives_the_results_of_the_compiled_one(wheel, monkeypatch, tmp_path):
    from adptnet.ops.plane_rotation import cpu

    inputs = [torch.randn(3, 5, dtype=torch.float64) for _ in range(3)]
    inputs += [torch.randn(3, 1, dtype=torch.float64) for _ in range(3)]
    monkeypatch.setenv("ADPTNET_BACKEND", "compile")
    expected = cpu.forward(*inputs)
    assert _build.load_kernel(OPERATION, SCALAR).reason.startswith(str(_build.build(OPERATION, SCALAR).path))
    monkeypatch.delenv("ADPTNET_BACKEND")
    _build._loaded.clear()
    use_processor(monkeypatch, "AVX2")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    assert torch.equal(cpu.forward(*inputs), expected)
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_backends_says_prebuilt_and_a_damaged_wheel_without_a_compiler_runs_the_reference(wheel, monkeypatch, tmp_path):
    library = wheel.path("avx2").with_name(wheel.path("avx2").name.replace("double", "float"))
    shutil.copy(_build.build(OPERATION, "float").path, library)
    wheel.manifest["libraries"][library.name] = hashlib.sha256(library.read_bytes()).hexdigest()
    wheel.write()
    use_processor(monkeypatch, "AVX2")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    shown = adptnet.backends()
    assert shown[OPERATION] == "cpu: prebuilt, avx2, a compiler"
    assert shown["linear_scan"].startswith("reference: there is no C++ compiler")
    library.write_bytes(b"changed")
    _build._loaded.clear()
    _build._warned.clear()
    with pytest.warns(BackendWarning, match="no C\\+\\+ compiler"):
        assert _build.load(OPERATION, "float") is None


def test_a_pure_wheel_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(_prebuilt, "FOLDER", tmp_path / "prebuilt")
    assert _prebuilt.find_prebuilt(OPERATION, SCALAR) == (None, "")


@pytest.mark.parametrize("operation", _sources.OPERATIONS)
def test_every_function_that_python_calls_is_exported(operation):
    """Libraries of a wheel hide all other symbols, and on Windows every library does."""
    public = _sources.find_source(operation).read_text().partition('extern "C" {')[2]
    functions = re.findall(r"^(.*?)\b(\w+)\([^()]*\) \{", public, re.MULTILINE)
    assert functions
    assert all(kind.startswith("EXPORT ") for kind, _ in functions), functions
    python = Path(_sources.SOURCES, operation, "cpu.py").read_text()
    assert set(re.findall(rf"\b{operation}_\w+", python)) - {operation} <= {name for _, name in functions}


def load_wheel_builder():
    path = Path(__file__).parents[3] / ".ci" / "wheels.py"
    description = importlib.util.spec_from_file_location("wheels", path)
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


def test_a_wheel_for_a_platform_has_the_files_of_the_pure_one_its_tags_and_a_record(tmp_path, monkeypatch):
    wheels = load_wheel_builder()
    pure = tmp_path / "adptnet-1.0-py3-none-any.whl"
    about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(pure, "w") as archive:
        archive.writestr("adptnet/__init__.py", "x = 1\n")
        archive.writestr("adptnet-1.0.dist-info/WHEEL", about)
        archive.writestr("adptnet-1.0.dist-info/RECORD", "stale")
    target = wheels.TARGETS[0]

    exported = [_sources.find_source(operation).read_bytes() for operation in _sources.OPERATIONS]

    def pretend(command, check):
        Path(command[command.index("-o") + 1]).write_bytes(" ".join(command[1:]).encode() + b"".join(exported))

    monkeypatch.setattr(wheels.subprocess, "run", pretend)
    wheel = wheels.build_wheel(target, pure, tmp_path, ["zig", "c++"])
    assert wheel.name == "adptnet-1.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files["adptnet/__init__.py"] == b"x = 1\n"
    lines = files["adptnet-1.0.dist-info/WHEEL"].decode().splitlines()
    assert lines[1:] == ["Root-Is-Purelib: false", *(f"Tag: py3-none-{tag}" for tag in target.tags)]
    record = {
        name: sha256 for name, sha256, _ in csv.reader(files["adptnet-1.0.dist-info/RECORD"].decode().splitlines())
    }
    assert record.keys() == files.keys()
    assert record.pop("adptnet-1.0.dist-info/RECORD") == ""
    for name, sha256 in record.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert sha256 == f"sha256={digest}"
    manifest = json.loads(files["adptnet/ops/prebuilt/manifest.json"])
    assert len(manifest["libraries"]) == len(_sources.OPERATIONS) * len(_sources.SCALAR_TYPES) * len(SETS)
    for name, sha256 in manifest["libraries"].items():
        assert hashlib.sha256(files[f"adptnet/ops/prebuilt/{name}"]).hexdigest() == sha256
    exported.clear()
    with pytest.raises(AssertionError, match="does not export"):
        wheels.build_wheel(target, pure, tmp_path, ["zig", "c++"])


@pytest.mark.skipif(not _prebuilt.FOLDER.is_dir(), reason="only in an installed wheel for one platform")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_libraries_for_avx2_and_avx512_give_the_same_bits(monkeypatch, dtype):
    """Both use registers of 32 bytes, so the order of every sum is the same."""
    from adptnet.ops.adpt_scan import cpu

    if _prebuilt.supported_instruction_sets()[0] != "avx512":
        pytest.skip("needs a processor with AVX-512")
    scalar = {torch.float32: "float", torch.float64: "double"}[dtype]
    for variant in VARIANTS.values():
        drive, state, constants, form = make_problem(7, 33, 12, dtype=dtype, **variant)
        inputs = (drive, state, *constants, None, None, *Factors())
        outcomes = []
        for name in ("avx2", "avx512"):
            library = ctypes.CDLL(str(_prebuilt.FOLDER / f"adpt_scan-{scalar}-{name}{_prebuilt.library_suffix()}"))
            monkeypatch.setitem(_build._loaded, ("adpt_scan", scalar), _build.Kernel(library, ""))
            monkeypatch.setattr(cpu, "_plans", {})  # they hold the library
            plan = cpu.make_plan(inputs, form)
            results = cpu.forward(plan, inputs, True)
            needed = [True] * len(inputs)
            outcomes.append([results[0], *cpu.backward(plan, results[0].clone(), inputs, *results, needed=needed)])
        for one, other in zip(*outcomes, strict=True):
            assert one is other is None or torch.equal(one, other)
