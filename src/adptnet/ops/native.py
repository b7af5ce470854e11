"""Kernels in C++: built at first use with whatever compiler there is, kept in a cache, loaded through ctypes.

The source is package data and needs neither torch nor Python headers. Nothing is compiled by an import. Where no
compiler is found, or ADPTNET_BACKEND=reference is set, the torch programs that define each operation run instead.
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

from ..errors import BackendWarning, BuildError, IncompatibleError

__all__ = ["Kernel", "backends", "build", "build_all", "load", "notice", "wanted"]

# No -ffast-math: GCC would link code that flushes denormal numbers to zero in the whole process.
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=fast", "-fopenmp-simd", "-falign-loops=64"]
OPERATIONS = ["adpt_scan", "adpt_step", "linear_scan", "matrix_chain", "plane_rotation"]
NUMBERS = ["float", "double"]

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
        if kernel.library is None and kernel.why not in _said:
            _said.add(kernel.why)
            warnings.warn(
                f"adptnet runs without its compiled kernels, many times slower: {kernel.why} "
                "ADPTNET_BACKEND=reference says that this is meant.",
                BackendWarning,
                stacklevel=2,
            )
    return kernel.library


def backends() -> dict[str, str]:
    """What executes each operation here, and why; `gpu` is what runs for tensors on one."""
    from . import gpu  # which asks this module what is wanted

    if not wanted():
        return dict.fromkeys([*OPERATIONS, "gpu"], "reference: ADPTNET_BACKEND=reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendWarning)
        found = {name: (load(name), _loaded[name, "float"].why) for name in OPERATIONS}
    here = {name: f"{'cpu' if library else 'reference'}: {why}" for name, (library, why) in found.items()}
    return {**here, "gpu": gpu.describe()}


def notice(reason: str) -> None:
    """Says once why an operation runs as its reference; in a program that is being compiled, nothing."""
    if not torch.compiler.is_compiling() and reason not in _said:
        _said.add(reason)
        _log.warning("adptnet runs the slow reference loop here: %s", reason)


def _load(operation: str, number: str) -> Kernel:
    try:
        path, why = build(operation, number)
    except BuildError as error:
        return Kernel(None, str(error))
    try:
        return Kernel(ctypes.CDLL(str(path)), why)
    except OSError:  # damaged, or of another machine
        path.unlink(missing_ok=True)
    try:
        path, why = build(operation, number)
        return Kernel(ctypes.CDLL(str(path)), why)
    except (BuildError, OSError) as error:
        return Kernel(None, f"{path} cannot be loaded: {error}.")


def build(operation: str, number: str) -> tuple[Path, str]:
    """The path of the library, compiled if it is not in the cache, and how it was made."""
    source = Path(__file__).parent / operation / "kernel.cpp"
    sources = sorted(source.parent.parent.rglob("*.h"))  # what kernels share
    flags = [*FLAGS, f"-DNUMBER={number}", *instruction_set()]
    text = b"".join(path.read_bytes() for path in [*sources, source])
    key = hashlib.sha256(text + repr(flags).encode()).hexdigest()[:16]
    folder = cache()
    compiler = find_compiler()
    if compiler is None:
        kept = sorted(folder.glob(f"{operation}-{number}-{key}-*{_suffix()}"))
        if kept:
            return kept[-1], f"{kept[-1]}, built earlier"
        raise BuildError(f"there is no C++ compiler. {_install()}")
    version = _version(tuple(compiler))
    path = folder / f"{operation}-{number}-{key}-{hashlib.sha256(version.encode()).hexdigest()[:8]}{_suffix()}"
    how = f"{path}, {version.splitlines()[0] if version else compiler[0]}, {' '.join(instruction_set()) or 'baseline'}"
    if not path.exists():
        _compile(compiler, flags, source, path)
    return path, how


def build_all() -> list[Path]:
    """Every library, for use without a compiler later."""
    return [build(operation, number)[0] for operation in OPERATIONS for number in NUMBERS]


def _compile(compiler: list[str], flags: list[str], source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place and then renamed, which is atomic: whoever comes second finds a whole file or none.
    handle, draft = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
    os.close(handle)
    try:
        command = [*compiler, *flags, "-o", draft, str(source)]
        made = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if made.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed:\n{made.stderr.strip()[-2000:]}\n{_install()}")
        os.chmod(draft, 0o755)
        os.replace(draft, path)
    except OSError as error:
        raise BuildError(f"{compiler[0]} could not be run: {error}. {_install()}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, or the first that is found."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for candidate in (chosen, ["g++"], ["clang++"], ["c++"]):
        if candidate and shutil.which(candidate[0]):
            return candidate
    return None


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout


@functools.cache
def instruction_set() -> list[str]:
    """Compiler flags for this processor: x86-64-v3 where it has it, otherwise what every one of its kind has."""
    return ["-mavx2", "-mfma"] if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []


def cache() -> Path:
    """The folder of built libraries; ADPTNET_CACHE chooses another."""
    chosen = os.environ.get("ADPTNET_CACHE")
    if chosen:
        return Path(chosen)
    home = Path.home()
    usual = {"darwin": home / "Library" / "Caches", "win32": home / "AppData" / "Local"}.get(
        sys.platform, home / ".cache"
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or usual) / "adptnet"
    return folder if _writable(folder) else _own_folder()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@functools.cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="adptnet-"))  # nobody else can put a library there


def _suffix() -> str:
    return ".dll" if sys.platform == "win32" else ".so"


def _install() -> str:
    how = {"darwin": "xcode-select --install", "win32": "install LLVM and put clang++ on the PATH"}.get(
        sys.platform, "apt install g++, dnf install gcc-c++ or conda install gxx"
    )
    return f"Install one ({how}), or name it in CXX."
