"""Small experiments, and processes that run them."""

import multiprocessing
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file

from adptnet import nn
from adptnet.cells import ADPTSpec
from adptnet.spec import spec
from adptnet_lab import cli
from adptnet_lab.tasks import Batch, FiniteTask, Task, WordProblem
from adptnet_lab.tasks.base import IGNORED
from adptnet_lab.training import Experiment, SaveOptions, TrainConfig, detect_strategy, read_metrics, read_result, run


def make_experiment(task=None, *, width=6, norm="batch", dropout=0.1, beta=1.0, **training) -> Experiment:
    """Return an experiment with batch norm, dropout and a best by validation: all that a resumed run must restore."""
    task = task or WordProblem("S3", length=5)
    model = task.model(nn.BlockSpec(nn.LayerSpec(ADPTSpec(width, beta=beta)), norm=norm, dropout=dropout))
    settings = {"steps": 12, "batch_size": 8, "learning_rate": 1e-2, "evaluation_size": 24, "evaluation_batch": 10}
    return Experiment(task, model, TrainConfig(**{**settings, **training}))


@spec
class Ragged(FiniteTask):
    """A task with sequences of several lengths and loss windows of several sizes."""

    total: int = 23
    validation: int = 23
    test: int = 23

    @property
    def vocabulary(self):
        return 5

    chance = 0.2

    def size(self, split):
        return {"train": self.total, "validation": self.validation, "test": self.test}[split]

    def examples(self, split, indices, *, length=None):
        inputs = (indices.unsqueeze(1) * 7 + torch.arange(9) * (indices.unsqueeze(1) % 3 + 1)) % 5
        lengths = 3 + indices % 7
        targets = inputs.roll(1, 1).masked_fill(torch.arange(9) >= lengths.unsqueeze(1), IGNORED)
        return Batch(inputs, targets.masked_fill(torch.arange(9) < indices.unsqueeze(1) % 2, IGNORED), lengths)

    def scores(self, outputs, targets):
        return {"accuracy": float((outputs.argmax(-1) == targets)[targets != IGNORED].double().mean())}


@spec
class Endless(Task):
    """A task whose batches continue one another, three steps at a time."""

    vocabulary = 3
    chance = 1 / 3

    def batch(self, size, generator, *, length=None):
        return self.training_batch(0, size, 0)

    def training_batch(self, step, size, seed):
        tokens = torch.randint(3, (size, 400), generator=torch.Generator().manual_seed(seed))
        steps = torch.arange(3) + 4 + 3 * (step % 9)
        return Batch(tokens[:, steps], tokens[:, steps - 4], continues=step % 9 > 0)

    def evaluation(self, split, size, batch_size, *, seed=1, length=None):
        for step in range(5):
            yield self.training_batch(step, size, seed)

    def scores(self, outputs, targets):
        return {"accuracy": float((outputs.argmax(-1) == targets).double().mean())}


def have_same_bits(one: Path, other: Path) -> bool:
    """Return whether two runs ended with the same bits: weights, checkpoints, metrics and scores."""
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    ends = [sorted((folder / "checkpoints").glob("step-*"))[-1] for folder in (one, other)]
    files = ["model.safetensors", "optimiser.safetensors", "random.safetensors"]
    return (
        all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        and all((ends[0] / name).read_bytes() == (ends[1] / name).read_bytes() for name in files)
        and read_metrics(one / "metrics.jsonl") == read_metrics(other / "metrics.jsonl")
        and read_result(one)["test"] == read_result(other)["test"]
    )


def start_process(worker, *args):
    """Start `worker(*args)` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.small_runs", "pytest", "accelerate", "torch._dynamo", "safetensors.torch"])
    process = context.Process(target=worker, args=args)
    process.start()
    return process


def train_in_process(folder, experiment_json, saves=1, settings=None, sharded=False):
    """Resume a run with one thread, in float32; the target of a process."""
    torch.set_num_threads(1)
    os.environ.update(settings or {})
    strategy = detect_strategy(sharded=sharded) if sharded else None
    run(
        Experiment.from_json(experiment_json),
        Path(folder),
        resume=True,
        strategy=strategy,
        save_options=SaveOptions(steps=saves),
    )


def run_command_in_process(arguments, printed):
    """Run `adptnet` with one thread, in float32, as the leader of a process group; the target of a process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with open(printed, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        os.setsid()
        code = cli.main([str(argument) for argument in arguments])
    except KeyboardInterrupt:  # before the command installed its handler
        code = 130
    sys.exit(code)


def run_program_in_process(code, folder, printed):
    """Run the code of a page in a folder, with one thread and warnings as errors; the target of a process."""
    torch.set_num_threads(1)  # on a busy machine threads that wait for each other take minutes
    os.chdir(folder)
    with open(printed, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    exec(compile(code, "page", "exec"), {"__name__": "__main__"})


def count_group_members(number):
    """Return the number of processes of a group that are alive."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    found = [line.split() for line in listed.splitlines()]
    return sum(group == str(number) and not state.startswith("Z") for group, state in found)


def start_ranks(folder, experiment_json, count=2, saves=1, sharded=False):
    """Start a run in `count` processes that form one torch.distributed group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "ACCELERATE_USE_CPU": "1",
    }
    return [
        start_process(
            train_in_process,
            folder,
            experiment_json,
            saves,
            {**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            sharded,
        )
        for rank in range(count)
    ]
