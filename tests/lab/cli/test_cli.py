"""The command `adptnet`: its table of commands, its help, and its exit codes."""

import importlib
import importlib.util
import inspect
import subprocess
import sys

import pytest

from adptnet import errors
from adptnet_lab import cli
from adptnet_lab.training import Interrupted


def run_python(code, *arguments):
    """Run Python code in a process of its own and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_help_lists_every_command_without_importing_torch():
    code = "import sys; from adptnet_lab import cli; cli.main(['--help']); print('torch' in sys.modules)"
    *lines, imported = run_python(code).splitlines()
    assert imported == "False"
    for name, command in cli.COMMANDS.items():
        assert any(line.split() == [name, *command.help.split()] for line in lines), name


def test_only_the_command_that_was_typed_is_imported():
    code = """
import sys
from adptnet_lab import cli
try:
    cli.main(["train", "--help"])
except SystemExit:
    print([name for name in sys.modules if name.startswith("adptnet_lab.")])
"""
    imported = run_python(code).splitlines()[-1]
    assert "adptnet_lab.cli.train" in imported
    for name in ("paper", "benchmarks", "cli.sweep", "cli.quickstart", "cli.analyze"):
        assert f"adptnet_lab.{name}" not in imported


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_options_and_a_function_that_takes_them(name):
    command = cli.COMMANDS[name]
    module = importlib.import_module(f"adptnet_lab.{command.module}")
    assert len(inspect.signature(module.run).parameters) == 1
    options = module.make_options(["--help"]) if command.options is None else getattr(module, command.options)
    assert inspect.isclass(options)
    assert options.__doc__


@pytest.mark.parametrize("package", cli.DEPENDENCIES)
def test_without_the_extra_a_command_prints_how_to_install_it(package, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    assert cli.main(["train", "word-problem"]) == 1
    assert capsys.readouterr().err == f"adptnet train needs {package}: pip install 'adptnet[lab]'\n"
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out


def test_the_british_spelling_of_analyze_is_accepted(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["analyse", "--help"])
    assert stop.value.code == 0
    assert "usage: adptnet analyze" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: adptnet [--import MODULE] COMMAND"),
        (["trian"], "adptnet has no command 'trian'. Perhaps you meant 'train'."),
        (["xyz"], "adptnet has no command 'xyz'. Known: quickstart, train,"),
    ],
)
def test_an_unknown_command_is_explained(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.InputError("too small"), 1, "InputError: too small\n"),
        (Interrupted("stopped after step 3", 15), 143, "stopped after step 3\n"),
        (KeyboardInterrupt(), 130, "stopped.\n"),
    ],
)
def test_errors_of_adptnet_are_printed_without_a_traceback(error, code, message, capsys):
    def fail():
        raise error

    assert cli.run_and_exit_code(fail) == code
    assert capsys.readouterr().err == message


def test_other_errors_are_raised():
    def fail():
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        cli.run_and_exit_code(fail)
