"""How fast the generators are: tokens a second on one core.

python benchmarks/tasks.py
"""

import time

import torch

from adptnet import tasks
from adptnet.tasks.base import generator_for

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
        if isinstance(task, tasks.GeneratedTask):
            found = rate(lambda task=task, g=generator: task.draw(BATCH, g, length=task.length))
        else:
            found = rate(lambda task=task, g=generator: task.batch(BATCH, g))
        print(f"{name:32s} {found / 1e6:7.1f} million a second")


if __name__ == "__main__":
    main()
