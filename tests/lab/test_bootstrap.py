"""The decisions of the bootstrap, run.py. No test installs anything or uses the network."""

import ast
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TORCH = "2.13.0"
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
SYSTEM = {"linux": "manylinux_2_28_", "darwin": "macosx_14_0_", "win32": "win_"}[sys.platform]
GOOD_WHEEL = f"torch-{TORCH}+cpu-{TAG}-{TAG}-{SYSTEM}{platform.machine().lower()}.whl"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return run.py of a copy of the project, on a machine where neither pip nor uv is configured."""
    for variable in list(os.environ):
        if variable.startswith(("PIP_", "UV_", "ADPTNET_", "SSL_CERT")):
            monkeypatch.delenv(variable)
    for name in ("run.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT / name, tmp_path)
    spec = importlib.util.spec_from_file_location("bootstrap", tmp_path / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["run.py", "quickstart"])
    return module


@pytest.fixture
def installs(run, monkeypatch):
    """Replace the slow parts of the set-up; the list collects what would have been installed."""
    collected = []

    def venv():
        shutil.rmtree(run.VENV, ignore_errors=True)
        run.program(run.VENV, "python").parent.mkdir(parents=True)
        run.program(run.VENV, "python").symlink_to(sys.executable)
        collected.append("new .venv")

    monkeypatch.setattr(run, "make_venv", venv)
    monkeypatch.setattr(
        run, "installer", lambda _, choice, replace_torch: ([choice] + ["replaced"] * replace_torch, {})
    )
    monkeypatch.setattr(run, "run_installer", lambda command, env: collected.append(" ".join(command)))
    return collected


def make_folder(path, *wheels):
    path.mkdir()
    for wheel in wheels:
        (path / wheel).touch()
    return path


def test_an_old_python_can_parse_it_and_prints_what_to_type(run):
    ast.parse((PROJECT / "run.py").read_text(), feature_version=(3, 8))
    with pytest.raises(
        run.SetupError, match=r"needs Python 3\.11 or newer, and this is 3\.10.*python3\.11 run\.py quick"
    ):
        run.check_python((3, 10))
    run.check_python((3, 11))


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_usage_sets_nothing_up(run, installs, capsys, argv):
    assert run.main(argv) == 0
    assert "python3 run.py quickstart" in capsys.readouterr().out
    assert not installs


@pytest.mark.parametrize(
    ("choice", "wheel", "flags"),
    [
        ("auto", "a.whl", []),
        ("auto", None, ["--torch-backend", "cpu"]),
        ("cpu", "a.whl", ["--torch-backend", "cpu"]),
        ("cu130", None, ["--torch-backend", "cu130"]),
        ("local", "a.whl", []),
        ("registry", None, []),
    ],
)
def test_choice_of_torch(run, choice, wheel, flags):
    assert run.torch_flags(choice, wheel) == flags


def test_local_torch_without_a_wheel_is_an_error_with_remedies(run):
    with pytest.raises(run.SetupError, match=r"(?s)torch 2\.13\.0 for CPython.*PIP_FIND_LINKS=FOLDER python3 run\.py"):
        run.torch_flags("local", None)


@pytest.mark.parametrize("wheel", [GOOD_WHEEL, GOOD_WHEEL.replace("+cpu", ""), GOOD_WHEEL.replace("+cpu", "+cu130")])
def test_a_wheel_that_fits_is_found(run, tmp_path, wheel):
    empty, full = make_folder(tmp_path / "empty"), make_folder(tmp_path / "full", "torchtext-1-py3-none-any.whl", wheel)
    assert run.find_torch_wheel(f"{empty},{full}") == str(full / wheel)
    assert run.find_torch_wheel(f"{tmp_path / 'missing'},{full.as_uri()}") == str(full / wheel)


@pytest.mark.parametrize(
    "wheel",
    [
        GOOD_WHEEL.replace(TORCH, "2.12.0"),
        GOOD_WHEEL.replace(TORCH, TORCH + "1"),
        GOOD_WHEEL.replace(TAG, "cp38"),
        GOOD_WHEEL.replace(f"-{TAG}-{SYSTEM}", f"-{TAG}t-{SYSTEM}"),  # free-threaded
        GOOD_WHEEL.replace(platform.machine().lower(), "s390x"),
        GOOD_WHEEL.replace("torch-", "torchvision-"),
    ],
)
def test_a_wheel_that_does_not_fit_is_not_taken(run, tmp_path, wheel):
    assert run.find_torch_wheel(str(make_folder(tmp_path / "wheels", wheel))) is None


def test_uv_gets_the_settings_of_pip(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    here, cert = make_folder(tmp_path / "wheels", "certificates.pem"), tmp_path / "wheels" / "certificates.pem"
    pip = {
        "find-links": f"{here}\n{here.as_uri()} {tmp_path / 'missing'} https://example.invalid/wheels",
        "index-url": "https://example.invalid/simple",
        "extra-index-url": f"{(tmp_path / 'missing').as_uri()} https://example.invalid/extra",
        "cert": str(cert),
    }
    env = run.uv_environment(pip, "auto")
    assert env["UV_FIND_LINKS"] == f"{here},{here.as_uri()},https://example.invalid/wheels"
    assert env["UV_DEFAULT_INDEX"] == "https://example.invalid/simple"
    assert env["UV_INDEX"] == "https://example.invalid/extra"
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert env["SSL_CERT_FILE"] == str(cert)
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert "UV_FIND_LINKS" not in run.uv_environment(pip, "registry")


@pytest.mark.parametrize(
    ("variable", "silenced"),
    [
        ("UV_FIND_LINKS", "UV_FIND_LINKS"),
        ("UV_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("UV_EXTRA_INDEX_URL", "UV_INDEX"),
        ("SSL_CERT_FILE", "SSL_CERT_FILE"),
    ],
)
def test_a_setting_of_uv_wins(run, tmp_path, monkeypatch, variable, silenced):
    monkeypatch.setenv(variable, "mine")
    pip = {name: str(tmp_path / "run.py") for name in ("find-links", "index-url", "extra-index-url", "cert")}
    assert run.uv_environment(pip, "auto").get(silenced) in (None, "mine")


def test_the_most_specific_pip_setting_wins(run, monkeypatch):
    listing = "install.find-links='/install'\nglobal.find-links='/global'\nglobal.cert='/global.pem'\n:env:.cert='/x'\n"
    monkeypatch.setattr(run, "output", lambda command: listing)
    monkeypatch.setenv("PIP_CERT", "/environment.pem")
    monkeypatch.setenv("PIP_INDEX_URL", "")
    settings = run.pip_settings()
    assert settings["find-links"] == "/install"
    assert settings["cert"] == "/environment.pem"
    assert "index-url" not in settings


def fake_uv(code):
    return [sys.executable, "-c", code]


def test_a_plan_with_cuda_is_an_error_unless_requested(run):
    plan = fake_uv("print(' + filelock==4\\n + nvidia-cublas==13\\n + triton==3\\n + torch==2.13.0')")
    for choice in ("auto", "cpu"):
        with pytest.raises(
            run.SetupError, match=r"2 CUDA packages(?s:.*)ADPTNET_TORCH=registry python3 run\.py quickstart"
        ):
            run.check_torch(plan, {}, choice)
    for choice in ("cu130", "local", "registry"):
        run.check_torch(plan, {}, choice)
    run.check_torch(fake_uv("print(' + torch==2.13.0+cpu')"), {}, "auto")


@pytest.mark.parametrize("does", ["import time; time.sleep(60)", "import sys; sys.exit('dns error')"])
def test_an_index_out_of_reach_fails_soon_with_a_line_to_type(run, monkeypatch, does):
    monkeypatch.setattr(run, "PATIENCE", 0.5)
    with pytest.raises(
        run.SetupError, match=r"(no answer within 0\.5 s|dns error)(?s:.*)ADPTNET_TORCH=registry python3"
    ):
        run.check_torch(fake_uv(does), {}, "auto")


def test_nested_extras_are_those_of_the_project(run):
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    nested = {name: {name} | {other for other in extras if f"adptnet[{other}]" in extras[name]} for name in extras}
    for extra, included in run.INCLUDED_EXTRAS.items():
        assert included == set().union(*(nested[name] for name in included)), extra


def test_set_up_adds_extras_and_removes_none(run, installs):
    run.set_up("plots")
    assert installs == ["new .venv", "auto -e .[plots]"]
    run.set_up("plots")
    assert len(installs) == 2
    run.set_up("dev")
    assert installs[2:] == ["auto -e .[cluster,dev,lab,plots,test,train]"]
    run.set_up("plots")
    assert len(installs) == 3
    (run.ROOT / "constraints.txt").write_text("torch==2.14.0\n")
    run.set_up("plots")
    assert installs[3:] == ["auto -e .[cluster,dev,lab,plots,test,train]"]


def test_another_torch_replaces_the_one_there_and_stays(run, installs, monkeypatch):
    run.set_up("plots")
    monkeypatch.setenv("ADPTNET_TORCH", "registry")
    run.set_up("plots")
    assert installs[-1] == "registry replaced -e .[plots]"
    monkeypatch.delenv("ADPTNET_TORCH")
    run.set_up("plots")
    run.set_up("dev")
    assert installs[-2:] == ["registry replaced -e .[plots]", "registry -e .[cluster,dev,lab,plots,test,train]"]


@pytest.mark.parametrize("damage", ["cut short", "unreadable", "moved", "no python", "another python"])
def test_a_damaged_venv_is_made_again(run, installs, monkeypatch, damage):
    run.set_up("plots")
    stamp, python = json.loads(run.STAMP.read_text()), run.program(run.VENV, "python")
    if damage == "cut short":

        def stopped(command, env):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(run, "run_installer", stopped)
            assert run.main(["test"]) == 130
    elif damage == "unreadable":
        run.STAMP.write_text("{")
    elif damage == "moved":
        run.write_stamp({**stamp, "folder": "/elsewhere"})
    else:
        python.unlink()
    if damage == "another python":
        python.write_text("#!/bin/sh\necho '(3, 8)'\n")
        python.chmod(0o755)
        run.write_stamp({**stamp, "python": "3.8"})
    del installs[:]
    run.set_up("plots")
    assert installs == ["new .venv", "auto -e .[plots]"]


def test_a_venv_made_by_hand_is_kept(run, installs):
    run.make_venv()
    run.set_up("plots")
    assert installs == ["new .venv", "auto -e .[plots]"]


def test_set_up_is_done_by_one_run_at_a_time(run):
    fcntl = pytest.importorskip("fcntl")
    with open(run.__file__, "rb") as file:
        with run.one_at_a_time(), pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lint_runs_every_tool_and_reports_each(run, monkeypatch, capsys):
    def first_fails(command, **_):
        return subprocess.CompletedProcess(command, returncode=int(command[-1] == "check"))

    monkeypatch.setattr(run.subprocess, "run", first_fails)
    assert run.lint() == 1
    verdicts = [line.rpartition(" in ")[0] for line in capsys.readouterr().err.splitlines()]
    assert verdicts == [
        "run.py: ruff check FAILED",
        "run.py: ruff format passed",
        "run.py: mypy passed",
        "run.py: import-linter passed",
        "run.py: wording passed",
    ]


def test_constraints_suit_every_machine():
    pins = [line for line in (PROJECT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert f"torch=={TORCH}" in pins  # no +cpu: any build of this version satisfies it
    assert not [pin for pin in pins if "://" in pin or pin.startswith(("nvidia", "cuda", "triton"))]
