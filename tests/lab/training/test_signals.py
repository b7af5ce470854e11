"""Signals at random moments: `train`, `sweep` and `reproduce` leave the same bits as an uninterrupted run."""

import itertools
import json
import os
import random
import signal
import time
from collections import Counter

import pytest

from adptnet_lab.training import checkpoint_store
from support.small_runs import count_group_members, have_same_bits, run_command_in_process, start_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = ["--model.width", "4", "--task.length", "5", "--training.batch-size", "4", "--training.evaluation-size", "8"]
SMALL += ["--training.evaluate-every", "5", "--training.snapshot-steps", "4", "--keep.steps", "1"]
LABELS = ["table:error_summary", "fig:low-param_priors", "fig:cayley_ablation", "fig:eigenvalue_dt_min_max"]


def send_signals(tmp_path, arguments, output, progress, counts, seed):
    """Interrupt a command until `counts` signals were sent, in as many folders as that takes; return the folders.

    Each signal is sent after some progress since the last one, or at any time after a start. A stopped process
    continues. A process that ended is started again, in a new folder if its work was finished.

    Args:
        tmp_path: The parent of the folders.
        arguments: The arguments of the command.
        output: The option that names the folder.
        progress: A function that measures the work done in a folder.
        counts: The number of signals of each kind.
        seed: The seed of the moments.
    """
    draw = random.Random(seed)
    waiting = list(Counter(counts).elements())
    draw.shuffle(waiting)
    folders = []
    sent = Counter()
    for number in itertools.count():
        folders.append(tmp_path / f"interrupted-{number}")
        done = False
        while not done:
            process = start_process(run_command_in_process, [*arguments, output, folders[-1]], tmp_path / "printed")
            while process.is_alive() and _find_group(process.pid) != process.pid:
                time.sleep(0.002)
            while process.is_alive() and waiting:
                wait_for_moment(process, lambda: progress(folders[-1]), draw)
                if process.is_alive():
                    sent[waiting[-1]] += send(process, waiting.pop(), draw)
            process.join()
            while count_group_members(process.pid):  # the runs of a sweep that was killed end by themselves
                time.sleep(0.2)
            done = process.exitcode == 0
            assert process.exitcode in (0, 1, 130, 143, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
            assert process.exitcode != 1 or "sweep" in arguments, (tmp_path / "printed").read_text()
        if not waiting:
            print(dict(sent), f"in {len(folders)} folders")
            assert sent == counts
            return folders


def wait_for_moment(process, progress, draw):
    if draw.random() < 0.3:
        process.join(draw.uniform(0, 1.5))
        return
    aim = progress() + draw.randint(1, 3)
    while progress() < aim and process.is_alive():
        time.sleep(0.002)
    process.join(draw.uniform(0, 0.05))


def send(process, number, draw):
    """Send a signal as a user or the system would; return whether the process was still alive."""
    try:
        everyone = number == signal.SIGINT or (number != signal.SIGTERM and draw.random() < 0.7)
        deliver = os.killpg if everyone else os.kill
        deliver(process.pid, number)
        if number == signal.SIGSTOP:
            process.join(draw.uniform(0, 0.2))
            deliver(process.pid, signal.SIGCONT)
        else:
            process.join()
    except ProcessLookupError:
        return 0
    return 1


def _find_group(number):
    try:
        return os.getpgid(number)
    except ProcessLookupError:
        return None


def run_uninterrupted(tmp_path, arguments, output):
    """Run the command uninterrupted and return its folder."""
    process = start_process(run_command_in_process, [*arguments, output, tmp_path / "whole"], tmp_path / "printed")
    process.join()
    assert process.exitcode == 0, (tmp_path / "printed").read_text()
    return tmp_path / "whole"


def count_steps(folder):
    return (checkpoint_store.CheckpointStore(folder / "checkpoints").steps() or [0])[0]


def test_a_run_that_is_interrupted_again_and_again_has_the_bits_of_an_uninterrupted_one(tmp_path):
    arguments = ["train", "word-problem", *SMALL, "--training.steps", 60, "--resume"]
    counts = {signal.SIGKILL: 18, signal.SIGTERM: 10, signal.SIGINT: 6, signal.SIGSTOP: 10}
    whole = run_uninterrupted(tmp_path, arguments, "--output")
    for folder in send_signals(tmp_path, arguments, "--output", count_steps, counts, seed=1):
        assert have_same_bits(whole, folder)
        snapshot = "snapshots/step-4.safetensors"
        assert (folder / snapshot).read_bytes() == (whole / snapshot).read_bytes()


def test_a_sweep_that_is_interrupted_again_and_again_has_the_bits_of_an_uninterrupted_one(tmp_path):
    arguments = ["sweep", "word-problem", *SMALL, "--training.steps", 40, "--grid", "model.beta", 0, 1, "--jobs", 2]
    counts = {signal.SIGKILL: 7, signal.SIGTERM: 4, signal.SIGINT: 4, signal.SIGSTOP: 7}
    whole = run_uninterrupted(tmp_path, arguments, "--output")
    points = [path.name for path in whole.iterdir()]
    assert len(points) == 2

    def steps_of_all(folder):
        return sum(count_steps(folder / point) for point in points)

    for folder in send_signals(tmp_path, arguments, "--output", steps_of_all, counts, seed=2):
        assert all(have_same_bits(whole / point, folder / point) for point in points)


def read_rows(folder):
    """Return the rows without times and machine, in the order of their points and without duplicates."""
    found = {}
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # incomplete: the process was killed
            point = json.dumps([row["label"], row["settings"], row["seed"]])
            numbers = {name: value for name, value in row.items() if name not in ("time", "machine")}
            assert found.setdefault(point, numbers) == numbers
    return dict(sorted(found.items()))


def test_a_reproduction_that_is_interrupted_again_and_again_has_the_rows_of_an_uninterrupted_one(tmp_path):
    arguments = ["reproduce", *LABELS, "--scale", "smoke"]
    counts = {signal.SIGKILL: 16, signal.SIGTERM: 8, signal.SIGINT: 6, signal.SIGSTOP: 10}
    whole = read_rows(run_uninterrupted(tmp_path, arguments, "--rows"))
    assert len(whole) == 52
    for folder in send_signals(tmp_path, arguments, "--rows", lambda folder: len(read_rows(folder)), counts, seed=3):
        assert read_rows(folder) == whole
