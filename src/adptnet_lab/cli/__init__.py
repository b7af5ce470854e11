"""The command line: `adptnet COMMAND`. A command is a dataclass of its options and a function that takes it."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tyro.conf import Positional

__all__ = ["Kernels", "ended", "main"]


@dataclass(frozen=True)
class Kernels:
    """Build the compiled kernels ahead of their first use, or show what runs each operation."""

    action: Positional[Literal["build", "show"]] = "show"


def kernels(options: Kernels) -> None:
    from adptnet.ops import _build

    if options.action == "build":
        for path in _build.build_all():
            print(path)
        return
    for operation, what in _build.backends().items():
        print(f"{operation}: {what}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is that of `ended` (2, from tyro, for a wrong call)."""
    if arguments is not None:
        return ended(lambda: _run(list(arguments)))
    if "bench" not in sys.argv[1:2]:  # which measures what a caller of the library finds
        from adptnet.ops import _buffers

        _buffers.keep_freed()
    return ended(lambda: _run(sys.argv[1:]))


def ended(program: Callable[[], object]) -> int:
    """Runs `program` and returns its exit code: 0, or 1 for an error that is explained, which is shown by itself."""
    from adptnet.errors import AdptnetError

    from ..training import Interrupted

    try:
        program()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, `head` or a pager, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again as it ends
        return 141  # what a shell says of a program that the signal of a broken pipe ended
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 128 + error.signum
    except AdptnetError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        return 130
    return 0


def _run(given: list[str]) -> None:
    from tyro.extras import subcommand_cli_from_dict

    from .. import benchmarks
    from ..paper import compare, report, reproduce
    from . import analyze, cochlea, data, quickstart, sweep, train

    called, rest = (given[0], given[1:]) if given else ("", [])
    commands: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "quickstart": (quickstart.Quickstart, quickstart.run),
        "train": train.command(rest if called == "train" else ["--help"]),
        "evaluate": (train.Evaluate, train.evaluate),
        "sweep": sweep.command(rest if called == "sweep" else ["--help"]),
        "replay": (train.Replay, train.replay),
        "kernels": (Kernels, kernels),
        "bench": (benchmarks.Bench, benchmarks.run),
        "analyse": (analyze.Analyse, analyze.run),
        "cochlea": (cochlea.Listen, cochlea.run),
        "data": (data.Data, data.run),
        "reproduce": (reproduce.Reproduce, reproduce.run),
        "compare": (compare.Compare, compare.run),
        "report": (report.Report, report.run),
    }
    options = subcommand_cli_from_dict(
        {name: kind for name, (kind, _) in commands.items()},
        args=given,
        prog="adptnet",
        description="Recurrent layers with prescribed timescales and one dial for non-linearity.",
    )
    runs = dict(commands.values())
    runs[type(options)](options)
