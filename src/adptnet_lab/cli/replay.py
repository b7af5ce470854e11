"""`adptnet replay RUN`: repeat the step at which a run diverged."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from .. import training

__all__ = ["Replay", "run"]


@dataclass(frozen=True)
class Replay:
    """Repeat the step at which a run diverged, and report where the first value that is not finite occurred."""

    run: Positional[Path]
    """Folder of the run."""


def run(options: Replay) -> None:
    """Print the step, its loss and the diagnosis.

    Args:
        options: The options.
    """
    step, diagnosis = training.replay(options.run)
    print(f"step {step}: the loss was {diagnosis.loss}; {diagnosis}.")
