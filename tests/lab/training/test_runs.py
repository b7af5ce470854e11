"""Runs in folders: nothing is lost, whatever ends them, and a resumed run has the bits of an uninterrupted one."""

import contextlib
import errno
import hashlib
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
from adptnet_lab._runtime import catch_stop_signals
from adptnet_lab.tasks import Forecast, Text, WordProblem
from adptnet_lab.training import (
    CheckpointWarning,
    Cosine,
    FolderInUse,
    Interrupted,
    ReduceOnPlateau,
    RMSprop,
    SaveOptions,
    TrainConfig,
    TrainingDiverged,
    checkpoint_store,
    detect_strategy,
    evaluate,
    load_model,
    read_metrics,
    read_result,
    replay,
    run,
)
from adptnet_lab.training.evaluation import selection_score
from adptnet_lab.training.run_environment import describe_start
from adptnet_lab.training.run_lock import lock_folder
from adptnet_lab.training.training_state import Progress
from support.small_runs import (
    Endless,
    Ragged,
    have_same_bits,
    make_experiment,
    start_process,
    start_ranks,
    train_in_process,
)

pytestmark = pytest.mark.timeout(300)  # processes start slowly on a busy machine

EVERYTHING = {
    "evaluate_every": 3,
    "exponents_every": 2,
    "schedule": ReduceOnPlateau(warmup=0.1, factor=0.5, patience=1),
    "snapshot_steps": (4,),
}


@pytest.fixture(autouse=True, scope="module")
def single_precision():
    """Use float32, the default of the processes that these tests start."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def interrupt_after(folder, setup, step, **save_options):
    """Start a run that receives SIGTERM when it saves `step`, and so stops one step later."""
    from adptnet_lab.training import run_folder

    before = run_folder.RunFolder.save

    def save(self, state):
        before(self, state)
        if state.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "save", save)
        with pytest.raises(Interrupted, match=f"stopped after step {step + 1} of 12.* --resume"):
            run(setup, folder, save_options=SaveOptions(**save_options))


def test_a_run_leaves_everything_in_its_folder(tmp_path, capsys):
    setup = make_experiment(lengths=(5, 9), **EVERYTHING)
    result = run(setup, tmp_path / "a")
    folder = tmp_path / "a"
    assert adptnet.Spec.from_json((folder / "config.json").read_text()) == setup
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
    assert read_result(folder) == result
    assert result["test"].keys() == {"5", "9"}
    assert "step 12/12  loss" in capsys.readouterr().out
    model = adptnet.load(folder / "model.safetensors")
    assert evaluate(model, setup.task, (5, 9), size=24, batch_size=10)[9] == result["test"]["9"]
    assert isinstance(adptnet.load(folder / "snapshots" / "step-4.safetensors"), adptnet.SequenceModel)


def test_changed_metrics_of_a_finished_run_are_reported(tmp_path):
    run(make_experiment(), tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    whole, lines = path.read_bytes(), read_metrics(path)
    assert path.with_suffix(".sha256").read_text() == f"{hashlib.sha256(whole).hexdigest()}  metrics.jsonl\n"
    first, rest = whole.split(b"\n", 1)
    for changed in (whole.replace(b'"loss": ', b'"loss": 1', 1), rest, whole + first + b"\n"):
        path.write_bytes(changed)
        with pytest.warns(CheckpointWarning, match="not as it was when the run finished"):
            read_metrics(path)
    path.write_bytes(whole)
    assert read_metrics(path) == lines
    path.unlink()
    with pytest.warns(CheckpointWarning, match="not as it was when the run finished"):
        assert read_metrics(path) == []


def test_the_weights_of_the_best_evaluation_are_kept(tmp_path):
    setup = make_experiment(select_by="loss", learning_rate=0.3, **EVERYTHING)
    result = run(setup, tmp_path / "best")
    lines = read_metrics(tmp_path / "best" / "metrics.jsonl")
    losses = {line["step"]: line["validation"]["5"]["loss"] for line in lines if "validation" in line}
    assert result["step"] == min(losses, key=losses.get)
    chosen = evaluate(load_model(tmp_path / "best"), setup.task, [5], split="validation", size=24, batch_size=10)
    assert chosen[5]["loss"] == pytest.approx(min(losses.values()))
    last = run(make_experiment(select="last", learning_rate=0.3, **EVERYTHING), tmp_path / "last")
    assert last["step"] == 12


@pytest.mark.parametrize("task", [Text, Forecast, WordProblem])
def test_higher_accuracy_and_lower_error_are_better_for_every_task(task):
    def higher_is_better(name):
        return selection_score({5: {name: 1.0}}, task(), TrainConfig(select_by=name))[1]

    assert higher_is_better("accuracy")
    assert not higher_is_better("loss")
    assert higher_is_better(task.metric) == (task is WordProblem)


def test_a_score_of_nan_is_never_the_best():
    progress, settings = Progress(), TrainConfig(evaluate_every=1, patience=3)
    is_best = [progress.record_score(score, False, settings) for score in (math.nan, 2.0, math.nan, 1.0)]
    assert is_best == [False, True, False, True]
    assert [progress.record_score(math.nan, False, settings) for _ in range(3)] == [False] * 3
    assert progress.best == 1.0
    assert progress.stopped  # patience counts evaluations of NaN


def test_a_run_stops_early_when_asked_to_by_its_settings(tmp_path):
    patient = make_experiment(evaluate_every=1, patience=2, learning_rate=1e-12, norm="layer")
    assert run(patient, tmp_path / "patience")["step"] == 1
    assert len(read_metrics(tmp_path / "patience" / "metrics.jsonl")) == 6
    assert run(make_experiment(evaluate_every=4, stop_at=0.0), tmp_path / "reached")["step"] == 4


@pytest.mark.parametrize("step", [1, 7])
def test_a_run_that_was_asked_to_stop_resumes_to_the_same_bits(tmp_path, step):
    setup = make_experiment(**EVERYTHING)
    run(setup, tmp_path / "whole")
    interrupt_after(tmp_path / "cut", setup, step, steps=1)
    run(setup, tmp_path / "cut", resume=True)
    assert have_same_bits(tmp_path / "whole", tmp_path / "cut")
    assert [s["step"] for s in json.loads((tmp_path / "cut" / "environment.json").read_text())] == [0, step + 1]


@pytest.fixture
def interrupts():
    """Ctrl-C has its usual effect, also if the tests run in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_of_another_kind_is_a_request_too_and_one_of_the_same_kind_acts(interrupts):
    """Ctrl-C reaches the runs of a sweep, and so does the SIGTERM that the sweep sends them afterwards."""
    with catch_stop_signals() as request:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert request.signum == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_that_is_resumed_in_another_environment_lists_what_differs(tmp_path):
    setup = make_experiment()
    interrupt_after(tmp_path / "cut", setup, 5, steps=5)
    path = tmp_path / "cut" / "environment.json"
    (begun,) = json.loads(path.read_text())
    assert begun["threads"] == torch.get_num_threads()
    assert begun["device"] == "cpu"
    then = {**begun, "adptnet": "0.0.1", "torch": "1.13.0", "python": "2.7.18", "threads": 999, "device": "H100"}
    then["backend"] = {**begun["backend"], "adpt_scan": "compiled kernel 0123456789ab"}
    path.write_text(json.dumps([then, {**begun, "step": 6}]))  # the second start did no step
    with pytest.warns(CheckpointWarning, match=r"resumed from step 6 .* may differ in the last digits") as warned:
        run(setup, tmp_path / "cut", resume=True)
    listed = str(warned[0].message).splitlines()[1:]
    names = ["adptnet", "torch", "python", "threads", "device"]
    expected = [f"  {name}: {then[name]} → {begun[name]}" for name in names]
    expected.append(f"  backend.adpt_scan: compiled kernel 0123456789ab → {begun['backend']['adpt_scan']}")
    assert sorted(listed) == sorted(expected)
    assert len(warned) == 1
    assert [start["step"] for start in json.loads(path.read_text())] == [0, 6, 6]
    assert read_result(tmp_path / "cut")


@pytest.mark.skipif(adptnet.backends()["adpt_scan"].startswith("reference"), reason="no compiled kernels here")
def test_a_run_that_is_resumed_with_another_backend_warns(tmp_path, monkeypatch):
    interrupt_after(tmp_path / "a", make_experiment(), 5, steps=5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run(make_experiment(), tmp_path / "a", resume=True)  # the same backend: no warning
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    with pytest.warns(CheckpointWarning, match=r"backend\.adpt_scan: compiled kernel \w+ → reference"):
        run(make_experiment(), tmp_path / "b", resume=True)


def test_a_checkpoint_of_other_settings_is_not_resumed_though_config_json_is_gone(tmp_path):
    interrupt_after(tmp_path / "a", make_experiment(), 5, steps=5)
    (tmp_path / "a" / "config.json").unlink()
    other = make_experiment(learning_rate=0.5, schedule=Cosine())
    with pytest.raises(CheckpointError, match="step-000000006 is of another experiment") as error:
        run(other, tmp_path / "a", resume=True)
    with pytest.raises(InputError, match=r"already holds this run. Pass --resume"):
        run(make_experiment(), tmp_path / "a")
    assert "training.learning_rate was 0.01 and is 0.5" in str(error.value)
    assert "training.schedule.type was 'Linear' and is 'Cosine'" in str(error.value)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(CheckpointError, match=r"weights of another model: .*float32, .*float64"):
            run(make_experiment(), tmp_path / "a", resume=True)
    finally:
        torch.set_default_dtype(torch.float32)
    run(make_experiment(), tmp_path / "a", resume=True)


def test_a_run_that_was_written_before_a_setting_was_renamed_resumes(tmp_path):
    setup = make_experiment()
    run(setup, tmp_path / "whole")
    interrupt_after(tmp_path / "cut", setup, 5, steps=5)
    config, checkpoint = tmp_path / "cut" / "config.json", tmp_path / "cut" / "checkpoints" / "step-000000006"
    config.write_text(config.read_text().replace('"optimizer"', '"optimiser"'))
    files = checkpoint_store.read_folder(checkpoint)
    assert b'"optimizer"' in files["run.json"]
    files["run.json"] = files["run.json"].replace(b'"optimizer"', b'"optimiser"')
    checkpoint_store.write_folder(checkpoint, files)
    shutil.copytree(tmp_path / "cut", tmp_path / "other")
    (tmp_path / "other" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"training\.optimizer\.type was 'AdamW' and is 'RMSprop'"):
        run(make_experiment(optimizer=RMSprop()), tmp_path / "other", resume=True)
    run(setup, tmp_path / "cut", resume=True)
    assert have_same_bits(tmp_path / "whole", tmp_path / "cut")


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
def test_an_intact_checkpoint_with_other_content_is_named(two_checkpoints, tmp_path, name, content):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    (folder / "result.json").unlink()
    path = folder / "checkpoints" / "step-000000012"
    files = {**checkpoint_store.read_folder(path), name: content}
    checkpoint_store.write_folder(path, {name: content for name, content in files.items() if content is not None})
    with pytest.raises(CheckpointError, match=r"step-000000012 does not hold|cannot be of step '7'"):
        run(make_experiment(evaluate_every=5), folder, resume=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": RMSprop(momentum=0.9), "schedule": Cosine(warmup=0.2), "accumulation": 2},
        {"task": Ragged(), "optimizer": training.AdamW(fused=True), "snapshot_epochs": (2,)},
        {"task": Endless(), "evaluate_every": 5, "accumulation": 2},
        {
            "optimizer": training.Adam(),
            "weight_decay": 0.1,
            "solver": "conv-deer",
            "evaluate_every": 5,
            "beta": 0.1,
        },
    ],
)
def test_every_optimizer_schedule_and_solver_resumes(tmp_path, settings):
    setup = make_experiment(**settings)
    run(setup, tmp_path / "whole")
    interrupt_after(tmp_path / "cut", setup, 5, steps=5)
    run(setup, tmp_path / "cut", resume=True)
    assert have_same_bits(tmp_path / "whole", tmp_path / "cut")


def kill_until_done(folder, begin, kills, steps, draw):
    """Start a run repeatedly and kill it at random moments: after some steps, and at any point inside a step."""
    kept = checkpoint_store.CheckpointStore(folder / "checkpoints")
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


def assert_kills_change_nothing(tmp_path, begin, kills, steps, seed):
    assert (
        kill_until_done(tmp_path / "killed", lambda: begin(tmp_path / "killed"), kills, steps, random.Random(seed))
        == kills
    )
    for process in begin(tmp_path / "whole"):
        process.join(250)
    assert have_same_bits(tmp_path / "whole", tmp_path / "killed")


def make_busy_experiment(steps):
    return make_experiment(steps=steps, evaluate_every=7, exponents_every=2, snapshot_steps=(4,)).to_json()


@pytest.mark.parametrize(
    ("kills", "steps"),
    [(3, 40), pytest.param(20, 300, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_kill_9_at_random_moments_loses_nothing(tmp_path, kills, steps):
    assert_kills_change_nothing(
        tmp_path, lambda folder: [start_process(train_in_process, folder, make_busy_experiment(steps))], kills, steps, 1
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharded", [False, True])
def test_kill_9_of_two_ranks_at_random_moments_loses_nothing(tmp_path, sharded):
    assert_kills_change_nothing(
        tmp_path, lambda folder: start_ranks(folder, make_busy_experiment(60), sharded=sharded), 5, 60, 2
    )


def read_losses(folder):
    return torch.tensor([line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line])


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_have_the_loss_curve_of_one_process(tmp_path, sharded):
    setup = make_experiment(
        Ragged(), dropout=0.0, batch_size=7, steps=10, evaluate_every=4, beta=0.0 if sharded else 1.0
    )
    run(setup, tmp_path / "one")
    for process in start_ranks(tmp_path / "two", setup.to_json(), sharded=sharded):
        process.join(250)
        assert process.exitcode == 0
    torch.testing.assert_close(read_losses(tmp_path / "two"), read_losses(tmp_path / "one"), rtol=1e-5, atol=1e-6)
    assert read_result(tmp_path / "two")["score"] == pytest.approx(read_result(tmp_path / "one")["score"])
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    found = [[line["validation"]["9"]["accuracy"] for line in lines if "validation" in line] for lines in (one, two)]
    assert found[0] == pytest.approx(found[1])


def test_batches_that_continue_one_another_carry_the_hidden_state(tmp_path):
    setup = make_experiment(Endless(), dropout=0.0, norm="layer", steps=3, learning_rate=1e-30)
    model = setup.model.build()
    losses = training.train(model, setup.task, setup.training).losses
    windows = [setup.task.training_batch(step, 8, 0) for step in range(3)]
    outputs = model(torch.cat([window.inputs for window in windows], 1))[0].split(3, 1)
    for loss, output, window in zip(losses, outputs, windows, strict=True):
        assert loss == pytest.approx(setup.task.loss(output, window.targets).item(), rel=1e-6)
    process = start_ranks(tmp_path / "two", make_experiment(Endless(), dropout=0.0, evaluate_every=4).to_json())
    run(make_experiment(Endless(), dropout=0.0, evaluate_every=4), tmp_path / "one")
    for rank in process:
        rank.join(250)
    torch.testing.assert_close(read_losses(tmp_path / "two"), read_losses(tmp_path / "one"), rtol=1e-5, atol=1e-6)
    assert read_result(tmp_path / "two")["score"] == pytest.approx(read_result(tmp_path / "one")["score"])


def test_gradient_accumulation_gives_the_loss_curve_of_the_whole_batch(tmp_path):
    whole = make_experiment(Ragged(), dropout=0.0, norm="layer", batch_size=7)
    parts = make_experiment(Ragged(), dropout=0.0, norm="layer", batch_size=7, accumulation=3)
    run(whole, tmp_path / "whole")
    run(parts, tmp_path / "parts")
    torch.testing.assert_close(read_losses(tmp_path / "parts"), read_losses(tmp_path / "whole"), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="a batch of 2 cannot be cut into 3 parts"):
        run(make_experiment(batch_size=2, accumulation=3), tmp_path / "few")


@pytest.mark.parametrize("precision", ["bf16", "bf16-all"])
def test_reduced_precision_learns_and_resumes(tmp_path, precision):
    setup = make_experiment(precision=precision, steps=12)
    run(setup, tmp_path / "whole")
    interrupt_after(tmp_path / "cut", setup, 5, steps=5)
    run(setup, tmp_path / "cut", resume=True)
    assert have_same_bits(tmp_path / "whole", tmp_path / "cut")
    run(make_experiment(), tmp_path / "full")
    assert not torch.equal(read_losses(tmp_path / "full"), read_losses(tmp_path / "whole"))
    torch.testing.assert_close(read_losses(tmp_path / "full"), read_losses(tmp_path / "whole"), rtol=0.1, atol=0.1)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """Return a finished run with its last two checkpoints, and the files of the older one."""
    folder = tmp_path_factory.mktemp("run") / "a"
    run(make_experiment(evaluate_every=5), folder, save_options=SaveOptions(steps=6))
    return folder, checkpoint_store.read_folder(folder / "checkpoints" / "step-000000006")


def flip_bits(path: Path, position: int, bit: int = 1) -> None:
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
            flip_bits(path, position, 1 << position % 8)
            with pytest.warns(CheckpointWarning, match=f"{path.name} (is not as it was written|cannot be read)"):
                step, files = checkpoint_store.CheckpointStore(kept).read_newest()
            assert (step, files) == (6, before)
            flip_bits(path, position, 1 << position % 8)
            tried += 1
    assert checkpoint_store.CheckpointStore(kept).read_newest()[0] == 12
    assert tried > 600


class Killed(BaseException):
    """Simulates SIGKILL: from then on every operation on files raises it."""


def kill_at(number, patch):
    """Raise `Killed` from the `number`-th operation on files on; return a list with the count of operations."""
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
def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint(tmp_path, keep):
    """The step is saved again after the kill, and that save is killed as well."""
    old, new = ({"a": content * 100, "b": content} for content in (b"old", b"new"))
    for number in itertools.count(1):
        kept = checkpoint_store.CheckpointStore(tmp_path / str(number), keep)
        kept.save(7, old)
        for files, again in ((new, number), (old, 2 * number // 3 + 1), (new, number)):
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
                operations = kill_at(again, patch)
                kept.save(7, files)
            step, found = checkpoint_store.CheckpointStore(kept.folder, keep).read_newest()
            assert step == 7
            assert found in (old, new), f"killed at operation {again}"
        whole = operations[0] < number
        before = {path.name for path in kept.folder.iterdir()}
        assert kept.read_newest(repair=True) == (step, found)
        assert kept.steps() == [7], before
        kept.save(8, new)
        assert kept.read_newest() == (8, new)
        assert sorted(path.name for path in kept.folder.iterdir()) == [
            kept.path(step).name for step in sorted((7, 8)[-keep:])
        ]
        if whole:
            break
    assert number > 20


def test_a_damaged_checkpoint_is_replaced_by_the_copy_that_an_interrupted_save_left(tmp_path):
    kept = checkpoint_store.CheckpointStore(tmp_path)
    kept.save(7, {"a": b"1"})
    shutil.copytree(kept.path(7), tmp_path / ".old-step-000000007.1a2b3c4d")
    shutil.copytree(kept.path(7), tmp_path / ".draft-step-000000009.1a2b3c4d")
    (tmp_path / ".draft-step-000000009.1a2b3c4d" / "a").unlink()  # incomplete, so it is ignored
    flip_bits(kept.path(7) / "a", 0)
    assert kept.read_newest() == (7, {"a": b"1"})
    assert kept.read_newest(repair=True) == (7, {"a": b"1"})
    assert checkpoint_store.read_folder(kept.path(7)) == {"a": b"1"}
    assert (tmp_path / "refused-step-000000007").is_dir()


def test_a_failure_whose_record_was_written_again_can_be_replayed_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(WordProblem, "loss", lambda self, outputs, targets: outputs.sum() * math.nan)
    with pytest.raises(TrainingDiverged):
        run(make_experiment(), tmp_path / "a")
    (tmp_path / "a" / "failure").rename(tmp_path / "a" / ".old-failure.1a2b3c4d")
    assert replay(tmp_path / "a")[0] == 1


@pytest.mark.parametrize("damage", ["cut", "missing", "half written"])
def test_an_incomplete_checkpoint_is_named_and_the_one_before_is_used(two_checkpoints, tmp_path, damage):
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
        run(make_experiment(evaluate_every=5), folder, resume=True, save_options=SaveOptions(steps=6))
    assert have_same_bits(two_checkpoints[0], folder)
    assert (folder / "checkpoints" / "refused-step-000000012").is_dir()


def test_reading_a_run_moves_none_of_its_files(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    for name in ("model.safetensors", "result.json"):
        (folder / name).unlink()
    flip_bits(folder / "checkpoints" / "step-000000012" / "progress.json", 3)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.warns(CheckpointWarning, match=r"step-000000012/progress.json .* one of step 6 is used"):
        load_model(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_without_an_intact_checkpoint_the_run_does_not_start_over(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    (folder / "result.json").unlink()
    for path in (folder / "checkpoints").glob("*/progress.json"):
        flip_bits(path, 3)
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* can be used"):
        run(make_experiment(evaluate_every=5), folder, resume=True)
    assert (folder / "checkpoints" / "step-000000012").exists()


def test_reading_a_checkpoint_unpickles_nothing(two_checkpoints, tmp_path, monkeypatch):
    folder = shutil.copytree(two_checkpoints[0], tmp_path / "a")
    (folder / "result.json").unlink()
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    run(make_experiment(evaluate_every=5), folder, resume=True)
    assert have_same_bits(two_checkpoints[0], folder)


def test_a_checkpoint_of_a_newer_version_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_store, "VERSION", 2)
    checkpoint_store.write_folder(tmp_path / "step-1", {"a": b"1"})
    monkeypatch.setattr(checkpoint_store, "VERSION", 1)
    with pytest.raises(CheckpointError, match="has version 2; this adptnet reads versions up to 1"):
        checkpoint_store.read_folder(tmp_path / "step-1")


def test_a_full_disk_keeps_the_last_good_checkpoint_and_warns(tmp_path, monkeypatch):
    real, calls = checkpoint_store.write_atomic, []

    def write_atomic(path, content):
        calls.append(path)
        if "step-000000006" in str(path) and path.name == "random.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(checkpoint_store, "write_atomic", write_atomic)
    with pytest.warns(CheckpointWarning, match=r"step 6 .*No space left.*the last good one is of step 3"):
        run(make_experiment(), tmp_path / "full", save_options=SaveOptions(steps=3, checkpoints=9))
    assert sorted(p.name[-2:] for p in (tmp_path / "full" / "checkpoints").iterdir()) == ["03", "09", "12"]
    monkeypatch.undo()
    run(make_experiment(), tmp_path / "free")
    assert have_same_bits(tmp_path / "free", tmp_path / "full")


def test_a_disk_that_is_full_from_the_beginning_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training.run_folder, "write_json", full)
    with pytest.raises(CheckpointError, match=r"a cannot be written to .No space left.*Resume with: .* --resume"):
        run(make_experiment(), tmp_path / "a")


@pytest.fixture
def metrics(tmp_path):
    made = training.run_metrics.MetricsFile(tmp_path / "metrics.jsonl")
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
    with pytest.warns(CheckpointWarning) as warned:
        run(make_experiment(evaluate_every=5), folder, resume=True)
    assert [str(each.message).partition(" ")[2][:30] for each in warned] == [
        "is damaged: 1 of its lines can",
        "has no loss of 1 of the 12 ste",
    ]
    assert path.read_bytes().splitlines(keepends=True) == before[:3] + before[4:]
    assert (folder / "metrics.jsonl.damaged").read_bytes() == line + b"\n"


def test_metrics_that_were_changed_between_two_starts_are_reported(two_checkpoints, tmp_path):
    def resume(change):
        folder = shutil.copytree(two_checkpoints[0], tmp_path / str(len(list(tmp_path.iterdir()))))
        (folder / "result.json").unlink()
        change(folder / "metrics.jsonl")
        run(make_experiment(evaluate_every=5), folder, resume=True)
        return folder

    resume(lambda path: path.write_bytes(path.read_bytes() + b'{"step": 13, "loss": 1.0}\n'))  # a step that is repeated
    with pytest.warns(CheckpointWarning, match="not as it was at step 12, when the checkpoint was written"):
        resume(lambda path: path.write_bytes(path.read_bytes().replace(b'"rate": 0', b'"rate": 9', 1)))
    none = r"has no loss of 1 of the 12 steps before this start \(3\)"
    with pytest.warns(CheckpointWarning, match=none), pytest.warns(CheckpointWarning, match="not as it was at step 12"):
        folder = resume(lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 3,', b'"step": 33,')))
    assert b'"step": 33' in (folder / "metrics.jsonl.damaged").read_bytes()
    none = r"has no loss of 12 of the 12 steps before this start \(1, 2, .* 10, …"
    with pytest.warns(CheckpointWarning, match=none), pytest.warns(CheckpointWarning, match="not as it was at step 12"):
        resume(Path.unlink)


def test_metrics_that_did_not_fit_on_the_disk_are_restored_from_the_checkpoint(tmp_path, monkeypatch):
    setup = make_experiment()
    run(setup, tmp_path / "whole")
    real = training.run_metrics.MetricsFile.flush

    def full(self):
        return len(self._waiting) == 0

    with monkeypatch.context() as patch:
        patch.setattr(training.run_metrics.MetricsFile, "flush", full)
        interrupt_after(tmp_path / "cut", setup, 5, steps=5)
    assert not read_metrics(tmp_path / "cut" / "metrics.jsonl")
    assert training.run_metrics.MetricsFile.flush is real
    run(setup, tmp_path / "cut", resume=True)
    assert have_same_bits(tmp_path / "whole", tmp_path / "cut")


def test_metrics_that_were_written_after_the_checkpoint_that_holds_them_are_there_once(metrics, tmp_path):
    metrics.add(step=1, loss=1.0)
    metrics.flush()
    metrics.add(step=2, loss=0.5)
    kept = metrics.get_state()
    assert len(kept.waiting) == 1
    metrics.flush()
    resumed = training.run_metrics.MetricsFile(tmp_path / "metrics.jsonl", 2, state=kept)
    resumed.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_second_run_in_a_folder_is_an_error_until_the_first_is_gone(tmp_path):
    process = start_process(train_in_process, tmp_path / "a", make_experiment(steps=100000).to_json(), 1000)
    while not (tmp_path / "a" / "metrics.jsonl").exists():
        time.sleep(0.02)
        assert process.is_alive()
    with pytest.raises(FolderInUse, match="another process trains in"):
        run(make_experiment(steps=100000), tmp_path / "a", resume=True)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with lock_folder(tmp_path / "a"):
        pass


def test_removing_the_lock_file_lets_no_second_run_in(tmp_path):
    with lock_folder(tmp_path) as lock:
        (tmp_path / "lock").unlink()
        with pytest.raises(FolderInUse, match="another process trains in"), lock_folder(tmp_path):
            pass
        lock.check()
        assert (tmp_path / "lock").exists()
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("loss", ["lock", "folder"])
def test_a_run_whose_folder_was_taken_over_stops_and_writes_nothing_more(tmp_path, monkeypatch, loss):
    """Either the file system cannot lock folders, or the folder was moved."""
    if loss == "lock":
        monkeypatch.setattr(training.run_lock, "_lock_directory", lambda folder: None)
    taken = []

    def second_run(self, step, size, seed, real=WordProblem.training_batch):
        if step == 7 and not taken:
            if loss == "folder":
                (tmp_path / "a").rename(tmp_path / "moved")
            else:
                (tmp_path / "a" / "lock").unlink()
            taken.append(locks.enter_context(lock_folder(tmp_path / "a")))
            taken.append({path.name: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()})
        return real(self, step, size, seed)

    monkeypatch.setattr(WordProblem, "training_batch", second_run)
    message = "another process trains in" if loss == "lock" else "was moved or removed while a run trained in it"
    with contextlib.ExitStack() as locks, pytest.raises(FolderInUse, match=message):
        run(make_experiment(), tmp_path / "a", save_options=SaveOptions(steps=2))
    found = {path.name: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert {**found, "lock": b""} == {**taken[1], "lock": b""}
    monkeypatch.undo()
    rest = tmp_path / ("a" if loss == "lock" else "moved")
    run(make_experiment(), rest, resume=True)
    run(make_experiment(), tmp_path / "whole")
    assert have_same_bits(tmp_path / "whole", rest)


def test_a_loss_that_is_not_finite_is_kept_for_replay(tmp_path, monkeypatch):
    setup = make_experiment(learning_rate=1e-2)
    real = WordProblem.training_batch

    def poison_fifth(self, step, size, seed):
        if step == 4:
            for module in poisoned:
                module.weight.data.mul_(torch.inf)
        return real(self, step, size, seed)

    poisoned = []
    build = training.runs.build_model
    monkeypatch.setattr(WordProblem, "training_batch", poison_fifth)
    monkeypatch.setattr(training.runs, "build_model", lambda e: poisoned.append((m := build(e)).decoder) or m)
    with pytest.raises(
        TrainingDiverged, match=r"the loss was nan at step 5 of 12: the weights decoder.weight were not"
    ):
        run(setup, tmp_path / "a")
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
    setup = make_experiment(norm="layer", dropout=0.0, learning_rate=1e30)
    for process in start_ranks(tmp_path / "a", setup.to_json(), sharded=sharded):
        process.join(250)
        assert process.exitcode == 1
    step, diagnosis = replay(tmp_path / "a")
    assert step == len(read_metrics(tmp_path / "a" / "metrics.jsonl")) + 1
    assert not math.isfinite(diagnosis.loss)


def test_a_failure_on_a_full_disk_is_still_the_failure(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(training.run_folder, "write_folder", full)
    monkeypatch.setattr(WordProblem, "loss", lambda self, outputs, targets: outputs.sum() * math.nan)
    with pytest.raises(TrainingDiverged, match=r"the loss was nan at step 1.*could not be written to .*No space left"):
        run(make_experiment(), tmp_path / "a")


def test_a_gradient_that_is_not_finite_stops_before_the_step(tmp_path, monkeypatch):
    setup = make_experiment()
    monkeypatch.setattr(
        WordProblem, "loss", lambda self, outputs, targets: (outputs - outputs.detach()).clamp(min=0).sqrt().mean()
    )
    with pytest.raises(
        TrainingDiverged, match=r"norm of the gradient was (nan|inf) at step 1 of 12: outputs were finite"
    ):
        run(setup, tmp_path / "a")
    assert all(
        tensor.isfinite().all() for tensor in load_file(tmp_path / "a" / "failure" / "model.safetensors").values()
    )


def test_a_folder_is_for_one_experiment(tmp_path):
    run(make_experiment(steps=2), tmp_path / "a")
    with pytest.raises(InputError, match=r"already holds this run. Pass --resume"):
        run(make_experiment(steps=2), tmp_path / "a")
    with pytest.raises(InputError, match=r"training.steps was 2 and is 3; training.seed was 0 and is 1"):
        run(make_experiment(steps=3, seed=1), tmp_path / "a", resume=True)
    assert run(make_experiment(steps=2), tmp_path / "a", resume=True) == read_result(tmp_path / "a")


def test_what_cannot_run_raises_before_the_first_step(tmp_path):
    with pytest.raises(InputError, match="a batch of 24 is larger than the 23 training sequences"):
        run(make_experiment(Ragged(), batch_size=24), tmp_path / "large")
    with pytest.raises(SpecError, match=r"snapshot_epochs.* has no epochs. Pass snapshot_steps="):
        run(make_experiment(snapshot_epochs=(1,)), tmp_path / "epochs")
    with pytest.raises(SpecError, match=r"the snapshot step-99 is of step 99. Pass steps=99, or drop it"):
        run(make_experiment(snapshot_steps=(99,)), tmp_path / "late")
    with pytest.raises(InputError, match=r"has no such score. Perhaps you meant 'accuracy'"):
        run(make_experiment(evaluate_every=10, select_by="acuracy"), tmp_path / "score")
    with pytest.raises(InputError, match="the validation split is empty"):
        run(make_experiment(Ragged(validation=0), evaluate_every=10), tmp_path / "validation")
    with pytest.raises(InputError, match="the test split is empty"):
        run(make_experiment(Ragged(test=0)), tmp_path / "test")
    for name in ("score", "validation", "test"):
        assert not read_metrics(tmp_path / name / "metrics.jsonl")
    run(make_experiment(steps=1), tmp_path / "score")  # a folder in which no step was done can be used again
    with pytest.raises(InputError, match=r"another experiment: training.steps was 1 and is 2"):
        run(make_experiment(steps=2), tmp_path / "score")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        run(make_experiment(), tmp_path / "file" / "below")
    with pytest.raises(ValueError, match=r"it needs ModelSpec.*vocabulary=2"):
        training.Experiment(WordProblem("Z2"), make_experiment().model, make_experiment().training)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SaveOptions(steps=0), "SaveOptions.steps=0.: steps must be an integer >= 1"),
        (lambda: SaveOptions(checkpoints=0), "checkpoints must be an integer >= 1"),
        (lambda: SaveOptions(minutes=-1), "minutes must be a finite number >= 0"),
        (lambda: TrainConfig(schedule=ReduceOnPlateau()), "schedule=ReduceOnPlateau.* waits for evaluations"),
        (lambda: detect_strategy(device="gpu"), "device 'gpu' cannot be used here: .* Pass --device cpu"),
        (lambda: detect_strategy(device="cuda:63"), "device 'cuda:63' cannot be used here: .* Pass --device cpu"),
        (lambda: detect_strategy("fp16", device="cpu"), "precision='fp16' needs a GPU. Pass --training.precision bf16"),
    ],
)
def test_settings_that_cannot_be_used_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_snapshots_of_the_same_step_are_all_kept():
    settings = TrainConfig(steps=9, batch_size=5, snapshot_steps=(5, 7), snapshot_epochs=(1,))
    assert settings.plan_snapshots(Ragged()) == {5: ["step-5", "epoch-1"], 7: ["step-7"]}


def test_scores_that_are_not_finite_are_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(WordProblem, "scores", lambda *_: {"accuracy": math.inf, "odd": math.nan, "each": [-math.inf]})
    result = run(make_experiment(steps=1), tmp_path / "a")
    assert '"score": "inf"' in (tmp_path / "a" / "result.json").read_text()
    found = read_result(tmp_path / "a")
    assert found["score"] == result["score"] == math.inf
    assert math.isnan(found["test"]["5"]["odd"])
    assert found["test"]["5"]["each"] == [-math.inf]


def test_a_damaged_file_of_a_run_is_named(two_checkpoints, tmp_path):
    def damage(name, content):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        shutil.copytree(two_checkpoints[0], tmp_path / "a")
        (tmp_path / "a" / name).write_bytes(content)
        return tmp_path / "a"

    def resume(folder):
        return run(make_experiment(evaluate_every=5), folder, resume=True)

    with pytest.raises(CheckpointError, match=r"result.json is not as it was written .* Delete it"):
        resume(damage("result.json", b"{"))
    for content in (b"{}", b"[1]", b"7", b"[" * 100_000):
        with pytest.raises(CheckpointError, match=r"result.json is not as it was written.* Delete it"):
            resume(damage("result.json", content))
    (tmp_path / "a" / "result.json").unlink()
    (tmp_path / "a" / "environment.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"environment.json is not as it was written .* Delete it"):
        resume(tmp_path / "a")
    for content in (b"{}", b"[1]", b'[{"step": "0"}]'):
        (tmp_path / "a" / "environment.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"environment.json is not as it was written. Delete it"):
            resume(tmp_path / "a")
    (tmp_path / "a" / "environment.json").unlink()
    with open(tmp_path / "a" / "metrics.jsonl", "ab") as metrics:
        metrics.write(b"\xff\xfe")
    (tmp_path / "a" / "checkpoints" / "step-by-step-9").mkdir()  # not a checkpoint
    assert resume(tmp_path / "a")["test"] == read_result(two_checkpoints[0])["test"]
    with pytest.raises(InputError, match=r"config.json is not text"):
        resume(damage("config.json", b"\xff"))
    with pytest.raises(SpecError, match=r"config.json: A spec is JSON"):
        resume(damage("config.json", b"{"))
    whole = (two_checkpoints[0] / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a complete safetensors file"):
        load_model(damage("model.safetensors", whole[:300]))
    folder = damage("model.safetensors", whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"was changed after .*delete .*result.json and type: .* --resume$"):
        load_model(folder)
    (folder / "result.json").unlink()
    resume(folder)
    assert (folder / "model.safetensors").read_bytes() == whole
    with pytest.raises(InputError, match=r"config.json is a file. Pass the folder of the run: .*/a$"):
        load_model(tmp_path / "a" / "config.json")


def test_bf16_all_rounds_products_of_the_recurrence_and_bf16_does_not(tmp_path):
    for precision in ("bf16", "bf16-all"):
        run(make_experiment(precision=precision, steps=3), tmp_path / precision)
    assert not torch.equal(read_losses(tmp_path / "bf16"), read_losses(tmp_path / "bf16-all"))


def test_one_process_needs_accelerate_for_fp16_only(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if it were not installed
    run(make_experiment(steps=2), tmp_path / "a")
    run(make_experiment(precision="bf16-all", steps=2), tmp_path / "b")
    with pytest.raises(ValueError, match=r"precision='fp16' need.* accelerate: pip install 'adptnet\[train\]'"):
        run(make_experiment(precision="fp16"), tmp_path / "d")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes need accelerate"):
        run(make_experiment(), tmp_path / "c")


def test_metrics_go_to_tensorboard_on_request(tmp_path):
    pytest.importorskip("tensorboard")
    run(make_experiment(steps=2), tmp_path / "a", save_options=SaveOptions(track=("tensorboard",)))
    assert list((tmp_path / "a" / "tensorboard").rglob("events.out.*"))


def test_the_environment_names_a_precision_that_was_set_for_one_backend():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert describe_start(torch.device("cpu"))["matmul precision"].startswith("cuda tf32, mkldnn ")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
