"""Build the sdist and from it the wheels, install them without extras in a new environment, and check them there.

There are two wheels: the pure one, and the one with compiled kernels for this platform (`wheels.py`).
"""

import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import run  # noqa: E402  installs torch in the same way as run.py
import wheels  # noqa: E402  beside this file

IMPORT = """
import re, sys, importlib.metadata, adptnet
heavy = {"matplotlib", "triton", "tyro", "rich", "adptnet_lab"} & set(sys.modules)
assert not heavy, f"import adptnet also imports {heavy}"
assert sys.prefix in adptnet.__file__, f"imported from {adptnet.__file__}, outside {sys.prefix}"
versions = {adptnet.__version__, importlib.metadata.version("adptnet"), sys.argv[1]}
assert len(versions) == 1, f"the version is given as {versions}"
names = {re.match(r"[\\w-]+", line)[0] for line in importlib.metadata.requires("adptnet") if "extra ==" not in line}
assert names == {"torch", "numpy", "safetensors"}, f"the library requires {names}"
"""


INSTRUCTIONS = """
from adptnet.ops import _prebuilt
print(_prebuilt.supported_instruction_sets()[0])
"""
KERNELS = """
import torch, adptnet
found = adptnet.backends()
del found["gpu"]
assert all(shown.startswith("cpu: prebuilt, ") for shown in found.values()), f"the backends are {found}"
layer, x = adptnet.ADPTNet(16, beta=1.0), torch.randn(3, 50, 16)
layer(x)[0].sum().backward()
assert adptnet.verify(layer, x[:1, :16]).ok
print("adpt_scan:", found["adpt_scan"])
"""


def main() -> None:
    version = re.search(r'^__version__ = "(.+)"', (ROOT / "src/adptnet/_version.py").read_text(), re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as scratch:
        dist, venv = Path(scratch, "dist"), Path(scratch, "venv")
        choice = run.facts(run.read_stamp())["torch"]
        env = run.uv_environment(run.pip_settings(), choice)
        subprocess.run(
            [run.find_uv(), "build", "--python", sys.executable, "--out-dir", dist, ROOT], env=env, check=True
        )
        wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))
        check_contents(wheel, sdist, f"adptnet-{version}")

        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        command, env = run.installer(venv, choice)
        run.run_installer([*command, str(wheel)], env)
        python = run.program(venv, "python")
        subprocess.run([python, "-I", "-c", IMPORT, version], cwd=scratch, check=True)
        check_command(run.program(venv, "adptnet"), scratch)
        check_kernels(wheel, python, [*command, "--no-deps", "--reinstall-package", "adptnet"], env, scratch)


def check_kernels(pure: Path, python: Path, installer: list[str], env: dict[str, str], folder: str) -> None:
    """Build the wheel of this platform and check that its kernels run in an environment without a compiler."""
    name = f"{sys.platform}-{platform.machine().lower()}"
    targets = [target for target in wheels.TARGETS if target.platform == name]
    if not targets:
        print(f"package: there is no wheel with kernels for {name}")
        return
    best = subprocess.run([python, "-I", "-c", INSTRUCTIONS], cwd=folder, check=True, capture_output=True, text=True)
    wheel = wheels.build_wheel(targets[0], pure, pure.parent, wheels.install_zig(), best.stdout.strip())
    run.run_installer([*installer, str(wheel)], env)
    cache = Path(folder, "cache")
    alone = {**os.environ, "PATH": "", "CXX": "", "ADPTNET_CACHE": str(cache)}
    subprocess.run([python, "-I", "-c", KERNELS], cwd=folder, env=alone, check=True)
    assert not cache.exists(), f"{os.listdir(cache)} was compiled, although {wheel.name} has the kernels"


def check_command(adptnet: Path, folder: str) -> None:
    """Check that without the extra `lab` the command prints its help, and otherwise how to install the extra."""
    listing = subprocess.run([adptnet, "--help"], cwd=folder, check=True, capture_output=True, text=True)
    assert "quickstart" in listing.stdout, f"adptnet --help prints {listing.stdout!r}"
    train = subprocess.run([adptnet, "train", "word-problem"], cwd=folder, capture_output=True, text=True)
    assert train.returncode == 1, f"adptnet train without the extra exits with {train.returncode}"
    lines = train.stderr.splitlines()
    assert len(lines) == 1, f"adptnet train without the extra prints {train.stderr!r}"
    assert lines[0].endswith(": pip install 'adptnet[lab]'"), f"adptnet train without the extra prints {lines[0]!r}"


def check_contents(wheel: Path, sdist: Path, stem: str) -> None:
    """Check that the archives hold the files that they must, and the wheel no other package."""
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = set(archive.getnames())
    package = ROOT / "src" / "adptnet"
    sources = [path for suffix in ("cpp", "h") for path in package.rglob(f"*.{suffix}")]
    for name in ("py.typed", "__init__.py", *(path.relative_to(package).as_posix() for path in sources)):
        assert f"adptnet/{name}" in in_wheel, f"{wheel.name} lacks adptnet/{name}"
        assert f"{stem}/src/adptnet/{name}" in in_sdist, f"{sdist.name} lacks src/adptnet/{name}"
    for name in ("LICENSE", "README.md", "run.py", "constraints.txt", "tests"):
        assert any(member.startswith(f"{stem}/{name}") for member in in_sdist), f"{sdist.name} lacks {name}"
    others = {name.split("/")[0] for name in in_wheel} - {"adptnet", "adptnet_lab", f"{stem}.dist-info"}
    assert not others, f"{wheel.name} also installs {others}"


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, run.SetupError, subprocess.CalledProcessError) as error:
        sys.exit(f"package: {error}")
