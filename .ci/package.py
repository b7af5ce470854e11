"""Build the sdist and from it the wheel, install the wheel without extras in a new environment, and check it there."""

import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import run  # noqa: E402  installs torch in the same way as run.py

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


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as scratch:
        dist, venv = Path(scratch, "dist"), Path(scratch, "venv")
        choice = run.facts(run.read_stamp())["torch"]
        env = run.uv_environment(run.pip_settings(), choice)
        subprocess.run(
            [run.find_uv(), "build", "--python", sys.executable, "--out-dir", dist, ROOT], env=env, check=True
        )
        wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))
        check_contents(wheel, sdist, f"{project['name']}-{project['version']}")

        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        command, env = run.installer(venv, choice)
        run.run_installer([*command, str(wheel)], env)
        python = run.program(venv, "python")
        subprocess.run([python, "-I", "-c", IMPORT, project["version"]], cwd=scratch, check=True)
        check_command(run.program(venv, "adptnet"), scratch)


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
