"""Runs in folders: nothing is lost, whatever ends them, and a resumed run has the numbers of one without a cut."""

import contextlib
import errno
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import adptnet
from adptnet.errors import CheckpointError, InputError, SpecError
from adptnet_lab import training
from adptnet_lab.tasks import Forecast, Text, WordProblem
from adptnet_lab.training import (
    CheckpointWarning,
    Cosine,
    FolderInUse,
    Interrupted,
    Keeping,
    ReduceOnPlateau,
    RMSprop,
    TrainConfig,
    TrainingDiverged,
    evaluate,
    finished,
    launched,
    read_metrics,
    replay,
    run,
    store,
)
from adptnet_lab.training.evaluation import score_of
from adptnet_lab.training.lock import hold_folder
from adptnet_lab.training.runs import trained
from adptnet_lab.training.signals import stoppable
from adptnet_lab.training.state import Progress
from support.small_runs import Endless, Ragged, experiment, same, start, start_ranks, train_in

pytestmark = pytest.mark.timeout(300)  # processes start slowly on a busy machine

EVERYTHING = {
    "evaluate_every": 3,
    "exponents_every": 2,
    "schedule": ReduceOnPlateau(warmup=0.1, factor=0.5, patience=1),
    "snapshot_steps": (4,),
}


@pytest.fixture(autouse=True, scope="module")
def single_precision():
    """As processes of their own have it."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def cut(folder, wanted, step, **keeping):
    """A run that stops after `step`, as if it had been asked to."""
    from adptnet_lab.training import folder as run_folder

    before = run_folder.RunFolder.save

    def save(self, state):
        before(self, state)
        if state.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "save", save)
        with pytest.raises(Interrupted, match=f"stopped after step {step + 1} of 12.* --resume"):
            run(wanted, folder, keeping=Keeping(**keeping))


def test_a_run_leaves_everything_in_its_folder(tmp_path, capsys):
    wanted = experiment(lengths=(5, 9), **EVERYTHING)
    result = run(wanted, tmp_path / "a")
    folder = tmp_path / "a"
    assert adptnet.Spec.from_json((folder / "config.json").read_text()) == wanted
    started = json.loads((folder / "environment.json").read_text())
    assert started[0]["step"] == 0
    assert started[0]["torch"] == torch.__version__
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    evaluations = [line for line in lines if "validation" in line]
    assert [line["step"] for line in evaluations] == [3, 6, 9, 12]
    assert evaluations[0]["validation"].keys() == {"5", "9"}
    assert ["exponents" in line["layers"]["blocks.0.layer"] for line in evaluations] == [False, True, False, True]
    assert len(evaluations[1]["layers"]["blocks.0.layer"]["exponents"]) == 6
    assert finished(folder) == result
    assert result["test"].keys() == {"5", "9"}
    assert "step 12/12  loss" in capsys.readouterr().out
    model = adptnet.load(folder / "model.safetensors")
    assert evaluate(model, wanted.task, (5, 9), size=24, batch_size=10)[9] == result["test"]["9"]
    assert isinstance(adptnet.load(folder / "snapshots" / "step-4.safetensors"), adptnet.SequenceModel)


def test_the_weights_of_the_best_evaluation_are_kept(tmp_path):
    wanted = experiment(select_by="loss", learning_rate=0.3, **EVERYTHING)
    result = run(wanted, tmp_path / "best")
    lines = read_metrics(tmp_path / "best" / "metrics.jsonl")
    losses = {line["step"]: line["validation"]["5"]["loss"] for line in lines if "validation" in line}
    assert result["step"] == min(losses, key=losses.get)
    chosen = evaluate(trained(tmp_path / "best"), wanted.task, [5], split="validation", size=24, batch_size=10)
    assert chosen[5]["loss"] == pytest.approx(min(losses.values()))
    last = run(experiment(select="last", learning_rate=0.3, **EVERYTHING), tmp_path / "last")
    assert last["step"] == 12


@pytest.mark.parametrize("task", [Text, Forecast, WordProblem])
def test_more_accuracy_is_better_and_less_error_whatever_the_task_reports(task):
    def more_is_better(name):
        return score_of({5: {name: 1.0}}, task(), TrainConfig(select_by=name))[1]

    assert more_is_better("accuracy")
    assert not more_is_better("loss")
    assert more_is_better(task.metric) == (task is WordProblem)


def test_a_score_that_is_no_number_is_never_the_best():
    progress, settings = Progress(), TrainConfig(evaluate_every=1, patience=3)
    judged = [progress.judge(score, False, settings) for score in (math.nan, 2.0, math.nan, 1.0)]
    assert judged == [False, True, False, True]
    assert [progress.judge(math.nan, False, settings) for _ in range(3)] == [False] * 3
    assert progress.best == 1.0
    assert progress.stopped  # but patience counts it


def test_a_run_stops_early_when_asked_to_by_its_settings(tmp_path):
    patient = experiment(evaluate_every=1, patience=2, learning_rate=1e-12, norm="layer")
    assert run(patient, tmp_path / "patience")["step"] == 1
    assert len(read_metrics(tmp_path / "patience" / "metrics.jsonl")) == 6
    assert run(experiment(evaluate_every=4, stop_at=0.0), tmp_path / "reached")["step"] == 4


@pytest.mark.parametrize("step", [1, 7])
def test_a_run_that_was_asked_to_stop_goes_on_to_the_same_bits(tmp_path, step):
    wanted = experiment(**EVERYTHING)
    run(wanted, tmp_path / "whole")
    cut(tmp_path / "cut", wanted, step, steps=1)
    run(wanted, tmp_path / "cut", resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")
    assert [s["step"] for s in json.loads((tmp_path / "cut" / "environment.json").read_text())] == [0, step + 1]


def test_a_second_signal_of_another_kind_is_a_request_too_and_one_of_the_same_kind_acts():
    """Ctrl-C reaches the runs of a sweep, and so does the SIGTERM by which the sweep ends them."""
    with stoppable() as request:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert request.signum == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_that_is_resumed_in_another_environment_lists_what_differs(tmp_path):
    wanted = experiment()
    cut(tmp_path / "cut", wanted, 5, steps=5)
    path = tmp_path / "cut" / "environment.json"
    (begun,) = json.loads(path.read_text())
    assert begun["threads"] == torch.get_num_threads()
    assert begun["device"] == "cpu"
    then = {**begun, "adptnet": "0.0.1", "torch": "1.13.0", "python": "2.7.18", "threads": 999, "device": "H100"}
    then["backend"] = {**begun["backend"], "adpt_scan": "compiled kernel 0123456789ab"}
    path.write_text(json.dumps([then, {**begun, "step": 6}]))  # the second start has made no step
    with pytest.warns(CheckpointWarning, match=r"resumed from step 6 .* may differ in the last digits") as said:
        run(wanted, tmp_path / "cut", resume=True)
    listed = str(said[0].message).splitlines()[1:]
    names = ["adptnet", "torch", "python", "threads", "device"]
    expected = [f"  {name}: {then[name]} → {begun[name]}" for name in names]
    expected.append(f"  backend.adpt_scan: compiled kernel 0123456789ab → {begun['backend']['adpt_scan']}")
    assert sorted(listed) == sorted(expected)
    assert len(said) == 1
    assert [start["step"] for start in json.loads(path.read_text())] == [0, 6, 6]
    assert finished(tmp_path / "cut")


@pytest.mark.skipif(adptnet.backends()["adpt_scan"].startswith("reference"), reason="no compiled kernels here")
def test_a_run_that_is_resumed_with_another_backend_says_so(tmp_path, monkeypatch):
    cut(tmp_path / "a", experiment(), 5, steps=5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run(experiment(), tmp_path / "a", resume=True)  # the same backend: no warning
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    with pytest.warns(CheckpointWarning, match=r"backend\.adpt_scan: compiled kernel \w+ → reference"):
        run(experiment(), tmp_path / "b", resume=True)


def test_a_checkpoint_of_other_settings_is_not_resumed_though_config_json_is_gone(tmp_path):
    cut(tmp_path / "a", experiment(), 5, steps=5)
    (tmp_path / "a" / "config.json").unlink()
    other = experiment(learning_rate=0.5, schedule=Cosine())
    with pytest.raises(CheckpointError, match="step-000000006 is of another experiment") as refused:
        run(other, tmp_path / "a", resume=True)
    with pytest.raises(InputError, match=r"already holds this run. Pass --resume"):
        run(experiment(), tmp_path / "a")
    assert "training.learning_rate was 0.01 and is 0.5" in str(refused.value)
    assert "training.schedule.type was 'Linear' and is 'Cosine'" in str(refused.value)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(CheckpointError, match=r"weights of another model: .*float32, .*float64"):
            run(experiment(), tmp_path / "a", resume=True)
    finally:
        torch.set_default_dtype(torch.float32)
    run(experiment(), tmp_path / "a", resume=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("progress.json", b"[]"),
        ("progress.json", b'{"step": "7"}'),
        ("model.safetensors", b"no tensors"),
        ("random.safetensors", None),
        ("run.json", b"[1]"),
        ("run.json", b'{"metrics": 7}'),
    ],
)
def test_a_checkpoint_of_something_else_is_named_even_if_its_sums_are_right(two_checkpoints, tmp_path, name, content):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    (folder / "result.json").unlink()
    path = folder / "checkpoints" / "step-000000012"
    files = {**store.read_folder(path), name: content}
    store.write_folder(path, {name: content for name, content in files.items() if content is not None})
    with pytest.raises(CheckpointError, match=r"step-000000012 does not hold|cannot be of step '7'"):
        run(experiment(evaluate_every=5), folder, resume=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimiser": RMSprop(momentum=0.9), "schedule": Cosine(warmup=0.2), "accumulation": 2},
        {"task": Ragged(), "optimiser": training.AdamW(fused=True), "snapshot_epochs": (2,)},
        {"task": Endless(), "evaluate_every": 5, "accumulation": 2},
        {
            "optimiser": training.Adam(),
            "weight_decay": 0.1,
            "solver": "conv-deer",
            "evaluate_every": 5,
            "beta": 0.1,
        },
    ],
)
def test_every_optimiser_schedule_and_solver_resumes(tmp_path, settings):
    wanted = experiment(**settings)
    run(wanted, tmp_path / "whole")
    cut(tmp_path / "cut", wanted, 5, steps=5)
    run(wanted, tmp_path / "cut", resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")


def killed_until_done(folder, begin, kills, steps, draw):
    """Starts a run again and again and kills it at random moments: some steps on, and somewhere inside one."""
    kept = store.Store(folder / "checkpoints")
    for _ in range(kills):
        processes = begin()
        aim = (kept.steps() or [0])[0] + draw.randint(1, 2 * steps // (3 * kills))
        while (kept.steps() or [0])[0] < aim and all(process.is_alive() for process in processes):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        assert all(process.is_alive() for process in processes), "the run ended by itself"
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
    for process in begin():
        process.join(250)
        assert process.exitcode == 0
    return len(json.loads((folder / "environment.json").read_text())) - 1


def the_run_is_the_same(tmp_path, begin, kills, steps, seed):
    assert (
        killed_until_done(tmp_path / "killed", lambda: begin(tmp_path / "killed"), kills, steps, random.Random(seed))
        == kills
    )
    for process in begin(tmp_path / "whole"):
        process.join(250)
    assert same(tmp_path / "whole", tmp_path / "killed")


def kept_busy(steps):
    return experiment(steps=steps, evaluate_every=7, exponents_every=2, snapshot_steps=(4,)).to_json()


@pytest.mark.parametrize(
    ("kills", "steps"),
    [(3, 40), pytest.param(20, 300, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_kill_9_at_random_moments_loses_nothing(tmp_path, kills, steps):
    the_run_is_the_same(tmp_path, lambda folder: [start(train_in, folder, kept_busy(steps))], kills, steps, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharded", [False, True])
def test_kill_9_of_two_ranks_at_random_moments_loses_nothing(tmp_path, sharded):
    the_run_is_the_same(tmp_path, lambda folder: start_ranks(folder, kept_busy(60), sharded=sharded), 5, 60, 2)


def curve(folder):
    return torch.tensor([line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line])


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_have_the_loss_curve_of_one_process(tmp_path, sharded):
    wanted = experiment(Ragged(), dropout=0.0, batch_size=7, steps=10, evaluate_every=4, beta=0.0 if sharded else 1.0)
    run(wanted, tmp_path / "one")
    for process in start_ranks(tmp_path / "two", wanted.to_json(), sharded=sharded):
        process.join(250)
        assert process.exitcode == 0
    torch.testing.assert_close(curve(tmp_path / "two"), curve(tmp_path / "one"), rtol=1e-5, atol=1e-6)
    assert finished(tmp_path / "two")["score"] == pytest.approx(finished(tmp_path / "one")["score"])
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    found = [[line["validation"]["9"]["accuracy"] for line in lines if "validation" in line] for lines in (one, two)]
    assert found[0] == pytest.approx(found[1])


def test_sequences_that_go_on_are_given_the_state_they_left(tmp_path):
    wanted = experiment(Endless(), dropout=0.0, norm="layer", steps=3, learning_rate=1e-30)
    model = wanted.model.build()
    losses = training.train(model, wanted.task, wanted.training).losses
    windows = [wanted.task.training_batch(step, 8, 0) for step in range(3)]
    outputs = model(torch.cat([window.inputs for window in windows], 1))[0].split(3, 1)
    for loss, output, window in zip(losses, outputs, windows, strict=True):
        assert loss == pytest.approx(wanted.task.loss(output, window.targets).item(), rel=1e-6)
    process = start_ranks(tmp_path / "two", experiment(Endless(), dropout=0.0, evaluate_every=4).to_json())
    run(experiment(Endless(), dropout=0.0, evaluate_every=4), tmp_path / "one")
    for rank in process:
        rank.join(250)
    torch.testing.assert_close(curve(tmp_path / "two"), curve(tmp_path / "one"), rtol=1e-5, atol=1e-6)
    assert finished(tmp_path / "two")["score"] == pytest.approx(finished(tmp_path / "one")["score"])


def test_a_batch_in_parts_is_the_batch(tmp_path):
    whole = experiment(Ragged(), dropout=0.0, norm="layer", batch_size=7)
    parts = experiment(Ragged(), dropout=0.0, norm="layer", batch_size=7, accumulation=3)
    run(whole, tmp_path / "whole")
    run(parts, tmp_path / "parts")
    torch.testing.assert_close(curve(tmp_path / "parts"), curve(tmp_path / "whole"), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="a batch of 2 cannot be cut into 3 parts"):
        run(experiment(batch_size=2, accumulation=3), tmp_path / "few")


def test_reduced_precision_learns_and_resumes(tmp_path):
    wanted = experiment(precision="bf16", steps=12)
    run(wanted, tmp_path / "whole")
    cut(tmp_path / "cut", wanted, 5, steps=5)
    run(wanted, tmp_path / "cut", resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")
    run(experiment(), tmp_path / "full")
    assert not torch.equal(curve(tmp_path / "full"), curve(tmp_path / "whole"))
    torch.testing.assert_close(curve(tmp_path / "full"), curve(tmp_path / "whole"), rtol=0.1, atol=0.1)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """A finished run with its last two checkpoints, and the files of the one before the last."""
    folder = tmp_path_factory.mktemp("run") / "a"
    run(experiment(evaluate_every=5), folder, keeping=Keeping(steps=6))
    return folder, store.read_folder(folder / "checkpoints" / "step-000000006")


def flipped(path: Path, position: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)


def test_any_changed_byte_of_the_newest_checkpoint_is_noticed(two_checkpoints, tmp_path):
    folder, before = two_checkpoints
    kept = shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    newest = kept / "step-000000012"
    tried = 0
    for path in sorted(newest.iterdir()):
        size = path.stat().st_size
        places = range(size) if path.name in ("manifest.json", "progress.json") else range(0, size, size // 25 + 1)
        for position in [*places, size - 1]:
            flipped(path, position, 1 << position % 8)
            with pytest.warns(CheckpointWarning, match=f"{path.name} (is not as it was written|cannot be read)"):
                step, files = store.Store(kept).newest()
            assert (step, files) == (6, before)
            flipped(path, position, 1 << position % 8)
            tried += 1
    assert store.Store(kept).newest()[0] == 12
    assert tried > 600


class Killed(BaseException):
    """Stands for SIGKILL: no operation on files does anything from then on."""


def killed_at(number, patch):
    """Let the process be killed at the `number`-th change of a file or folder; return how many there were."""
    done = [0]

    def dying(real):
        def operation(*args, **options):
            done[0] += 1
            if done[0] >= number:
                raise Killed
            return real(*args, **options)

        return operation

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open"):
        patch.setattr(os, name, dying(getattr(os, name)))
    patch.setattr("builtins.open", dying(open))
    return done


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path, keep):
    """Of a step that is saved again, also when the save after a kill is killed as well."""
    old, new = ({"a": content * 100, "b": content} for content in (b"old", b"new"))
    for number in itertools.count(1):
        kept = store.Store(tmp_path / str(number), keep)
        kept.save(7, old)
        for files, again in ((new, number), (old, 2 * number // 3 + 1), (new, number)):
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
                operations = killed_at(again, patch)
                kept.save(7, files)
            step, found = store.Store(kept.folder, keep).newest()
            assert step == 7
            assert found in (old, new), f"killed at operation {again}"
        whole = operations[0] < number
        before = {path.name for path in kept.folder.iterdir()}
        assert kept.newest(put_aside=True) == (step, found)
        assert kept.steps() == [7], before
        kept.save(8, new)
        assert kept.newest() == (8, new)
        assert sorted(path.name for path in kept.folder.iterdir()) == [
            kept.path(step).name for step in sorted((7, 8)[-keep:])
        ]
        if whole:
            break
    assert number > 20


def test_a_damaged_checkpoint_is_replaced_by_the_copy_that_an_interrupted_save_left(tmp_path):
    kept = store.Store(tmp_path)
    kept.save(7, {"a": b"1"})
    shutil.copytree(kept.path(7), tmp_path / ".old-step-000000007.1a2b3c4d")
    shutil.copytree(kept.path(7), tmp_path / ".draft-step-000000009.1a2b3c4d")
    (tmp_path / ".draft-step-000000009.1a2b3c4d" / "a").unlink()  # half written: of no interest
    flipped(kept.path(7) / "a", 0)
    assert kept.newest() == (7, {"a": b"1"})
    assert kept.newest(put_aside=True) == (7, {"a": b"1"})
    assert store.read_folder(kept.path(7)) == {"a": b"1"}
    assert (tmp_path / "refused-step-000000007").is_dir()


def test_a_failure_whose_record_was_written_again_can_be_replayed_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(WordProblem, "loss", lambda self, outputs, targets: outputs.sum() * math.nan)
    with pytest.raises(TrainingDiverged):
        run(experiment(), tmp_path / "a")
    (tmp_path / "a" / "failure").rename(tmp_path / "a" / ".old-failure.1a2b3c4d")
    assert replay(tmp_path / "a")[0] == 1


@pytest.mark.parametrize("damage", ["cut", "missing", "half written"])
def test_a_checkpoint_that_is_not_whole_is_refused_by_name_and_the_one_before_used(two_checkpoints, tmp_path, damage):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    for name in ("model.safetensors", "result.json"):
        (folder / name).unlink()
    newest = folder / "checkpoints" / "step-000000012"
    if damage == "cut":
        os.truncate(newest / "optimiser.safetensors", 100)
    elif damage == "missing":
        (newest / "optimiser.safetensors").unlink()
    else:
        (newest / "manifest.json").unlink()
    name = "manifest.json" if damage == "half written" else "optimiser.safetensors"
    with pytest.warns(CheckpointWarning, match=rf"step-000000012/{name}.* the one of step 6 is used"):
        run(experiment(evaluate_every=5), folder, resume=True, keeping=Keeping(steps=6))
    assert same(two_checkpoints[0], folder)
    assert (folder / "checkpoints" / "refused-step-000000012").is_dir()


def test_looking_at_a_run_moves_none_of_its_files(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    for name in ("model.safetensors", "result.json"):
        (folder / name).unlink()
    flipped(folder / "checkpoints" / "step-000000012" / "progress.json", 3)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.warns(CheckpointWarning, match=r"step-000000012/progress.json .* one of step 6 is used"):
        trained(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_without_a_good_checkpoint_the_run_does_not_begin_again(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    (folder / "result.json").unlink()
    for path in (folder / "checkpoints").glob("*/progress.json"):
        flipped(path, 3)
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* can be used"):
        run(experiment(evaluate_every=5), folder, resume=True)
    assert (folder / "checkpoints" / "step-000000012").exists()


def test_reading_a_checkpoint_unpickles_nothing(two_checkpoints, tmp_path, monkeypatch):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    (folder / "result.json").unlink()
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    run(experiment(evaluate_every=5), folder, resume=True)
    assert same(two_checkpoints[0], folder)


def test_a_checkpoint_of_a_newer_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "VERSION", 2)
    store.write_folder(tmp_path / "step-1", {"a": b"1"})
    monkeypatch.setattr(store, "VERSION", 1)
    with pytest.raises(CheckpointError, match="has version 2; this adptnet reads versions up to 1"):
        store.read_folder(tmp_path / "step-1")


def test_a_full_disk_keeps_the_last_good_checkpoint_and_says_so(tmp_path, monkeypatch):
    real, calls = store.write_whole, []

    def write_whole(path, content):
        calls.append(path)
        if "step-000000006" in str(path) and path.name == "random.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(store, "write_whole", write_whole)
    with pytest.warns(CheckpointWarning, match=r"step 6 .*No space left.*the last good one is of step 3"):
        run(experiment(), tmp_path / "full", keeping=Keeping(steps=3, checkpoints=9))
    assert sorted(p.name[-2:] for p in (tmp_path / "full" / "checkpoints").iterdir()) == ["03", "09", "12"]
    monkeypatch.undo()
    run(experiment(), tmp_path / "free")
    assert same(tmp_path / "free", tmp_path / "full")


def test_a_disk_that_is_full_from_the_beginning_is_said(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training.folder, "write_json", full)
    with pytest.raises(CheckpointError, match=r"a cannot be written to .No space left.*Go on with: .* --resume"):
        run(experiment(), tmp_path / "a")


@pytest.fixture
def metrics(tmp_path):
    made = training.metrics.Metrics(tmp_path / "metrics.jsonl")
    yield made
    made.close()


def test_metrics_wait_for_room_on_a_full_disk(metrics, tmp_path, monkeypatch):
    metrics.add(step=1, loss=1.0)
    metrics.flush()
    metrics.add(step=2, loss=float("inf"))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.warns(CheckpointWarning, match="No space left"):
            assert not metrics.flush()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    assert metrics.flush()
    assert read_metrics(tmp_path / "metrics.jsonl")[1:] == [{"step": 2, "loss": "inf"}]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("replaced", [False, True])
def test_metrics_that_are_removed_during_a_run_are_written_again(metrics, tmp_path, replaced):
    path = tmp_path / "metrics.jsonl"
    metrics.add(step=1, loss=1.0)
    metrics.flush()
    path.unlink()
    if replaced:
        path.write_text("another\n")
    metrics.add(step=2, loss=0.5)
    with pytest.warns(CheckpointWarning, match=f"was {'replaced' if replaced else 'removed'} during the run"):
        assert metrics.flush()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert not replaced or (tmp_path / "metrics.jsonl.replaced").read_text() == "another\n"


DAMAGED = [b'{"step": 4, "los\xff": 1.0}', b"[1, 2]", b"7", b'{"loss": 1.0}', b'{"step": "4"}', b"[" * 100_000]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_of_metrics_is_reported_and_all_others_are_kept(two_checkpoints, tmp_path, line):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    (folder / "result.json").unlink()
    path = folder / "metrics.jsonl"
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before[:3]) + line + b"\n" + b"".join(before[4:]) + b'{"step": 13, "lo')
    with pytest.warns(CheckpointWarning, match=r"metrics.jsonl is damaged: 1 of its lines .*number 4\)"):
        assert len(read_metrics(path)) == len(before) - 1
    with pytest.warns(CheckpointWarning) as said:
        run(experiment(evaluate_every=5), folder, resume=True)
    assert [str(each.message).partition(" ")[2][:30] for each in said] == [
        "is damaged: 1 of its lines can",
        "has no loss of 1 of the 12 ste",
    ]
    assert path.read_bytes().splitlines(keepends=True) == before[:3] + before[4:]
    assert (folder / "metrics.jsonl.damaged").read_bytes() == line + b"\n"


def test_metrics_that_were_changed_between_two_starts_are_reported(two_checkpoints, tmp_path):
    def resumed(change):
        folder = shutil.copytree(two_checkpoints[0], tmp_path / str(len(list(tmp_path.iterdir()))))
        (folder / "result.json").unlink()
        change(folder / "metrics.jsonl")
        run(experiment(evaluate_every=5), folder, resume=True)
        return folder

    resumed(lambda path: path.write_bytes(path.read_bytes() + b'{"step": 13, "loss": 1.0}\n'))  # to be done again
    with pytest.warns(CheckpointWarning, match="not as it was at step 12, when the checkpoint was written"):
        resumed(lambda path: path.write_bytes(path.read_bytes().replace(b'"rate": 0', b'"rate": 9', 1)))
    none = r"has no loss of 1 of the 12 steps before this start \(3\)"
    with pytest.warns(CheckpointWarning, match=none), pytest.warns(CheckpointWarning, match="not as it was at step 12"):
        folder = resumed(lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 3,', b'"step": 33,')))
    assert b'"step": 33' in (folder / "metrics.jsonl.damaged").read_bytes()
    none = r"has no loss of 12 of the 12 steps before this start \(1, 2, .* 10, …"
    with pytest.warns(CheckpointWarning, match=none), pytest.warns(CheckpointWarning, match="not as it was at step 12"):
        resumed(Path.unlink)


def test_metrics_that_found_no_room_come_back_from_the_checkpoint(tmp_path, monkeypatch):
    wanted = experiment()
    run(wanted, tmp_path / "whole")
    real = training.metrics.Metrics.flush

    def full(self):
        return len(self._waiting) == 0

    with monkeypatch.context() as patch:
        patch.setattr(training.metrics.Metrics, "flush", full)
        cut(tmp_path / "cut", wanted, 5, steps=5)
    assert not read_metrics(tmp_path / "cut" / "metrics.jsonl")
    assert training.metrics.Metrics.flush is real
    run(wanted, tmp_path / "cut", resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")


def test_metrics_that_were_written_after_the_checkpoint_that_holds_them_are_there_once(metrics, tmp_path):
    metrics.add(step=1, loss=1.0)
    metrics.flush()
    metrics.add(step=2, loss=0.5)
    kept = metrics.to_keep()
    assert len(kept.waiting) == 1
    metrics.flush()
    resumed = training.metrics.Metrics(tmp_path / "metrics.jsonl", 2, kept=kept)
    resumed.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_two_runs_in_one_folder_are_refused_until_the_first_is_gone(tmp_path):
    process = start(train_in, tmp_path / "a", experiment(steps=100000).to_json(), 1000)
    while not (tmp_path / "a" / "metrics.jsonl").exists():
        time.sleep(0.02)
        assert process.is_alive()
    with pytest.raises(FolderInUse, match="another process trains in"):
        run(experiment(steps=100000), tmp_path / "a", resume=True)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with hold_folder(tmp_path / "a"):
        pass


def test_a_lock_that_is_removed_lets_no_second_run_in(tmp_path):
    with hold_folder(tmp_path) as hold:
        (tmp_path / "lock").unlink()
        with pytest.raises(FolderInUse, match="another process trains in"), hold_folder(tmp_path):
            pass
        hold.check()
        assert (tmp_path / "lock").exists()
    with hold_folder(tmp_path):
        pass


@pytest.mark.parametrize("loss", ["lock", "folder"])
def test_a_run_whose_folder_was_taken_over_stops_and_writes_nothing_more(tmp_path, monkeypatch, loss):
    """Where the file system cannot lock a folder, or the folder itself was removed."""
    if loss == "lock":
        monkeypatch.setattr(training.lock, "_lock_folder", lambda folder: None)
    taken = []

    def second_run(self, step, size, seed, real=WordProblem.training_batch):
        if step == 7 and not taken:
            if loss == "folder":
                (tmp_path / "a").rename(tmp_path / "moved")
            else:
                (tmp_path / "a" / "lock").unlink()
            taken.append(holds.enter_context(hold_folder(tmp_path / "a")))
            taken.append({path.name: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()})
        return real(self, step, size, seed)

    monkeypatch.setattr(WordProblem, "training_batch", second_run)
    message = "another process trains in" if loss == "lock" else "was moved or removed while a run trained in it"
    with contextlib.ExitStack() as holds, pytest.raises(FolderInUse, match=message):
        run(experiment(), tmp_path / "a", keeping=Keeping(steps=2))
    found = {path.name: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert {**found, "lock": b""} == {**taken[1], "lock": b""}
    monkeypatch.undo()
    rest = tmp_path / ("a" if loss == "lock" else "moved")
    run(experiment(), rest, resume=True)
    run(experiment(), tmp_path / "whole")
    assert same(tmp_path / "whole", rest)


def test_a_loss_that_is_not_finite_is_kept_for_replay(tmp_path, monkeypatch):
    wanted = experiment(learning_rate=1e-2)
    real = WordProblem.training_batch

    def fifth_is_poisoned(self, step, size, seed):
        if step == 4:
            for module in poisoned:
                module.weight.data.mul_(torch.inf)
        return real(self, step, size, seed)

    poisoned = []
    built = training.runs.built
    monkeypatch.setattr(WordProblem, "training_batch", fifth_is_poisoned)
    monkeypatch.setattr(training.runs, "built", lambda e: poisoned.append((m := built(e)).decoder) or m)
    with pytest.raises(
        TrainingDiverged, match=r"the loss was nan at step 5 of 12: the weights decoder.weight were not"
    ):
        run(wanted, tmp_path / "a")
    monkeypatch.undo()
    step, diagnosis = replay(tmp_path / "a")
    assert step == 5
    assert diagnosis.module == "decoder"
    assert diagnosis.weights == ("decoder.weight",)
    assert len(read_metrics(tmp_path / "a" / "metrics.jsonl")) == 4
    with pytest.raises(InputError, match="holds no failure"):
        replay(tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loss_that_is_not_finite_is_kept_by_two_ranks(tmp_path, sharded):
    wanted = experiment(norm="layer", dropout=0.0, learning_rate=1e30)
    for process in start_ranks(tmp_path / "a", wanted.to_json(), sharded=sharded):
        process.join(250)
        assert process.exitcode == 1
    step, diagnosis = replay(tmp_path / "a")
    assert step == len(read_metrics(tmp_path / "a" / "metrics.jsonl")) + 1
    assert not math.isfinite(diagnosis.loss)


def test_a_failure_on_a_full_disk_is_still_the_failure(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training.folder, "write_folder", full)
    monkeypatch.setattr(WordProblem, "loss", lambda self, outputs, targets: outputs.sum() * math.nan)
    with pytest.raises(TrainingDiverged, match=r"the loss was nan at step 1.*could not be written to .*No space left"):
        run(experiment(), tmp_path / "a")


def test_a_gradient_that_is_not_finite_stops_before_the_step(tmp_path, monkeypatch):
    wanted = experiment()
    monkeypatch.setattr(
        WordProblem, "loss", lambda self, outputs, targets: (outputs - outputs.detach()).clamp(min=0).sqrt().mean()
    )
    with pytest.raises(
        TrainingDiverged, match=r"norm of the gradient was (nan|inf) at step 1 of 12: outputs were finite"
    ):
        run(wanted, tmp_path / "a")
    assert all(
        tensor.isfinite().all() for tensor in load_file(tmp_path / "a" / "failure" / "model.safetensors").values()
    )


def test_a_folder_is_for_one_experiment(tmp_path):
    run(experiment(steps=2), tmp_path / "a")
    with pytest.raises(InputError, match=r"already holds this run. Pass --resume"):
        run(experiment(steps=2), tmp_path / "a")
    with pytest.raises(InputError, match=r"training.steps was 2 and is 3; training.seed was 0 and is 1"):
        run(experiment(steps=3, seed=1), tmp_path / "a", resume=True)
    assert run(experiment(steps=2), tmp_path / "a", resume=True) == finished(tmp_path / "a")


def test_what_cannot_run_is_refused_before_it_begins(tmp_path):
    with pytest.raises(InputError, match="a batch of 24 is larger than the 23 training sequences"):
        run(experiment(Ragged(), batch_size=24), tmp_path / "large")
    with pytest.raises(SpecError, match=r"snapshot_epochs.* has no epochs. Pass snapshot_steps="):
        run(experiment(snapshot_epochs=(1,)), tmp_path / "epochs")
    with pytest.raises(SpecError, match=r"the snapshot step-99 is of step 99. Pass steps=99, or drop it"):
        run(experiment(snapshot_steps=(99,)), tmp_path / "late")
    with pytest.raises(InputError, match=r"has no such score. Perhaps you meant 'accuracy'"):
        run(experiment(evaluate_every=10, select_by="acuracy"), tmp_path / "score")
    with pytest.raises(InputError, match="its validation part is empty"):
        run(experiment(Ragged(validation=0), evaluate_every=10), tmp_path / "validation")
    with pytest.raises(InputError, match="its test part is empty"):
        run(experiment(Ragged(test=0)), tmp_path / "test")
    for refused in ("score", "validation", "test"):
        assert not read_metrics(tmp_path / refused / "metrics.jsonl")
    run(experiment(steps=1), tmp_path / "score")  # a folder in which nothing was done is free
    with pytest.raises(InputError, match=r"another experiment: training.steps was 1 and is 2"):
        run(experiment(steps=2), tmp_path / "score")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        run(experiment(), tmp_path / "file" / "below")
    with pytest.raises(ValueError, match=r"it needs ModelSpec.*vocabulary=2"):
        training.Experiment(WordProblem("Z2"), experiment().model, experiment().training)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Keeping(steps=0), "Keeping.steps=0.: steps must be a whole number from 1"),
        (lambda: Keeping(checkpoints=0), "checkpoints must be a whole number from 1"),
        (lambda: Keeping(minutes=-1), "minutes must be a number, zero or above"),
        (lambda: TrainConfig(schedule=ReduceOnPlateau()), "schedule=ReduceOnPlateau.* waits for evaluations"),
        (lambda: launched(device="gpu"), "device 'gpu' cannot be used here: .* Pass --device cpu"),
        (lambda: launched(device="cuda:63"), "device 'cuda:63' cannot be used here: .* Pass --device cpu"),
        (lambda: launched("fp16", device="cpu"), "precision='fp16' needs a GPU. Pass --training.precision bf16"),
    ],
)
def test_what_cannot_be_done_here_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_snapshots_of_the_same_step_are_all_kept():
    settings = TrainConfig(steps=9, batch_size=5, snapshot_steps=(5, 7), snapshot_epochs=(1,))
    assert settings.snapshots(Ragged()) == {5: ["step-5", "epoch-1"], 7: ["step-7"]}


def test_scores_that_are_not_finite_are_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(WordProblem, "scores", lambda *_: {"accuracy": math.inf, "odd": math.nan, "each": [-math.inf]})
    result = run(experiment(steps=1), tmp_path / "a")
    assert '"score": "inf"' in (tmp_path / "a" / "result.json").read_text()
    found = finished(tmp_path / "a")
    assert found["score"] == result["score"] == math.inf
    assert math.isnan(found["test"]["5"]["odd"])
    assert found["test"]["5"]["each"] == [-math.inf]


def test_a_damaged_file_of_a_run_is_named(two_checkpoints, tmp_path):
    def damaged(name, content):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(two_checkpoints[0], tmp_path / "a")
        (tmp_path / "a" / name).write_bytes(content)
        return tmp_path / "a"

    def resumed(folder):
        return run(experiment(evaluate_every=5), folder, resume=True)

    with pytest.raises(CheckpointError, match=r"result.json is not as it was written .* Delete it"):
        resumed(damaged("result.json", b"{"))
    for content in (b"{}", b"[1]", b"7", b"[" * 100_000):
        with pytest.raises(CheckpointError, match=r"result.json is not as it was written.* Delete it"):
            resumed(damaged("result.json", content))
    (tmp_path / "a" / "result.json").unlink()
    (tmp_path / "a" / "environment.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"environment.json is not as it was written .* Delete it"):
        resumed(tmp_path / "a")
    for content in (b"{}", b"[1]", b'[{"step": "0"}]'):
        (tmp_path / "a" / "environment.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"environment.json is not as it was written. Delete it"):
            resumed(tmp_path / "a")
    (tmp_path / "a" / "environment.json").unlink()
    with open(tmp_path / "a" / "metrics.jsonl", "ab") as metrics:
        metrics.write(b"\xff\xfe")
    (tmp_path / "a" / "checkpoints" / "step-by-step-9").mkdir()  # not ours
    assert resumed(tmp_path / "a")["test"] == finished(two_checkpoints[0])["test"]
    with pytest.raises(InputError, match=r"config.json is no text"):
        resumed(damaged("config.json", b"\xff"))
    with pytest.raises(SpecError, match=r"config.json: A spec is JSON"):
        resumed(damaged("config.json", b"{"))
    whole = (two_checkpoints[0] / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a complete safetensors file"):
        trained(damaged("model.safetensors", whole[:300]))
    folder = damaged("model.safetensors", whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"is not as it was written.*if .*result.json is deleted: .* --resume$"):
        trained(folder)
    (folder / "result.json").unlink()
    resumed(folder)
    assert (folder / "model.safetensors").read_bytes() == whole
    with pytest.raises(InputError, match=r"config.json is a file. Pass the folder of the run: .*/a$"):
        trained(tmp_path / "a" / "config.json")


def test_one_process_in_float32_needs_no_accelerate(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if it were not installed
    run(experiment(steps=2), tmp_path / "a")
    with pytest.raises(ValueError, match=r"precision='bf16' need.* accelerate: pip install 'adptnet\[train\]'"):
        run(experiment(precision="bf16"), tmp_path / "b")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes need accelerate"):
        run(experiment(), tmp_path / "c")


def test_metrics_go_to_tensorboard_on_request(tmp_path):
    pytest.importorskip("tensorboard")
    run(experiment(steps=2), tmp_path / "a", keeping=Keeping(track=("tensorboard",)))
    assert list((tmp_path / "a" / "tensorboard").rglob("events.out.*"))
