"""Speed of the task generators: tokens per second on one core.

python -m adptnet_lab.benchmarks.studies.task_speed
"""

import functools
import time
from collections.abc import Callable

import torch

from adptnet.errors import DataError
from adptnet_lab import tasks
from adptnet_lab.tasks.base import make_generator

BATCH = 128
REPEATS = 20


def measure_rate(draw: Callable[[], tasks.Batch]) -> float:
    """Return the tokens (steps, for floating-point inputs) per second of CPU time that `draw` generates.

    Args:
        draw: Function that generates a batch.
    """
    draw()
    start, steps = time.process_time(), 0
    for _ in range(REPEATS):
        steps += draw().inputs.shape[:2].numel()
    return steps / (time.process_time() - start)


def main() -> None:
    """Print the rate of every task."""
    torch.set_num_threads(1)
    settings: dict[str, tasks.Task] = {name: kind() for name, kind in tasks.TASKS.items()}
    settings["word-problem, S5, 32 steps"] = tasks.WordProblem("S5", length=32)
    settings["mad-fuzzy-recall, 1024 steps"] = tasks.MadFuzzyRecall(length=1024)
    for name, task in settings.items():
        generator = make_generator(0)
        if isinstance(task, tasks.GeneratedTask):
            draw = functools.partial(task.draw, BATCH, generator, length=task.length)
        else:
            draw = functools.partial(task.batch, BATCH, generator)
        try:
            print(f"{name:32s} {measure_rate(draw) / 1e6:7.1f} million per second")
        except DataError as error:
            print(f"{name:32s} not measured: {error}")


if __name__ == "__main__":
    main()
