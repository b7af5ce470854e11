"""`adptnet train`, `evaluate`, `sweep` and `replay` as they are typed."""

import dataclasses
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
import tyro
from safetensors.torch import load_file

import adptnet
from adptnet import cells, directions, drive, errors, projections, spectra
from adptnet.spec import Spec
from adptnet_lab import cli, tasks, training
from adptnet_lab.cli import draft as drafts
from adptnet_lab.cli import layer_names, spec_flags, sweep
from adptnet_lab.cli.flag_fields import parse_value
from adptnet_lab.training import Experiment, SaveOptions, read_metrics, read_result
from support.small_runs import make_experiment, start_process

pytestmark = pytest.mark.timeout(300)  # processes start slowly on a busy machine

PAPER = ["--model.preset", "paper"]
SMALL = ["--model.width", "4", "--training.steps", "6", "--training.batch-size", "4", "--training.evaluation-size", "8"]


def run_command(*arguments):
    assert cli.main([str(argument) for argument in arguments]) == 0


def run_failing(capsys, *arguments):
    """Run a command that fails and return what it prints: an error of adptnet, or tyro's."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    said = capsys.readouterr()
    return " ".join((said.err + said.out).replace("│", " ").split())


def test_a_closed_pipe_gives_no_traceback():
    listing = [sys.executable, "-m", "adptnet", "kernels", "show"]
    with subprocess.Popen(listing, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 141


def test_a_run_continues_when_nobody_reads_its_lines(tmp_path):
    training_run = [sys.executable, "-m", "adptnet", "train", "copy-memory", *SMALL, "--output", str(tmp_path)]
    with subprocess.Popen(training_run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        command.stdout.close()
        assert command.stderr.read() == ""
    assert read_result(tmp_path)


def test_a_command_line_is_an_experiment(tmp_path, capsys):
    model = ["--model.beta", 4, "--model.depth", 2, "--model.norm", "rms", "--model.no-glu", "--model.gain", "lru"]
    parts = ["--model.spectrum", "Negative(S4DReal(), 0.5)", "--model.gate", "SoftplusGate"]
    parts += ["--model.projection", "LowRank(rank=2)", "--training.optimizer", "Adam(betas=(0.9, 0.99))"]
    how = ["--training.schedule", "cosine", "--training.clip", "None", "--training.lengths", 8, 16]
    flags = [*PAPER, *SMALL, *model, *parts, *how]
    run_command("train", "word-problem", "--task.group", "Z3", *flags, "--output", tmp_path / "a")
    found = training.read_experiment(tmp_path / "a")
    cell = cells.ADPTSpec(
        4,
        beta=4.0,
        spectrum=spectra.Negative(spectra.S4DReal(), 0.5),
        gate=drive.SoftplusGate(),
        gain=drive.LRU(),
        projection=projections.LowRank(rank=2),
    )
    assert found.task == tasks.WordProblem("Z3")
    assert found.model == found.task.model(adptnet.nn.BlockSpec(adptnet.nn.LayerSpec(cell), norm="rms", glu=False), 2)
    assert found.training.optimizer == training.Adam(betas=(0.9, 0.99))
    assert found.training == training.TrainConfig(
        steps=6,
        batch_size=4,
        evaluation_size=8,
        schedule=training.Cosine(),
        clip=None,
        lengths=(8, 16),
        optimizer=training.Adam(betas=(0.9, 0.99)),
    )
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert f"step 6, {read_result(tmp_path / 'a')['seconds']:.1f} s" in shown


def test_a_saved_config_takes_overrides_and_other_layers(tmp_path):
    run_command("train", "word-problem", *PAPER, *SMALL, "--output", tmp_path / "a")
    run_command("train", "--config", tmp_path / "a" / "config.json", "--model.beta", 1, "--output", tmp_path / "b")
    one, two = (training.read_experiment(tmp_path / name) for name in "ab")
    assert two.block.layer.cell == cells.ADPTSpec(4, beta=1.0)
    assert two.training == one.training
    run_command("train", "--config", tmp_path / "a", "--model.layer", "relu-rnn", "--output", tmp_path / "c")
    assert training.read_experiment(tmp_path / "c").block.layer.cell == cells.ReLURNN(4)
    draft = drafts.draft_from_experiment(one)
    wider = spec_flags.apply_flags(draft, ["--model.width", "8"])
    assert wider.block.layer.cell == cells.ADPTSpec(8)  # the state size follows the width
    assert spec_flags.apply_flags(draft, []).digest == one.digest


@pytest.mark.parametrize("name", sorted(layer_names.known_layers()))
def test_every_layer_has_a_name_and_flags(name):
    base = drafts.default_draft(tasks.WordProblem()).with_layer(name)
    assert spec_flags.apply_flags(base, ["--model.width", "8", "--model.dropout", "0.5"]).block.width == 8
    assert drafts.draft_from_experiment(spec_flags.apply_flags(base, [])) == base


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_every_flag_has_a_help_text(name):
    task, model, how = spec_flags.make_flags(drafts.default_draft(tasks.TASKS[name]()))
    for _, group, _ in (task, model, how):
        hints = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            texts = [note.help for note in hints[field.name].__metadata__ if hasattr(note, "help")]
            assert texts[0], field.name
    assert task[1].__doc__.startswith(tasks.TASKS[name].__name__)


@pytest.mark.parametrize("name", sorted(layer_names.known_networks()))
def test_every_spiking_network_has_a_name_and_flags(name):
    base = drafts.default_draft(tasks.SequentialImage()).with_layer(name)
    assert base.layer_name == name
    assert base.with_layer(None, 8).width == 8
    assert base.with_layer("adpt").layer_name == "adpt"
    with pytest.raises(errors.IncompatibleError, match=r"one output per sequence\. .*--model\.layer lif"):
        spec_flags.apply_flags(base._replace(task=tasks.WordProblem()), [])


@pytest.fixture
def frames(tmp_path):
    """Return flags that name an npz file of frames of three words."""
    path, labels = tmp_path / "frames.npz", np.arange(20) % 3
    np.savez(path, frames=np.ones((20, 250, 140), np.uint8), label=labels, is_test=np.arange(20) < 5)
    return ["--task.path", str(path)]


def read_frames_draft(*arguments):
    return drafts.read_draft(["event-frames", *map(str, arguments)])[1]


def list_time_steps(part):
    """Return every `dt` in seconds in a spec and the specs inside it."""
    found = [part.dt] if isinstance(getattr(part, "dt", None), float) else []
    inside = [getattr(part, field.name) for field in dataclasses.fields(part)]
    return sum((list_time_steps(value) for value in inside if isinstance(value, Spec)), found)


ALL = sorted({**layer_names.known_layers(), **layer_names.known_networks()})


@pytest.mark.parametrize("name", ALL)
def test_another_layer_has_the_dropout_and_the_time_step_of_all_others(name, frames):
    usual = read_frames_draft(*frames, "--model.layer", name)
    assert usual.body.dropout == 0
    assert set(list_time_steps(usual.body)) <= {0.004}
    merged = read_frames_draft(*frames, "--task.merge", 5, 1, "--model.layer", name)
    assert set(list_time_steps(merged.body)) <= {0.02}
    assert merged.layer_name == name
    longer = read_frames_draft(*frames, "--model.layer", name, "--task.bins", "Bins(125, 1.0)", "--task.merge=5", 1)
    assert set(list_time_steps(longer.body)) <= {0.04}


def test_neurons_with_a_time_step_of_their_own_keep_it(frames):
    arguments = [*frames, "--task.merge", "5", "1", "--model.layer", "silif-network", "--model.dt", "0.01"]
    given = spec_flags.apply_flags(drafts.default_draft(tasks.EventFrames()), arguments)
    assert given.model.neuron.dt == 0.01
    again = spec_flags.apply_flags(drafts.draft_from_experiment(given), ["--task.merge", "10", "1"])
    assert again.model.neuron.dt == 0.01
    follows = spec_flags.apply_flags(drafts.draft_from_experiment(given), ["--model.dt", "0.02"])
    assert (
        spec_flags.apply_flags(drafts.draft_from_experiment(follows), ["--task.merge", "10", "1"]).model.neuron.dt
        == 0.04
    )


def test_a_layer_of_a_sweep_keeps_the_dropout_and_the_depth_that_were_given(frames):
    given = [*frames, "--model.layer", "gru", "--model.dropout", "0.25", "--model.depth", "3"]
    base = drafts.draft_from_experiment(spec_flags.apply_flags(drafts.default_draft(tasks.EventFrames()), given))
    for name in ("silif", "silif-network", "spiking-adpt-network"):
        other = drafts.draft_from_experiment(spec_flags.apply_flags(base, ["--model.layer", name]))
        assert (other.body.dropout, other.depth, other.layer_name) == (0.25, 3, name)
        back = drafts.draft_from_experiment(spec_flags.apply_flags(other, ["--model.layer", "gru"]))
        assert (back.body.dropout, back.depth, back.layer_name) == (0.25, 3, "gru")


def test_the_commands_of_the_spiking_page_give_the_settings_of_its_table(tmp_path, monkeypatch):
    root = Path(__file__).parents[3]
    page = (root / "docs" / "how-to" / "spiking.md").read_text()
    command = re.search(r"    adptnet train (event-frames --task.path audiomnist(?:.*\\\n)+.*\n)", page)[1]
    name, *arguments = shlex.split(command.replace("\\\n", " "))
    path = tmp_path / "audiomnist_cochlea_frames.npz"
    labels, speakers = np.arange(600) % 10, np.arange(600) % 60 + 1
    np.savez(path, frames=np.ones((600, 250, 140), np.uint8), label=labels, speaker=speakers)
    monkeypatch.chdir(tmp_path)
    digits = importlib.import_module("adptnet_lab.benchmarks.studies.spoken_digits")
    rows = [json.loads(line) for line in (root / "results/benchmarks/spoken_digits.jsonl").read_text().splitlines()]
    settings = {(row["network"], row["setting"].get("beta")): row["setting"] for row in rows if row["stage"] == "test"}

    def make(*model):
        return spec_flags.apply_flags(drafts.default_draft(tasks.TASKS[name]()), [*arguments, *model])

    assert make().task == digits.make_task(Path(path.name), "test")
    assert make().model == digits.make_model("spiking-adpt", settings["spiking-adpt", 0.5])
    start, end = (arguments.index(flag) for flag in ("--model.layer", "--training.optimizer"))
    del arguments[start:end]
    common = ["--model.dropout", "0.25"]
    for network, *width in (
        ("silif", "--model.width", "128", "--model.threshold", "0.5", "--model.momentum", "0.1"),
        ("lif", "--model.width", "130", "--model.momentum", "0.1"),
        ("adlif", "--model.width", "129", "--model.momentum", "0.1"),
    ):
        model = make("--model.layer", f"{network}-network", *width, *common).model
        assert model == digits.make_model(network, settings[network, None])
    gru = make(*PAPER, "--model.layer", "gru", "--model.width", "43", "--model.depth", "2", *common).model
    assert gru == digits.make_model("gru", settings["gru", None])


def test_training_prints_the_settings_it_uses(frames, tmp_path, capsys):
    arguments = ["--task.merge", 25, 10, "--model.layer", "silif-network", "--model.width", 4, "--training.steps", 1]
    run_command("train", "event-frames", *frames, *arguments, "--training.batch-size", 4, "--output", tmp_path / "run")
    task, model, how = capsys.readouterr().out.splitlines()[:3]
    assert task == f"task: EventFrames(path={frames[1]!r}, merge=(25, 10)), steps of 100 ms"
    assert model.startswith("model: silif-network, depth 2: width=4, ")
    for setting in ("dt=0.1", "dropout=0.0", "momentum=0.05", "first=Dense(bias=False)"):
        assert f" {setting}" in model
    assert how == "training: TrainConfig(steps=1, batch_size=4)"
    run_command("train", "word-problem", *PAPER, *SMALL, "--output", tmp_path / "other")
    printed = capsys.readouterr().out
    assert "model: paper-adpt, depth 1: width=4, state_size=4, beta=0.125, spectrum=Linspace(" in printed
    assert "gate=None" in printed


def test_layers_have_the_names_of_the_paper():
    assert {"adpt", "linear-adpt", "relu-rnn", "tanh-rnn", "orthogonal-rnn"} <= set(layer_names.known_layers())
    assert layer_names.make_layer("linear-adpt", 4).cell.direction == directions.FromInput()


@pytest.mark.parametrize(
    "spec", [spectra.Sparse(spectra.Negative(spectra.Linspace(), 0.5), 0.75), None, 0.5, (0.1, 2.0)]
)
def test_what_prints_can_be_typed(spec):
    assert parse_value(repr(spec)) == spec


@pytest.mark.parametrize(
    "text", ["__import__('os')", "Linspace().build", "open('x')", "1 +", "lambda: 0", "Linspace(**{})"]
)
def test_nothing_else_can_be_typed(text):
    with pytest.raises(errors.SpecError):
        parse_value(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "name a task, or pass --config FILE. Known:"),
        (["train", "--model.beta", "1", "parity"], "Name the task first, e.g. adptnet train parity ..."),
        (["train", "word-problm"], "no task 'word-problm'. Perhaps you meant 'word-problem'"),
        (["train", "word-problem", "--model.beat", "1"], "Perhaps you meant: --model.beta"),
        (["train", "word-problem", "--model.layer", "relu-rn"], "Perhaps you meant 'relu-rnn'"),
        (["train", "word-problem", "--model.spectrum", "Linspac"], "Perhaps you meant 'Linspace'"),
        (["train", "word-problem", "--model.spectrum", "Linspace(dt_mim=1)"], "Perhaps you meant 'dt_min'"),
        (["train", "word-problem", "--model.spectrum", "LRU"], "spectrum must be a SpectrumSpec"),
        (["train", "word-problem", "--training.steps", "0"], "steps must be an integer >= 1"),
        (["train", "word-problem", "--training.lengths", "0"], "lengths must be an integer >= 1"),
        (["train", "word-problem", "--task.length", "0"], "length must be an integer >= 1"),
        (["train", "--config", "nowhere.json"], "nowhere.json cannot be read"),
        (["train", "word-problem", "--output", "/dev/null/run"], "cannot be written to (Not a directory)"),
        (["train", "word-problem", "--sharded"], "Start with torchrun"),
        (["train", "word-problem", "--training.optimizer", "adamw_torch"], "Known: Adam, AdamW, RMSprop."),
        (
            ["train", "word-problem", "--model.beta", "abc"],
            "'abc' is not a number, a tuple of numbers, or one of: TrainableBeta.",
        ),
        (["train", "word-problem", "--keep.steps", "0"], "steps must be an integer >= 1"),
        (["train", "word-problem", "--device", "gpu"], "Pass --device cpu"),
        (["sweep", "word-problem", "--jobs", "0"], "--jobs 0: the number of runs at the same time, at least 1"),
        (
            ["sweep", "parity", "--grid", "model.beta", "0", "--grid", "model.beta", "1"],
            "--grid model.beta is given twice",
        ),
        (
            ["sweep", "parity", "--grid", "model.layer", "adpt", "gru", "--grid", "model.beta", "0"],
            "This was the point model.layer=gru, model.beta=0 of the grid",
        ),
        (["sweep", "word-problem", "--grid", "model.beta"], "a field and its values"),
        (["sweep", "word-problem", "--grid", "model.bate", "1"], "--model.beta"),
        (["sweep", "word-problem", "--shard", "3/2"], "i/n with i from 1 to n"),
        (["sweep", "word-problem", "--cluster", "slurm"], "Use --cluster local on a machine without it"),
        (["replay", "."], "holds no failure to replay"),
        (["evaluate", "nowhere"], "Pass a config.json, or the folder of a run"),
    ],
)
def test_wrong_calls_are_explained(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without Slurm
    assert message in run_failing(capsys, *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adptnet_spec": 99}, "It was written by a newer adptnet"),
        ({"task": {"type": "WordProblem", "grup": "S3"}}, "WordProblem has no field 'grup'. Perhaps you meant 'group'"),
        ({"task": {"type": "WordProblen"}}, "Perhaps you meant 'WordProblem'"),
        ({"task": {"type": "WordProblem", "group": "Z2", "length": 5}}, "it needs ModelSpec"),
    ],
)
def test_a_config_that_is_not_understood_is_an_error(capsys, tmp_path, change, message):
    document = json.loads(make_experiment().to_json())
    for name, value in change.items():
        (document if name == "adptnet_spec" else document["spec"])[name] = value
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert message in run_failing(capsys, "train", "--config", tmp_path / "config.json")


@pytest.mark.parametrize("command", ["train", "sweep", "evaluate"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read (not a regular file)"),
        (os.mkfifo, "cannot be read (not a regular file)"),
        (Path.mkdir, "config.json cannot be read ("),
        (lambda path: path.write_bytes(b"\x00\xff" * 99), "is not text"),
        (lambda path: (path.touch(), os.truncate(path, 2**30)), "cannot be read (it has more than 1,048,576 bytes)"),
        (lambda path: path.symlink_to("config.json"), "cannot be read (Too many levels of symbolic links)"),
    ],
    ids=["device", "pipe", "folder", "binary", "large", "loop"],
)
def test_a_config_that_is_not_a_small_file_is_an_error_at_once(capsys, tmp_path, command, make, message):
    make(tmp_path / "config.json")
    given = [tmp_path] if command == "evaluate" else ["--config", tmp_path / "config.json"]
    assert message in run_failing(capsys, command, *given)


def test_a_name_that_is_too_long_is_not_a_config(capsys):
    assert "cannot be read (File name too long)" in run_failing(capsys, "train", "--config", "x" * 5000)


def find_commands(page):
    """Yield the arguments of every `adptnet` command on a page."""
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith(("adptnet ", "torchrun ")):
                words = shlex.split(line, comments=True)
                if any(word.startswith("my_tasks") for word in words):
                    continue  # needs modules of the user: test_own_objects.py
                yield words[words.index("adptnet") + 1 :]


PROJECT = Path(__file__).parents[3]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]


class Understood(Exception):
    """Raised when a command line was parsed, instead of running it."""


@pytest.mark.parametrize("words", [words for page in PAGES for words in find_commands(page)], ids=" ".join)
def test_every_command_in_the_docs_can_be_parsed(tmp_path, monkeypatch, words):
    def stop(options):
        raise Understood

    monkeypatch.chdir(tmp_path)
    command = cli.COMMANDS[cli.ALIASES.get(words[0], words[0])]
    monkeypatch.setattr(importlib.import_module(f"adptnet_lab.{command.module}"), "run", stop)
    if "--resume" in words:
        folder = tmp_path / words[words.index("--output") + 1]
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(make_experiment().to_json())
    with pytest.raises(Understood):
        cli.main(words)


def test_a_run_is_scored_again_at_other_lengths(tmp_path, capsys):
    run_command("train", "word-problem", *SMALL, "--output", tmp_path / "a")
    run_command("evaluate", tmp_path / "a", "--lengths", 3, 7, "--size", 16)
    assert "│      7 │" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "evaluation-test.json").read_text()).keys() == {"3", "7"}
    (tmp_path / "a" / "evaluation-test.json").unlink()
    (tmp_path / "a" / "evaluation-test.json").mkdir()
    said = run_failing(capsys, "evaluate", tmp_path / "a", "--lengths", 3, "--size", 16)
    assert "these scores could not be saved" in said
    assert "accuracy" in said  # and were shown
    (tmp_path / "a" / "evaluation-test.json").rmdir()
    (tmp_path / "a" / "model.safetensors").unlink()  # like a run that has not finished
    run_command("evaluate", tmp_path / "a", "--size", 16)


def test_a_grid_runs_every_point_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # like this process: sums depend on the number of threads
    command = ["sweep", "word-problem", *PAPER, *SMALL, "--grid", "model.beta", 0, 4, "--grid", "model.glu", "False"]
    run_command(*command, "--output", tmp_path, "--shard", "2/2")
    assert "2 points, 1 in this shard, 0 of them finished" in capsys.readouterr().out
    first = next(tmp_path.glob("*/result.json"))
    written = first.stat().st_mtime_ns
    run_command(*command, "--output", tmp_path, "--jobs", 2)
    shown = capsys.readouterr().out
    assert "2 points, 2 in this shard, 1 of them finished" in shown
    assert shown.count("done") == 1
    assert first.stat().st_mtime_ns == written
    points = [training.read_experiment(folder) for folder in tmp_path.glob("*")]
    assert {(point.block.layer.cell.beta, point.block.glu) for point in points} == {(0.0, False), (4.0, False)}
    assert has_weights_of_one_process(first.parent, tmp_path / "alone" / "a")


def test_equal_points_of_a_grid_are_one(tmp_path):
    base = drafts.default_draft(tasks.WordProblem())
    found = sweep.expand_grid(base, [("model.beta", "0", "0.0", "1")], tmp_path)
    assert [point.values for point in found] == [{"model.beta": "0"}, {"model.beta": "1"}]


def test_a_sweep_passes_its_save_options_to_its_runs(tmp_path, monkeypatch):
    started = []

    class Process:
        def __init__(self, command, **_):
            started.append(command)

        def wait(self):
            return 0

    monkeypatch.setattr(sweep.subprocess, "Popen", Process)
    keep = SaveOptions(minutes=2.5, steps=7, checkpoints=3, track=("tensorboard", "wandb"))
    sweep.run_locally(sweep.expand_grid(drafts.default_draft(tasks.WordProblem()), [], tmp_path), 1, keep)
    handed = started[0][started[0].index("--keep.minutes") :]
    kept = dataclasses.make_dataclass("Kept", [("keep", SaveOptions)])
    assert tyro.cli(kept, args=handed).keep == keep


def has_weights_of_one_process(folder, scratch):
    torch.set_default_dtype(torch.float32)
    try:
        training.run(training.read_experiment(folder), scratch)
    finally:
        torch.set_default_dtype(torch.float64)
    one, other = (load_file(each / "model.safetensors") for each in (folder, scratch))
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_point_that_fails_is_named(tmp_path, capsys):
    command = ["sweep", "word-problem", *PAPER, *SMALL, "--grid", "training.learning_rate", "1e30"]
    said = run_failing(capsys, *command, "--output", tmp_path)
    assert "1 of 1 runs failed: see" in said
    assert "training.learning_rate=1e30: FAILED: TrainingDiverged: the loss was" in said
    failed = next(path.parent for path in tmp_path.glob("*/failure"))
    assert "TrainingDiverged: the loss was" in (failed / "log.txt").read_text()
    run_command("replay", failed)
    assert "the loss was" in capsys.readouterr().out


def test_a_sweep_that_cannot_write_names_the_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    command = ["sweep", "word-problem", *SMALL, "--grid", "model.beta", 0, 1, "--output", tmp_path / "file"]
    said = run_failing(capsys, *command)
    assert "2 of 2 runs failed" in said
    assert re.search(rf"model.beta=1: FAILED: {tmp_path}/file/\w+ cannot be written to \(Not a directory\)", said)


def test_a_run_that_is_terminated_saves_and_prints_how_to_resume(tmp_path):
    command = [sys.executable, "-m", "adptnet", "train", "word-problem", *SMALL, "--training.steps", "100000"]
    process = subprocess.Popen([*command, "--output", str(tmp_path / "a")], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "a" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert f"Resume with: adptnet train --output {tmp_path / 'a'} --resume" in said
    saved = int(next((tmp_path / "a" / "checkpoints").iterdir()).name[5:])
    assert f"stopped after step {saved} of 100000" in said
    assert len(read_metrics(metrics)) == saved


def test_a_sweep_requests_its_resources_from_slurm(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="needs submitit: pip install 'adptnet[cluster]'")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "srun"):  # fakes that keep the script they are given
        path = programs / name
        path.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/handed\necho Submitted batch job 12\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    options = sweep.Slurm(partition="long", minutes=7, cpus=3, gpus=1, at_once=5)
    points = [sweep.SweepPoint({}, make_experiment(steps=2, seed=seed), tmp_path / str(seed)) for seed in (0, 1)]
    jobs = sweep.submit(points, sweep.make_executor(tmp_path / "slurm", options), SaveOptions())
    assert [job.job_id for job in jobs] == ["12_0", "12_1"]
    handed = (tmp_path / "handed").read_text()
    for line in ("partition=long", "time=7", "cpus-per-task=3", "gpus-per-node=1", "array=0-1%2", "signal="):
        assert f"--{line}" in handed, handed


def run_submitted_job(folder, experiment_json):
    """Run a submitit job on this machine and send it once the signal that its time is up, as Slurm does."""
    import psutil
    import submitit

    executor = submitit.AutoExecutor(folder / "jobs", cluster="local")
    executor.update_parameters(timeout_min=60)
    point = sweep.SweepPoint({}, Experiment.from_json(experiment_json), folder / "run")
    job = sweep.submit([point], executor, SaveOptions())[0]  # the first checkpoint would be after five minutes
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    psutil.Process(job._process.pid).children()[0].send_signal(signal.SIGUSR2)
    job.result()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_job_that_is_interrupted_is_queued_again(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    setup = make_experiment(steps=1000)  # more than are done before the first metrics are written
    process = start_process(run_submitted_job, tmp_path, setup.to_json())
    process.join(500)
    assert process.exitcode == 0
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [each["step"] > 0 for each in starts] == [False, True], starts
    assert has_weights_of_one_process(tmp_path / "run", tmp_path / "whole")
