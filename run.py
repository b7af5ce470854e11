#!/usr/bin/env python3
"""Set up .venv once, then run a job in it. Needs only Python 3.11 or newer.

  python3 run.py quickstart             the first run
  python3 run.py test [pytest args]     the tests
  python3 run.py lint                   ruff, mypy and import-linter
  python3 run.py docs                   the documentation site, in runs/site
  python3 run.py COMMAND [args]         any other adptnet command

The environment variable ADPTNET_TORCH chooses the build of torch (unset: the one .venv has, or else auto):
  auto              a wheel folder that pip is configured with (find-links), if it holds torch; otherwise cpu
  cpu, cu130, ...   PyTorch's own wheels of that kind
  local             the wheel folder only
  registry          the package registry's torch; on Linux that is the CUDA build, several GB
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, Mapping
from urllib.parse import urlparse
from urllib.request import url2pathname

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BASE_PYTHON = getattr(sys, "_base_executable", None) or sys.executable  # not the one in .venv
STAMP = VENV / "adptnet-setup.json"  # describes .venv; {} while an installation is under way
CONSTRAINTS = ROOT / "constraints.txt"
UV = "uv>=0.9,<1"
PATIENCE = 8  # seconds for PyTorch's index to answer if it was not requested by name; it needs about one

EXTRA_OF_JOB = {"test": "dev", "lint": "dev", "docs": "docs"}  # every other job needs "lab"
INCLUDED_EXTRAS = {  # as nested in pyproject.toml
    "dev": {"dev", "test", "lab", "plots", "train", "cluster"},
    "lab": {"lab", "plots"},
    "docs": {"docs", "lab", "plots", "hf"},
}


class SetupError(Exception):
    """The set-up failed; the message has the reason and what to type."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    job, args = argv[0], argv[1:]
    try:
        check_python(sys.version_info[:2])
        set_up(EXTRA_OF_JOB.get(job, "lab"))
        if job == "lint":
            return lint()
        if job == "test":
            return hand_over(["pytest", *args], folder=ROOT)
        if job == "docs":
            return hand_over(["sphinx", "-W", "--keep-going", "-q", "docs", "runs/site", *args], folder=ROOT)
        return hand_over(["adptnet", job, *args], folder=Path.cwd())
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130


def lint() -> int:
    """Run every tool, even if one before it failed, and return the exit code."""
    python = str(program(VENV, "python"))
    tools = {
        "ruff check": [python, "-m", "ruff", "check"],
        "ruff format": [python, "-m", "ruff", "format", "--check"],
        "mypy": [python, "-m", "mypy"],
        "import-linter": [str(program(VENV, "lint-imports")), "--no-logo"],
        "wording": [python, ".ci/wording.py"],
    }
    verdicts = []
    for name, command in tools.items():
        start = time.monotonic()
        code = subprocess.run(command, cwd=str(ROOT), env=child_environment()).returncode
        verdicts.append((name, code, time.monotonic() - start))
    for name, code, seconds in verdicts:
        say(f"{name} {'passed' if code == 0 else 'FAILED'} in {seconds:.1f} s")
    return int(any(code for _, code, _ in verdicts))


def hand_over(module_and_args: list[str], folder: Path) -> int:
    """Replace this process by the job, so that signals reach it and its exit code is returned."""
    command = [str(program(VENV, "python")), "-m", *module_and_args]
    if os.name == "posix":
        os.chdir(str(folder))
        os.execve(command[0], command, child_environment())
    return subprocess.run(command, cwd=str(folder), env=child_environment()).returncode


def set_up(extra: str) -> None:
    """Install what is missing in .venv for a job that needs `extra`."""
    stamp = read_stamp()
    if is_ready(stamp, facts(stamp), extra):
        return
    with one_at_a_time():
        stamp = read_stamp()  # another run may have done the work while this one waited
        now = facts(stamp)
        if is_ready(stamp, now, extra):
            return
        start = time.monotonic()
        say(f"setting up .venv (once): Python {now['python']}, extra '{extra}'")
        if must_remake(stamp):
            stamp = None
            make_venv()
        extras = extras_to_install(stamp, extra)
        command, env = installer(VENV, now["torch"], replace_torch=bool(stamp) and stamp["torch"] != now["torch"])
        write_stamp({})
        run_installer([*command, "-e", f".[{','.join(extras)}]"], env)
        write_stamp({**now, "extras": extras})
        say(f"set-up took {time.monotonic() - start:.0f} s; the next run skips it")


def make_venv() -> None:
    if VENV.exists():
        shutil.rmtree(str(VENV))
    VENV.mkdir()
    write_stamp({})  # first, so that an interruption is noticed
    if subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", str(VENV)]).returncode != 0:
        raise SetupError(
            f"{BASE_PYTHON} cannot make a virtual environment, see above. On Debian: apt install python3-venv"
        )


def read_stamp() -> dict | None:
    """Return the description of .venv: None if it was made by hand or does not exist, {} if it is incomplete."""
    try:
        return json.loads(STAMP.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def write_stamp(stamp: dict) -> None:
    draft = STAMP.with_suffix(".new")
    draft.write_text(json.dumps(stamp, indent=1))
    draft.replace(STAMP)


def facts(stamp: dict | None) -> dict:
    """Return what a finished set-up must agree with. The torch in .venv stays unless another one is requested."""
    inputs = (ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes()
    return {
        "inputs": hashlib.sha256(inputs).hexdigest(),
        "python": "{}.{}".format(*sys.version_info),
        "folder": str(ROOT),
        "torch": os.environ.get("ADPTNET_TORCH") or (stamp or {}).get("torch", "auto"),
    }


def is_ready(stamp: dict | None, now: dict, extra: str) -> bool:
    if not stamp or not program(VENV, "python").exists():
        return False
    return extra in stamp["extras"] and all(stamp.get(name) == fact for name, fact in now.items())


def extras_to_install(stamp: dict | None, extra: str) -> list[str]:
    """Return the extras that the job needs and those that are installed: nothing is ever removed from .venv."""
    return sorted(INCLUDED_EXTRAS.get(extra, {extra}).union((stamp or {}).get("extras", [])))


def must_remake(stamp: dict | None) -> bool:
    """Return whether .venv is incomplete, moved, broken or of another Python."""
    if stamp is not None and stamp.get("folder") != str(ROOT):
        return True
    probe = [str(program(VENV, "python")), "-c", "import sys; print(sys.version_info[:2])"]
    with contextlib.suppress(OSError):
        return output(probe).strip() != str(sys.version_info[:2])
    return True


def installer(venv: Path, choice: str, replace_torch: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return the uv command that installs into `venv` with the torch of `choice`, and its environment."""
    uv = find_uv()
    env = uv_environment(pip_settings(), choice)
    wheel = find_torch_wheel(env.get("UV_FIND_LINKS", ""))
    flags = torch_flags(choice, wheel)
    say(f"torch {torch_pin()} from " + (f"PyTorch's {flags[1]} wheels" if flags else wheel or "the package registry"))
    if replace_torch:
        flags = [*flags, "--reinstall-package", "torch"]  # for uv an installed 2.13.0+cpu satisfies 2.13.0 of any kind
    command = [uv, "pip", "install", "--python", str(program(venv, "python")), "-c", str(CONSTRAINTS), *flags]
    check_torch([*command, "--dry-run", "torch"], env, choice)
    return command, env


def run_installer(command: list[str], env: dict[str, str]) -> None:
    if subprocess.run(command, cwd=str(ROOT), env=env).returncode != 0:
        raise SetupError(f"uv could not install the packages, see above. To try again: {command_line()}")


def find_uv() -> str:
    """Return the uv of the machine or of .venv if it runs and is new enough; otherwise install it into .venv."""
    for candidate in (shutil.which("uv"), str(program(VENV, "uv"))):
        with contextlib.suppress(OSError):
            if candidate and "--torch-backend" in output([candidate, "pip", "install", "--help"]):
                return candidate
    say("fetching uv")
    python = str(program(VENV, "python"))
    pip = [BASE_PYTHON, "-m", "pip", "--python", python]  # five seconds faster than a pip in .venv
    if not output([*pip, "--version"]):
        output([python, "-m", "ensurepip"])
        pip = [python, "-m", "pip"]
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "6"]
    fetch = subprocess.run([*pip, "install", *options, UV], env=child_environment(), stderr=subprocess.PIPE, text=True)
    if fetch.returncode != 0:
        raise SetupError(
            f"pip could not fetch uv.\n{fetch.stderr.rstrip()}\nInstall uv by other means, then type: {command_line()}"
        )
    return str(program(VENV, "uv"))


def torch_flags(choice: str, wheel: str | None) -> list[str]:
    """Return the flags that select the torch. A local wheel needs none, because 2.13.0+cpu sorts above 2.13.0."""
    if choice == "local" and wheel is None:
        raise SetupError(f"no wheel folder that pip is configured with holds {describe_wheel()}.\n{list_remedies()}")
    if choice in ("local", "registry") or (choice == "auto" and wheel is not None):
        return []
    return ["--torch-backend", "cpu" if choice == "auto" else choice]


def check_torch(dry_run: list[str], env: dict[str, str], choice: str) -> None:
    """Check the plan of uv: a failure is then quick, leaves .venv unchanged, and CUDA needs an explicit request."""
    limit = PATIENCE if choice == "auto" else None
    try:
        plan = subprocess.run(
            dry_run,
            env={**env, "UV_HTTP_RETRIES": "1"} if limit else env,
            timeout=limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"torch and its dependencies were not found: no answer within {limit} s.\n{list_remedies()}"
        ) from None
    if plan.returncode != 0:
        raise SetupError(f"torch and its dependencies were not found.\n{plan.stdout.rstrip()}\n{list_remedies()}")
    cuda = re.findall(r"^ \+ (?:nvidia|cuda|triton)", plan.stdout, re.MULTILINE)
    if cuda and choice in ("auto", "cpu"):
        raise SetupError(f"this torch needs {len(cuda)} CUDA packages, which were not requested.\n{list_remedies()}")


def find_torch_wheel(find_links: str) -> str | None:
    """Return a wheel of the pinned torch for this Python and machine in one of the folders; None if there is none."""
    system = {"linux": "linux", "darwin": "macosx", "win32": "win"}.get(sys.platform, sys.platform)
    python = "cp{}{}".format(*sys.version_info)
    build = rf"torch-{re.escape(torch_pin())}(\+[\w.]+)?-{python}-{python}-\S*{system}\S*{platform.machine().lower()}"
    folders = [path for path in map(local_path, find_links.split(",")) if path and path.is_dir()]
    wheels = [wheel for folder in folders for wheel in sorted(folder.glob("torch-*.whl"))]
    return next((str(wheel) for wheel in wheels if re.fullmatch(build, wheel.stem)), None)


def torch_pin() -> str:
    return re.findall(r"^torch==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)[0]


def describe_wheel() -> str:
    return "a wheel of torch {} for CPython {}.{}".format(torch_pin(), *sys.version_info)


def list_remedies() -> str:
    return f"""Type one of:
  PIP_FIND_LINKS=FOLDER {command_line()}
      with a folder that holds {describe_wheel()}
  ADPTNET_TORCH=cpu {command_line()}
      to wait for PyTorch's CPU wheels without a time limit
  ADPTNET_TORCH=registry {command_line()}
      for the package registry's torch; on Linux several GB with CUDA"""


def pip_settings() -> dict[str, str]:
    """Return the options that pip is configured with on this machine, by name."""
    settings = {}
    listing = output([BASE_PYTHON, "-m", "pip", "config", "list"])
    for scope in ("global", "install"):
        for name, value in re.findall(rf"^{scope}\.([\w-]+)=(.+)$", listing, re.MULTILINE):
            settings[name] = str(ast.literal_eval(value))
    for variable, value in os.environ.items():
        if variable.startswith("PIP_") and value:
            settings[variable[len("PIP_") :].lower().replace("_", "-")] = value
    return settings


def uv_environment(pip: Mapping[str, str], choice: str) -> dict[str, str]:
    """Return an environment with pip's settings for uv, which does not read them. Settings of uv itself are kept."""
    env = child_environment()
    links, indexes = drop_missing(pip.get("find-links", "")), drop_missing(pip.get("extra-index-url", ""))
    if choice == "registry":
        links = []
    if choice in ("auto", "local", "registry"):
        env.pop("UV_TORCH_BACKEND", None)
    if links:
        env.setdefault("UV_FIND_LINKS", ",".join(links))
    if "UV_INDEX_URL" not in env and drop_missing(pip.get("index-url", "")):
        env.setdefault("UV_DEFAULT_INDEX", pip["index-url"])
    if "UV_EXTRA_INDEX_URL" not in env and "UV_INDEX" not in env and indexes:
        env["UV_INDEX"] = " ".join(indexes)
        env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip does it
    if Path(pip.get("cert", "")).is_file():
        env.setdefault("SSL_CERT_FILE", pip["cert"])
    return env


def drop_missing(links: str) -> list[str]:
    """Return the links without folders that do not exist: pip skips those, and uv fails."""
    places = [(link, local_path(link)) for link in links.split()]
    return [str(path) if "://" not in link else link for link, path in places if path is None or path.exists()]


def local_path(link: str) -> Path | None:
    """Return the folder that a link means; None for an address on the network."""
    if link.startswith("file:"):
        return Path(url2pathname(urlparse(link).path))
    return None if "://" in link else Path(link).expanduser().absolute()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Lock this file, which exists before .venv and is never replaced by the set-up."""
    try:
        import fcntl
    except ImportError:  # Windows, where simultaneous set-ups are not prevented
        yield
        return
    with open(__file__, "rb+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run.py to finish its set-up")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def program(venv: Path, name: str) -> Path:
    return venv / "Scripts" / f"{name}.exe" if os.name == "nt" else venv / "bin" / name


def child_environment() -> dict[str, str]:
    """Return an environment in which children cache bytecode: importing torch then takes a third of the time."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def output(command: list[str]) -> str:
    """Return the standard output of a command, without its errors."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=child_environment()
    ).stdout


def command_line() -> str:
    return " ".join(["python3", "run.py", *map(shlex.quote, sys.argv[1:])])


def check_python(version: tuple[int, int]) -> None:
    if version < (3, 11):
        raise SetupError(
            "adptnet needs Python 3.11 or newer, and this is {}.{}. With a newer one installed, type: {}".format(
                *version, command_line().replace("python3", "python3.11", 1)
            )
        )


def say(line: str) -> None:
    print(f"run.py: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
