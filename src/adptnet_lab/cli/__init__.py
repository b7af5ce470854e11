"""The command line, `adptnet COMMAND`. Only the module of the command that was typed is imported."""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["COMMANDS", "Command", "main", "run_and_exit_code"]


class Command(NamedTuple):
    """One command: the module that implements it, its options, and one line of help.

    The module defines `run(options)`. `options` names the dataclass of the options in that module. It is None where
    the options depend on the arguments: the module then defines `make_options(arguments)`, which returns the dataclass.
    """

    module: str
    options: str | None
    help: str


COMMANDS = {
    "quickstart": Command("cli.quickstart", "Quickstart", "Train four small models, print a table, draw a figure."),
    "train": Command("cli.train", None, "Train a model on a task in a folder of its own; resume an interrupted run."),
    "evaluate": Command("cli.evaluate", "Evaluate", "Score the weights of a run at any sequence lengths."),
    "sweep": Command("cli.sweep", None, "Train every point of a grid, on this machine or with Slurm."),
    "replay": Command("cli.replay", "Replay", "Repeat the step at which a run diverged and report where."),
    "analyze": Command("cli.analyze", "Analyze", "Measure the dynamics of every recurrent layer of a checkpoint."),
    "export": Command("cli.export", "Export", "Write a trained model as an ONNX or torch.export program."),
    "card": Command("cli.card", "Card", "Make a folder to publish from a finished run, with a model card."),
    "kernels": Command("cli.kernels", "Kernels", "Compile the kernels now, or show what executes each operation."),
    "bench": Command("benchmarks.command", "Bench", "Measure operations, layers and solvers against stated goals."),
    "benchmark": Command("benchmarks.models.command", "Benchmark", "Train any model on a suite, beside known models."),
    "data": Command("cli.data", "Data", "List, fetch and verify the data sets that tasks read."),
    "cochlea": Command("cli.cochlea", "Listen", "Convert wav files to spikes in the layout of SHD and SSC."),
    "reproduce": Command("paper.reproduce", "Reproduce", "Run experiments of the paper by their labels."),
    "compare": Command("paper.compare", "Compare", "Report for each claim of the paper whether it holds."),
    "report": Command("paper.report", "Report", "Write the report on the reproduction, with its figures."),
}
ALIASES = {"analyse": "analyze"}

DEPENDENCIES = ("tyro", "rich", "filelock")  # of the extra `lab`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: that of `run_and_exit_code`, or 2 for a command that does not exist.

    Args:
        arguments: The name of the command and its arguments; those of this process by default.

    Raises:
        SystemExit: With code 2 for wrong options, and with code 0 after `COMMAND --help`.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    modules = []
    while typed[:1] == ["--import"] and len(typed) > 1:
        modules.append(typed[1])
        typed = typed[2:]
    name = ALIASES.get(typed[0], typed[0]) if typed else ""
    if name in ("-h", "--help"):
        return run_and_exit_code(lambda: print(_overview()))
    if name not in COMMANDS:
        print(_overview() if not name else _unknown(name), file=sys.stderr)
        return 2
    missing = [package for package in DEPENDENCIES if importlib.util.find_spec(package) is None]
    if missing:
        print(f"adptnet {name} needs {', '.join(missing)}: pip install 'adptnet[lab]'", file=sys.stderr)
        return 1
    if arguments is None and name != "bench":  # benchmarks measure the allocator as users of the library have it
        from adptnet.ops import _buffers

        _buffers.keep_freed()
    return run_and_exit_code(lambda: _run(name, typed[1:], modules))


def run_and_exit_code(program: Callable[[], object]) -> int:
    """Run `program`, print an error of adptnet without its traceback, and return the exit code for a shell.

    Args:
        program: Called without arguments; its result is ignored.

    Returns:
        0; 1 after an `AdptnetError`; 128 plus the signal's number after `Interrupted`; 130 after Ctrl-C; 141 if the
        reader of the output has closed the pipe. Other exceptions are raised.
    """
    try:
        program()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 141  # 128 + SIGPIPE
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        from adptnet.errors import AdptnetError  # here, since it imports torch, which `adptnet --help` does not need

        from .._runtime import Interrupted

        if not isinstance(error, AdptnetError):
            raise
        if isinstance(error, Interrupted):
            print(error, file=sys.stderr)
            return 128 + error.signum
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _run(name: str, arguments: list[str], modules: list[str]) -> None:
    import tyro

    from .._own_objects import import_module

    for module in modules:
        import_module(module)

    command = COMMANDS[name]
    implementation = importlib.import_module(f"adptnet_lab.{command.module}")
    if command.options is None:
        kind = implementation.make_options(arguments)
    else:
        kind = getattr(implementation, command.options)
    implementation.run(tyro.cli(kind, args=arguments, prog=f"adptnet {name}"))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: adptnet [--import MODULE] COMMAND [OPTIONS]",
            "",
            "Recurrent layers with prescribed timescales and adjustable non-linearity.",
            "",
            *(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()),
            "",
            "`adptnet COMMAND --help` lists the options of a command. `--import MODULE` imports a module of",
            "your own, whose specs a run was trained with.",
        ]
    )


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"Perhaps you meant {close[0]!r}." if close else f"Known: {', '.join(COMMANDS)}."
    return f"adptnet has no command {name!r}. {hint}"
