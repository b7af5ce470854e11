"""How fast the generators are: tokens a second on one core.

python -m adptnet_lab.benchmarks.studies.task_speed
"""

import functools
import time

import torch

from adptnet.errors import DataError
from adptnet_lab import tasks
from adptnet_lab.tasks.base import generator_for

BATCH = 128
REPEATS = 20


def rate(draw) -> float:
    """Tokens (steps, for numbers) a second of processor time."""
    draw()
    begun, steps = time.process_time(), 0
    for _ in range(REPEATS):
        steps += draw().inputs.shape[:2].numel()
    return steps / (time.process_time() - begun)


def main() -> None:
    torch.set_num_threads(1)
    settings = {name: kind() for name, kind in tasks.TASKS.items()}
    settings["word-problem, S5, 32 steps"] = tasks.WordProblem("S5", length=32)
    settings["mad-fuzzy-recall, 1024 steps"] = tasks.MadFuzzyRecall(length=1024)
    for name, task in settings.items():
        generator = generator_for(0)
        fixed = isinstance(task, tasks.GeneratedTask)
        draw = functools.partial(task.draw, length=task.length) if fixed else task.batch
        try:
            print(f"{name:32s} {rate(functools.partial(draw, BATCH, generator)) / 1e6:7.1f} million a second")
        except DataError as error:
            print(f"{name:32s} not measured: {error}")


if __name__ == "__main__":
    main()
