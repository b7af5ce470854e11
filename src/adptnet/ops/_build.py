"""Load the C++ kernels: those of the wheel, or else compiled and cached.

A wheel for one platform contains the kernels (`_prebuilt`). Otherwise they are compiled at first use with the compiler
of the machine, cached, and loaded through ctypes. The sources are package data and need neither torch nor Python
headers. An import compiles nothing. Without a compiler, or with ADPTNET_BACKEND=reference, the PyTorch reference of
each operation runs instead.

A library is code that this process executes. It is loaded only if no other user could have written it and its bytes
have the SHA-256 that was recorded when it was built (`_trusted_files`).
"""

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

from .._io.cache import make_private_folder, preferred_cache_folder, process_folder
from ..errors import BackendWarning, BuildError, IncompatibleError
from . import _prebuilt, _trusted_files
from ._prebuilt import library_suffix
from ._sources import LINK_FLAGS, OPERATIONS, SCALAR_TYPES, compile_flags, find_source, read_sources

__all__ = [
    "OPERATIONS",
    "SCALAR_TYPES",
    "BuiltLibrary",
    "Kernel",
    "build",
    "build_all",
    "find_compiler",
    "instruction_set",
    "kernels_enabled",
    "load",
    "load_kernel",
]

# -fPIC is an error for clang on Windows. There, libraries of the compiler would not be found next to the kernel.
PLATFORM_FLAGS = [*LINK_FLAGS, "-static" if sys.platform == "win32" else "-fPIC"]
# Environment variables that make a compiler search for headers, libraries or programs elsewhere; an empty entry in most
# of them means the current folder. The kernels need only the compiler's own.
IGNORED_VARIABLES = ["CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH", "COMPILER_PATH"]
IGNORED_VARIABLES += ["GCC_EXEC_PREFIX", "CCC_OVERRIDE_OPTIONS"]
_REMEDY = "Set ADPTNET_CACHE to a folder that only you can write to."

_BACKEND_KEY = os.environ.encodekey("ADPTNET_BACKEND")  # in the encoding of os.environ's own dictionary
_log = logging.getLogger("adptnet")
_lock = threading.Lock()
_loaded: dict[tuple[str, str], "Kernel"] = {}
_warned: set[str] = set()  # warnings, each of which is given once


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it


class Kernel(NamedTuple):
    """The library of an operation; None if there is none, with the reason."""

    library: ctypes.CDLL | None
    reason: str  # how the library was built, or why there is none
    warning: str = ""  # a warning for the user, given once


class BuiltLibrary(NamedTuple):
    """A library that may be loaded."""

    path: Path
    description: str  # the path and the compiler
    warning: str = ""  # why it is not in the cache folder


def kernels_enabled() -> bool:
    """Return whether kernels may be used: ADPTNET_BACKEND is not `reference`.

    Raises:
        IncompatibleError: ADPTNET_BACKEND has another value than auto, cpu, compile or reference.
    """
    # Fast path of every call of an operation: looking up an unset variable in os.environ raises and catches KeyErrors.
    if _BACKEND_KEY not in getattr(os.environ, "_data", {_BACKEND_KEY}):
        return True
    chosen = os.environ.get("ADPTNET_BACKEND", "auto")
    if chosen not in ("auto", "cpu", "compile", "reference"):
        raise IncompatibleError(f"ADPTNET_BACKEND={chosen}: must be auto, cpu, compile or reference.")
    return chosen != "reference"


def load(operation: str, scalar: str = "float") -> ctypes.CDLL | None:
    """Return the library of an operation, compiled if necessary; None, with a warning once, if that is impossible.

    Args:
        operation: One of `OPERATIONS`.
        scalar: One of `SCALAR_TYPES`.
    """
    return load_kernel(operation, scalar).library


def load_kernel(operation: str, scalar: str = "float") -> Kernel:
    """Return the library of an operation as `load` does, with the reason.

    Args:
        operation: One of `OPERATIONS`.
        scalar: One of `SCALAR_TYPES`.
    """
    kernel = _loaded.get((operation, scalar))
    if kernel is None:
        with _lock:
            kernel = _loaded.get((operation, scalar)) or _load(operation, scalar)
            _loaded[operation, scalar] = kernel
        if kernel.warning and kernel.warning not in _warned:
            _warned.add(kernel.warning)
            warnings.warn(kernel.warning, BackendWarning, stacklevel=3)
    return kernel


def _load(operation: str, scalar: str) -> Kernel:
    prebuilt = _load_prebuilt(operation, scalar)
    if prebuilt is not None:
        return prebuilt
    try:
        built = build(operation, scalar)
        try:
            return Kernel(ctypes.CDLL(str(built.path)), built.description, built.warning)
        except OSError:  # built for another machine that shares the folder
            built.path.unlink(missing_ok=True)
        built = build(operation, scalar)
        return Kernel(ctypes.CDLL(str(built.path)), built.description, built.warning)
    except BuildError as error:
        reason = str(error)
    except OSError as error:
        reason = f"the library of {operation} cannot be loaded: {error}."
    return Kernel(
        None,
        reason,
        f"adptnet's compiled kernels are unavailable; falling back to the much slower PyTorch reference: {reason} "
        "Set ADPTNET_BACKEND=reference to silence this warning.",
    )


def _load_prebuilt(operation: str, scalar: str) -> Kernel | None:
    """Return the kernel of the wheel; None, with a logged reason unless the wheel is pure, if it must be compiled."""
    if os.environ.get("ADPTNET_BACKEND") == "compile":
        return None
    path, description = _prebuilt.find_prebuilt(operation, scalar)
    if path is not None:
        try:
            return Kernel(ctypes.CDLL(str(path)), description)
        except OSError as error:  # such as a system with another C library
            description = f"{path} cannot be loaded ({error})"
    if description and description not in _warned:
        _warned.add(description)
        _log.warning("adptnet compiles a kernel instead of using that of its wheel: %s.", description)
    return None


def build(operation: str, scalar: str) -> BuiltLibrary:
    """Return the library of an operation, compiled unless an intact one is in the cache folder.

    If the cache folder cannot be written, or other users can write it, the library goes into a temporary folder of this
    process.

    Args:
        operation: One of `OPERATIONS`.
        scalar: One of `SCALAR_TYPES`.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    source = find_source(operation)
    flags = [*compile_flags(operation), *PLATFORM_FLAGS, f"-DSCALAR={scalar}", *instruction_set()]
    key = hashlib.sha256(read_sources(operation) + repr(flags).encode()).hexdigest()[:16]
    folder = preferred_cache_folder()
    obstacle = _find_cache_obstacle(folder)
    compiler = find_compiler()
    if compiler is None:
        cached = [] if obstacle else sorted(folder.glob(f"{operation}-{scalar}-{key}-*{library_suffix()}"))
        for path in reversed(cached):
            obstacle = _trusted_files.find_recorded_fault(path)
            if obstacle is None:
                return BuiltLibrary(path, f"{path}, built earlier")
        unused = f" No library of {folder} is loaded: {obstacle}." if obstacle else ""
        raise BuildError(f"there is no C++ compiler. {_install_hint()}{_explain_skipped()}{unused}")
    version = _compiler_version(tuple(compiler))
    name = f"{operation}-{scalar}-{key}-{hashlib.sha256(version.encode()).hexdigest()[:8]}{library_suffix()}"
    how = f"{version.splitlines()[0] if version else compiler[0]}, {' '.join(instruction_set()) or 'baseline'}"
    if obstacle is None:
        try:
            _ensure_library(folder / name, compiler, flags, source)
            return BuiltLibrary(folder / name, f"{folder / name}, {how}")
        except OSError as error:
            obstacle = f"{folder} cannot be written ({error.strerror})"
    path = _build_in_temporary_folder(name, compiler, flags, source, obstacle)
    warning = f"adptnet compiles its kernels anew in each process, because {obstacle}. {_REMEDY}"
    return BuiltLibrary(path, f"{path}, {how}, not in {folder}: {obstacle}", warning)


def _build_in_temporary_folder(name: str, compiler: list[str], flags: list[str], source: Path, obstacle: str) -> Path:
    """Build the library in a temporary folder of this process, because of an obstacle to using the cache folder."""
    try:
        path = process_folder(os.getpid()) / name
        exposure = _trusted_files.find_exposure(path.parent)
        if exposure is not None:
            raise BuildError(f"{obstacle}, and {exposure}. {_REMEDY}")
        _ensure_library(path, compiler, flags, source)
    except OSError as error:
        raise BuildError(f"{obstacle}, and no temporary folder can be used ({error.strerror}). {_REMEDY}") from None
    return path


def build_all() -> list[Path]:
    """Build every library, for use without a compiler later, and return their paths.

    Raises:
        BuildError: There is no compiler, it fails, or the cache folder cannot be used.
    """
    every = [build(operation, scalar) for operation in OPERATIONS for scalar in SCALAR_TYPES]
    for built in every:
        if built.warning:
            raise BuildError(built.warning)
    return [built.path for built in every]


def _find_cache_obstacle(folder: Path) -> str | None:
    """Make `folder` if it is missing. Return why no library may be loaded from it; None if they may."""
    try:
        make_private_folder(folder)
    except OSError as error:
        return f"{folder} cannot be created ({error.strerror})"
    return _trusted_files.find_exposure(folder)


def _ensure_library(path: Path, compiler: list[str], flags: list[str], source: Path) -> None:
    """Compile the library at `path` unless an intact one exists. Raise `OSError` if its folder cannot be written."""
    fault = _trusted_files.find_recorded_fault(path)
    if fault is None:
        return
    if path.exists():
        _log.warning("adptnet rebuilds a compiled kernel: %s.", fault)
    # Build in a private folder and rename, which is atomic: a concurrent process finds a complete file or none. A
    # process that finds the library of one build and the record of another rebuilds.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent, ignore_cleanup_errors=True) as folder:
        draft = Path(folder) / path.name
        _compile(compiler, flags, source, draft)
        draft.chmod(0o700)
        record = _trusted_files.write_record(draft)
        os.replace(draft, path)
        os.replace(record, _trusted_files.record_path(path))


def _compile(compiler: list[str], flags: list[str], source: Path, draft: Path) -> None:
    """Run the compiler in the folder of `draft`, which is empty and also takes its temporary files."""
    command = [*compiler, *flags, "-o", str(draft), str(source)]
    environment = _compiler_environment(compiler) | dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(draft.parent))
    try:
        result = subprocess.run(
            command,
            cwd=draft.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"{compiler[0]} could not be run: {error}. {_install_hint()}") from None
    if result.returncode != 0 or not draft.is_file():
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr.strip()[-2000:]}\n{_install_hint()}")


def _compiler_environment(compiler: list[str]) -> dict[str, str]:
    """Return an environment in which the compiler searches no folder that other users can write."""
    kept = {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}
    return {**kept, "PATH": os.pathsep.join([*_trusted_files.trusted_search_path(), os.path.dirname(compiler[0])])}


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler; None if there is none that may be run.

    CXX has precedence: an absolute path or a name, optionally with arguments. Otherwise g++, clang++ and c++ are tried.
    A name is searched in the folders of PATH that only this user and root can write, never in the current folder.
    """
    chosen = os.environ.get("CXX", "")
    try:
        named, *arguments = shlex.split(chosen) or [""]
    except ValueError:  # an unterminated quotation
        named, arguments = chosen, []
    if os.path.isabs(named) and os.path.isfile(named) and os.access(named, os.X_OK):
        return [named, *arguments]
    for name in (named, "g++", "clang++", "c++"):
        found = _trusted_files.find_program(name) if name and not os.path.dirname(name) else None
        if found is not None:
            return [found, *arguments] if name == named else [found]
        if name and name == named and chosen not in _warned:
            _warned.add(chosen)
            _log.warning("CXX=%s is not used: set it to an absolute path, or to a name that is on the PATH.", chosen)
    return None


def _explain_skipped() -> str:
    """Return a sentence about a compiler that a shell would find but `find_compiler` rejects; empty if none."""
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if found is None:
        return ""
    reason = (
        _trusted_files.find_exposure(Path(found))
        if os.path.isabs(found)
        else "its folder in PATH is not an absolute path"
    )
    return f" {found} is not used: {reason}. If you trust it, set CXX to its absolute path."


@functools.cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    try:
        command, environment = [*compiler, "--version"], _compiler_environment([*compiler])
        return subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace").stdout
    except OSError:  # reported when compiling
        return ""


@functools.cache
def instruction_set() -> list[str]:
    """Return the compiler flags for this processor: AVX2 and FMA if it has them, otherwise the baseline."""
    return ["-mavx2", "-mfma"] if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []


def _install_hint() -> str:
    command = {"darwin": "xcode-select --install", "win32": "install LLVM and put clang++ on the PATH"}.get(
        sys.platform, "apt install g++, dnf install gcc-c++ or conda install gxx"
    )
    return f"Install one ({command}), or name it in CXX."
