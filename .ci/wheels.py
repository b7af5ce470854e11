"""Build a wheel with compiled kernels for each platform, from one machine: python3 .ci/wheels.py [platform ...]

The kernels are cross-compiled with zig (the package `ziglang`, which the first call installs into runs/) and added to
copies of the pure wheel, with a manifest that `adptnet.ops._prebuilt` reads. Needs pip, but not torch.
"""

import argparse
import base64
import concurrent.futures
import csv
import hashlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ZIG = "0.17.0"  # another version may round differently: give a change an entry under Numerics in the changelog
FLAGS = ["-fvisibility=hidden", "-g0", "-Wno-bitwise-conditional-parentheses"]
FOLDER = "adptnet/ops/prebuilt"
MAX_SIZE = 8_000_000  # of a wheel, in bytes
DATE = (2020, 2, 2, 0, 0, 0)  # of every file in a wheel: the same sources give the same wheel
CPUS = {  # zig's names of the instruction sets of `adptnet.ops._prebuilt`
    "x86_64": {
        "baseline": "x86_64",
        "avx2": "x86_64+avx2+fma",
        "avx512": "x86_64+avx2+fma+avx512f+avx512bw+avx512dq+avx512vl+prefer_256_bit",
    },
    "aarch64": {"neon": "baseline"},
}


@dataclass(frozen=True)
class Target:
    """A platform, and what zig and pip call it."""

    platform: str  # as `adptnet.ops._prebuilt.current_platform` names it
    triple: str  # with the oldest version of the C library or of the system
    tags: tuple[str, ...]

    @property
    def is_windows(self) -> bool:
        return "windows" in self.triple

    @property
    def cpus(self) -> dict[str, str]:
        return CPUS[self.triple.partition("-")[0]]


TARGETS = [
    Target("linux-x86_64", "x86_64-linux-gnu.2.17", ("manylinux_2_17_x86_64", "manylinux2014_x86_64")),
    Target("linux-aarch64", "aarch64-linux-gnu.2.17", ("manylinux_2_17_aarch64", "manylinux2014_aarch64")),
    Target("darwin-arm64", "aarch64-macos.11.0", ("macosx_11_0_arm64",)),
    Target("darwin-x86_64", "x86_64-macos.11.0", ("macosx_11_0_x86_64",)),
    Target("win32-amd64", "x86_64-windows-gnu", ("win_amd64",)),
]


def load_sources() -> Any:
    """Return the module `adptnet.ops._sources`, without importing the package, which needs torch."""
    description = importlib.util.spec_from_file_location("_sources", ROOT / "src" / "adptnet" / "ops" / "_sources.py")
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


SOURCES = load_sources()


def main(argv: list[str]) -> None:
    """Build the wheels of the platforms that are named, or of all."""
    known = {target.platform: target for target in TARGETS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("platforms", nargs="*", metavar="platform", help=f"{', '.join(known)}; all if none is given")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the wheels")
    parser.add_argument("--pure", type=Path, help="the pure wheel; built if it is not given")
    parser.add_argument("--instructions", metavar="NAME", help="only this instruction set, for a quick trial")
    options = parser.parse_args(argv)
    unknown = [name for name in options.platforms if name not in known]
    if unknown:
        parser.error(f"there is no platform {unknown[0]!r}; there are {', '.join(known)}")
    pure = options.pure or build_pure_wheel(options.out)
    zig = install_zig()
    for name in options.platforms or known:
        wheel = build_wheel(known[name], pure, options.out, zig, options.instructions)
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)


def build_pure_wheel(out: Path) -> Path:
    """Build the wheel without kernels and return its path."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(ROOT)], check=True)
    return max(out.glob("adptnet-*-py3-none-any.whl"), key=lambda path: path.stat().st_mtime)


def install_zig() -> list[str]:
    """Return the command of zig's C++ compiler, installed into runs/ if it is missing."""
    folder = ROOT / "runs" / f"ziglang-{ZIG}"
    program = folder / "ziglang" / ("zig.exe" if os.name == "nt" else "zig")
    if not program.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), f"ziglang=={ZIG}"], check=True)
    return [str(program), "c++"]


def build_wheel(target: Target, pure: Path, out: Path, zig: list[str], only: str | None = None) -> Path:
    """Build the wheel of one platform from the pure wheel, with all instruction sets or only one; return its path."""
    with tempfile.TemporaryDirectory() as scratch:
        kernels = compile_kernels(target, Path(scratch), zig, only)
        files = {f"{FOLDER}/{path.name}": path.read_bytes() for path in kernels}
    manifest = {
        "platform": target.platform,
        "compiler": f"zig {ZIG} (clang) for {target.triple}",
        "sources": {operation: SOURCES.hash_sources(operation) for operation in SOURCES.OPERATIONS},
        "libraries": {Path(name).name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    files[f"{FOLDER}/manifest.json"] = json.dumps(manifest, indent=1).encode()
    wheel = out / pure.name.replace("-none-any.whl", f"-none-{'.'.join(target.tags)}.whl")
    write_wheel(pure, wheel, target, files)
    assert wheel.stat().st_size <= MAX_SIZE, f"{wheel.name} has more than {MAX_SIZE} bytes"
    return wheel


def compile_kernels(target: Target, folder: Path, zig: list[str], only: str | None) -> list[Path]:
    """Compile every operation for all scalar types and instruction sets, and return the paths of the libraries."""
    assert only is None or only in target.cpus, f"{target.platform} has the instruction sets {', '.join(target.cpus)}"
    jobs = [
        (operation, scalar, name)
        for operation in SOURCES.OPERATIONS
        for scalar in SOURCES.SCALAR_TYPES
        for name in ([only] if only else target.cpus)
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: compile_kernel(target, folder, zig, *job), jobs))


def compile_kernel(target: Target, folder: Path, zig: list[str], operation: str, scalar: str, name: str) -> Path:
    """Compile one library, check that it exports the functions of its source, and return its path."""
    path = folder / f"{operation}-{scalar}-{name}{'.dll' if target.is_windows else '.so'}"
    code, source = path.with_suffix(".o"), SOURCES.find_source(operation)
    platform = [] if target.is_windows else ["-fPIC"]
    flags = [*SOURCES.compile_flags(operation), *FLAGS, *platform, f"-DSCALAR={scalar}"]
    cross = [*zig, "-target", target.triple]
    subprocess.run([*cross, f"-mcpu={target.cpus[name]}", *flags, "-c", "-o", str(code), str(source)], check=True)
    # Without -mcpu, so that zig builds its C++ library, which is linked statically, once per platform.
    subprocess.run([*cross, *SOURCES.LINK_FLAGS, "-s", "-o", str(path), str(code)], check=True)
    data = path.read_bytes()  # without a symbol table: a name that is left is in the table of exports
    exported = re.findall(r"^EXPORT \w+ (\w+)\(", source.read_text(), re.MULTILINE)
    missing = [function for function in exported if function.encode() not in data]
    assert exported, f"{source} marks no function with EXPORT"
    assert not missing, f"{path.name} for {target.platform} does not export {missing}"
    return path


def write_wheel(pure: Path, wheel: Path, target: Target, added: dict[str, bytes]) -> None:
    """Write a copy of the pure wheel with further files and the tags of the platform."""
    with zipfile.ZipFile(pure) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")} | added
    (record,) = [name for name in files if name.endswith(".dist-info/RECORD")]
    (about,) = [name for name in files if name.endswith(".dist-info/WHEEL")]
    del files[record]
    text = files[about].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    tags = "\n".join(f"Tag: py3-none-{tag}" for tag in target.tags)
    files[about] = re.sub(r"^Tag: py3-none-any$", tags, text, flags=re.MULTILINE).encode()
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name, data in files.items():
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={sha256}", len(data)])
    writer.writerow([record, "", ""])
    files[record] = lines.getvalue().encode()  # last, as the format recommends
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (AssertionError, subprocess.CalledProcessError) as error:
        sys.exit(f"wheels: {error}")
