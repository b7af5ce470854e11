"""Kernels in C++: built at first use with whatever compiler there is, kept in a cache, loaded through ctypes.

The source is package data and needs neither torch nor Python headers. Nothing is compiled by an import. Where no
compiler is found, or ADPTNET_BACKEND=reference is set, the torch programs that define each operation run instead.

A library is code that this process runs, so it is loaded only if no other user could have put it there and its bytes
have the SHA-256 that was recorded when it was built (`trust`).
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import BackendWarning, BuildError, IncompatibleError
from . import _trusted_files

__all__ = ["Built", "Kernel", "backends", "build", "build_all", "cache", "find_compiler", "load", "notice", "wanted"]

# No -ffast-math: GCC would link code that flushes denormal numbers to zero in the whole process.
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=fast", "-fopenmp-simd", "-falign-loops=64"]
OPERATIONS = ["adpt_scan", "adpt_step", "linear_scan", "matrix_chain", "plane_rotation"]
NUMBERS = ["float", "double"]
# Variables that would make a compiler take headers, libraries or programs from elsewhere; an empty entry in most of
# them stands for the current folder. The kernels need nothing but the compiler's own.
IGNORED = ["CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH", "COMPILER_PATH"]
IGNORED += ["GCC_EXEC_PREFIX", "CCC_OVERRIDE_OPTIONS"]
REMEDY = "Set ADPTNET_CACHE to a folder that only you can write to."

_SWITCH = os.environ.encodekey("ADPTNET_BACKEND")  # as it is kept in os.environ
_log = logging.getLogger("adptnet")
_lock = threading.Lock()
_loaded: dict[tuple[str, str], "Kernel"] = {}
_said: set[str] = set()


def _fresh_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_lock)  # another thread may have held it


class Kernel(NamedTuple):
    """A library, or why there is none."""

    library: ctypes.CDLL | None
    why: str
    warning: str = ""  # what the user should know, once


class Built(NamedTuple):
    """A library that may be loaded."""

    path: Path
    how: str
    warning: str = ""  # why it is not in the cache folder


def wanted() -> bool:
    """Whether kernels may be used: ADPTNET_BACKEND is not `reference`."""
    # Not set: without the error that os.environ itself would raise and catch, in every call of an operation.
    if _SWITCH not in getattr(os.environ, "_data", {_SWITCH}):
        return True
    chosen = os.environ.get("ADPTNET_BACKEND", "auto")
    if chosen not in ("auto", "cpu", "reference"):
        raise IncompatibleError(f"ADPTNET_BACKEND={chosen}: must be auto, cpu or reference.")
    return chosen != "reference"


def load(operation: str, number: str = "float") -> ctypes.CDLL | None:
    """The library of an operation for `float` or `double`, built if need be; None, said once, if there can be none."""
    kernel = _loaded.get((operation, number))
    if kernel is None:
        with _lock:
            kernel = _loaded.get((operation, number)) or _load(operation, number)
            _loaded[operation, number] = kernel
        if kernel.warning and kernel.warning not in _said:
            _said.add(kernel.warning)
            warnings.warn(kernel.warning, BackendWarning, stacklevel=2)
    return kernel.library


def backends() -> dict[str, str]:
    """Return what executes each operation here, and why; `gpu` is for tensors on a GPU."""
    from . import _gpu

    if not wanted():
        return dict.fromkeys([*OPERATIONS, "gpu"], "reference: ADPTNET_BACKEND=reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendWarning)
        found = {name: (load(name), _loaded[name, "float"].why) for name in OPERATIONS}
    here = {name: f"{'cpu' if library else 'reference'}: {why}" for name, (library, why) in found.items()}
    return {**here, "gpu": _gpu.describe()}


def notice(reason: str) -> None:
    """Says once why an operation runs as its reference; in a program that is being compiled, nothing."""
    if not torch.compiler.is_compiling() and reason not in _said:
        _said.add(reason)
        _log.warning("adptnet runs the slow reference loop here: %s", reason)


def _load(operation: str, number: str) -> Kernel:
    try:
        built = build(operation, number)
        try:
            return Kernel(ctypes.CDLL(str(built.path)), built.how, built.warning)
        except OSError:  # built for another machine that shares the folder
            built.path.unlink(missing_ok=True)
        built = build(operation, number)
        return Kernel(ctypes.CDLL(str(built.path)), built.how, built.warning)
    except BuildError as error:
        why = str(error)
    except OSError as error:
        why = f"the library of {operation} cannot be loaded: {error}."
    return Kernel(
        None,
        why,
        f"adptnet's compiled kernels are unavailable; falling back to the much slower PyTorch reference: {why} "
        "Set ADPTNET_BACKEND=reference to silence this warning.",
    )


def build(operation: str, number: str) -> Built:
    """Return the library of an operation for `float` or `double`, compiled unless an intact one is in the cache folder.

    Where the cache folder cannot be written, or another user could, the library goes into a temporary folder of this
    process.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    source = Path(__file__).parent / operation / "kernel.cpp"
    sources = sorted(source.parent.parent.rglob("*.h"))  # what kernels share
    flags = [*FLAGS, f"-DNUMBER={number}", *instruction_set()]
    text = b"".join(path.read_bytes() for path in [*sources, source])
    key = hashlib.sha256(text + repr(flags).encode()).hexdigest()[:16]
    folder = _usual_folder()
    obstacle = _find_obstacle(folder)
    compiler = find_compiler()
    if compiler is None:
        kept = [] if obstacle else sorted(folder.glob(f"{operation}-{number}-{key}-*{_suffix()}"))
        for path in reversed(kept):
            obstacle = _trusted_files.find_recorded_fault(path)
            if obstacle is None:
                return Built(path, f"{path}, built earlier")
        unused = f" No library of {folder} is loaded: {obstacle}." if obstacle else ""
        raise BuildError(f"there is no C++ compiler. {_install()}{_explain_skipped()}{unused}")
    version = _version(tuple(compiler))
    name = f"{operation}-{number}-{key}-{hashlib.sha256(version.encode()).hexdigest()[:8]}{_suffix()}"
    how = f"{version.splitlines()[0] if version else compiler[0]}, {' '.join(instruction_set()) or 'baseline'}"
    if obstacle is None:
        try:
            _provide(folder / name, compiler, flags, source)
            return Built(folder / name, f"{folder / name}, {how}")
        except OSError as error:
            obstacle = f"{folder} cannot be written ({error.strerror})"
    path = _build_apart(name, compiler, flags, source, obstacle)
    warning = f"adptnet compiles its kernels anew in each process, because {obstacle}. {REMEDY}"
    return Built(path, f"{path}, {how}, not in {folder}: {obstacle}", warning)


def _build_apart(name: str, compiler: list[str], flags: list[str], source: Path, obstacle: str) -> Path:
    """Return the library in a temporary folder of this process, since there is an obstacle to the cache folder."""
    try:
        path = _own_folder(os.getpid()) / name
        exposure = _trusted_files.find_exposure(path.parent)
        if exposure is not None:
            raise BuildError(f"{obstacle}, and {exposure}. {REMEDY}")
        _provide(path, compiler, flags, source)
    except OSError as error:
        raise BuildError(f"{obstacle}, and no temporary folder can be used ({error.strerror}). {REMEDY}") from None
    return path


def build_all() -> list[Path]:
    """Build every library, for use without a compiler later, and return their paths.

    Raises:
        BuildError: There is no compiler, it fails, or the cache folder cannot be used.
    """
    every = [build(operation, number) for operation in OPERATIONS for number in NUMBERS]
    for built in every:
        if built.warning:
            raise BuildError(built.warning)
    return [built.path for built in every]


def _find_obstacle(folder: Path) -> str | None:
    """Return why no library is loaded from `folder`, which is made if it is missing; None if they are."""
    try:
        _trusted_files.make_private_folder(folder)
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return _trusted_files.find_exposure(folder)


def _provide(path: Path, compiler: list[str], flags: list[str], source: Path) -> None:
    """Compile the library at `path` unless it is there and intact. An `OSError` is one of writing to its folder."""
    fault = _trusted_files.find_recorded_fault(path)
    if fault is None:
        return
    if path.exists():
        _log.warning("adptnet builds a library again: %s.", fault)
    # In a folder of its own, then renamed, which is atomic: whoever comes second finds a whole file or none. One that
    # finds the library of one build and the record of another builds again.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent, ignore_cleanup_errors=True) as folder:
        draft = Path(folder) / path.name
        _compile(compiler, flags, source, draft)
        draft.chmod(0o700)
        record = _trusted_files.write_record(draft)
        os.replace(draft, path)
        os.replace(record, _trusted_files.record_of(path))


def _compile(compiler: list[str], flags: list[str], source: Path, draft: Path) -> None:
    """Run the compiler in the folder of `draft`, where it finds no files and leaves its temporary ones."""
    command = [*compiler, *flags, "-o", str(draft), str(source)]
    environment = _environment(compiler) | dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(draft.parent))
    try:
        made = subprocess.run(
            command,
            cwd=draft.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"{compiler[0]} could not be run: {error}. {_install()}") from None
    if made.returncode != 0 or not draft.is_file():
        raise BuildError(f"{shlex.join(command)} failed:\n{made.stderr.strip()[-2000:]}\n{_install()}")


def _environment(compiler: list[str]) -> dict[str, str]:
    """Return the environment of the compiler, which must not look for files where others could have put them."""
    kept = {name: value for name, value in os.environ.items() if name not in IGNORED}
    return {**kept, "PATH": os.pathsep.join([*_trusted_files.search_path(), os.path.dirname(compiler[0])])}


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler; None if there is none that may be run.

    It is CXX, an absolute path or a name, with arguments if need be; else g++, clang++ or c++. A name is looked for in
    the folders of PATH that only this user and root can change, never in the current folder.
    """
    chosen = os.environ.get("CXX", "")
    try:
        named, *arguments = shlex.split(chosen) or [""]
    except ValueError:  # a quotation without an end
        named, arguments = chosen, []
    if os.path.isabs(named) and os.path.isfile(named) and os.access(named, os.X_OK):
        return [named, *arguments]
    for name in (named, "g++", "clang++", "c++"):
        found = _trusted_files.find_program(name) if name and not os.path.dirname(name) else None
        if found is not None:
            return [found, *arguments] if name == named else [found]
        if name and name == named and chosen not in _said:
            _said.add(chosen)
            _log.warning("CXX=%s is not used: give an absolute path, or a name that is found on the PATH.", chosen)
    return None


def _explain_skipped() -> str:
    """Return a sentence on the compiler that a shell would have found and `find_compiler` does not take."""
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if found is None:
        return ""
    why = (
        _trusted_files.find_exposure(Path(found))
        if os.path.isabs(found)
        else "its folder in PATH is not an absolute path"
    )
    return f" {found} is not used: {why}. If you trust it, set CXX to its absolute path."


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        command, environment = [*compiler, "--version"], _environment([*compiler])
        return subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace").stdout
    except OSError:  # which the attempt to compile reports
        return ""


@functools.cache
def instruction_set() -> list[str]:
    """Compiler flags for this processor: x86-64-v3 where it has it, otherwise what every one of its kind has."""
    return ["-mavx2", "-mfma"] if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []


def cache() -> Path:
    """Return the folder of what is kept between runs; ADPTNET_CACHE chooses another."""
    folder = _usual_folder()
    with contextlib.suppress(OSError):
        _trusted_files.make_private_folder(folder)
    return folder if os.environ.get("ADPTNET_CACHE") or os.access(folder, os.W_OK) else _data_folder()


def _usual_folder() -> Path:
    """Return ADPTNET_CACHE, or `adptnet` in the user's folder for caches, as an absolute path."""
    chosen = os.environ.get("ADPTNET_CACHE")
    if chosen:
        return Path(chosen).absolute()
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home
        home = _own_folder(os.getpid())
    usual = {"darwin": home / "Library" / "Caches", "win32": home / "AppData" / "Local"}.get(
        sys.platform, home / ".cache"
    )
    return Path(os.environ.get("XDG_CACHE_HOME") or usual).absolute() / "adptnet"


@functools.cache
def _data_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="adptnet-"))


@functools.cache
def _own_folder(process: int) -> Path:
    """Return a temporary folder for the libraries of this process, which is removed at its end."""
    folder = tempfile.mkdtemp(prefix="adptnet-")

    def remove() -> None:
        if os.getpid() == process:  # not in a child that was forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def _suffix() -> str:
    return ".dll" if sys.platform == "win32" else ".so"


def _install() -> str:
    how = {"darwin": "xcode-select --install", "win32": "install LLVM and put clang++ on the PATH"}.get(
        sys.platform, "apt install g++, dnf install gcc-c++ or conda install gxx"
    )
    return f"Install one ({how}), or name it in CXX."
