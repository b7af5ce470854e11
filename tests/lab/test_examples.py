"""Tests of the examples at a size of seconds: they run, write their files, and their statements hold."""

import importlib.util
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile
from torch.testing import assert_close

from adptnet import cells
from adptnet.errors import InputError
from adptnet.nn import SpikingModel, SpikingModelSpec
from adptnet.solvers import Result
from adptnet_lab import tasks, training
from adptnet_lab.events import Bins, Cochlea, EventDataset, Events, SpikeFile, write_spikes

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name):
    description = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


def is_png(path):
    return path.read_bytes()[:4] == b"\x89PNG"


def test_every_example_documents_how_to_run_it():
    paths = sorted(EXAMPLES.glob("*.py"))
    names = [
        "gradient_flossing",
        "layer",
        "live_words",
        "own_cell",
        "parallel",
        "prescribed_timescales",
        "recurrent_ppo",
        "state_tracking",
    ]
    assert [path.stem for path in paths] == names
    for path in paths:
        assert f"\n    python examples/{path.name}" in load_example(path.stem).__doc__


def test_every_variant_of_the_state_tracking_table_trains(capsys):
    tracking = load_example("state_tracking")
    found = tracking.main(list(tracking.CHANGES), steps=1, size=16)
    assert list(found) == list(tracking.CHANGES)
    page = (EXAMPLES.parent / "docs" / "how-to" / "choose.md").read_text()
    assert all(f"| {name} | " in page for name in found)
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_the_layer_example_agrees_in_every_mode_and_its_loss_falls(tmp_path, capsys):
    losses = load_example("layer").main(tmp_path / "new", width=16, steps=30)
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert (tmp_path / "new" / "layer.safetensors").is_file()
    printed = capsys.readouterr().out
    differences = [float(line.split(", to ")[1][:5]) for line in printed.splitlines() if ", to " in line]
    assert len(differences) == 2
    assert max(differences) < 1e-14
    assert "outputs are identical" in printed


def test_flossing_moves_an_rnn_towards_the_exponents_that_the_layer_has(tmp_path, capsys):
    flossing = load_example("gradient_flossing")
    flossed, prescribed = flossing.main(tmp_path / "new", size=6, updates=20)
    targets = torch.tensor(flossing.TARGETS)
    assert is_png(tmp_path / "new" / "gradient_flossing.png")
    assert (prescribed - targets).abs().max() < 0.01
    assert flossed[0] > -0.6  # it starts at -0.92
    assert "certified" in capsys.readouterr().out


def test_measured_timescales_of_a_diagonal_layer_are_the_prescribed_ones(tmp_path, capsys, monkeypatch):
    timescales = load_example("prescribed_timescales")
    path = tmp_path / "new" / "figure.png"
    arguments = ["--steps", "1", "--window", "600", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["prescribed_timescales.py", *arguments])
    timescales.main()
    assert is_png(path)
    printed = capsys.readouterr().out
    error = float(printed.split("ADPTNet, β = 0: relative error of the timescales: median ")[1][:5])
    assert error < 0.01  # the window is too short for the slowest ones
    assert printed.count("% at the trained length") == len(timescales.TRAINED_BETAS)


def test_every_solver_agrees_with_sequential_or_reports_a_failure(capsys):
    parallel = load_example("parallel")
    tables = parallel.main(length=24, hard_length=300)
    assert list(tables["ADPTNet"]) == list(parallel.SOLVERS)
    assert set(parallel.SOLVERS) - set(tables["GRU"]) == {"ForwardDEER", "ConvDEER", "ConvDEER by FFT"}
    for row in (*tables["ADPTNet"].values(), *tables["GRU"].values()):
        assert row.result in (Result.CONVERGED, Result.FINISHED)
        assert row.error < 1e-9
        assert row.gradient_error < 1e-8
    for row in tables["hard"].values():
        assert row.error < 1e-8 or row.result > Result.FINISHED
    assert tables["hard"]["  Finish(), the default"].error < 1e-9
    assert tables["hard"]["  blocks of 256 steps"].result == Result.CONVERGED
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in (*parallel.SOLVERS, *parallel.HARD))
    assert "not supported: ConvDEER needs a cell with constant eigenvalues" in printed


def test_a_user_defined_cell_has_the_gradients_of_backpropagation_and_learns(capsys):
    worst, losses = load_example("own_cell").main(length=60, steps=25)
    assert worst < 1e-8
    assert len(losses) == 25
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    printed = capsys.readouterr().out
    assert all(f"  {name}(): CONVERGED after" in printed for name in ("QuasiDEER", "KoopmanDEER", "ConvDEER"))


def test_the_environments_of_ppo_are_as_described():
    ppo = load_example("recurrent_ppo")
    generator = torch.Generator().manual_seed(0)
    memory = ppo.RepeatPrevious(3, generator)
    total, right = torch.zeros(3), []
    for t in range(memory.LENGTH):
        right.append(memory.observe().argmax(-1))
        reward, ended = memory.step(right[t - memory.DELAY] if t >= memory.DELAY else right[t])
        total += reward
        assert bool(ended.all()) == (t == memory.LENGTH - 1)
    assert_close(total, torch.full((3,), memory.best))
    pole = ppo.MaskedCartPole(4, generator)
    lengths, age = [], torch.zeros(4)
    for _ in range(400):
        assert pole.observe().shape == (4, pole.features)
        angle, spin = pole.state[:, 2], pole.state[:, 3]
        _, ended = pole.step((angle + spin > 0).long())  # sees the velocity, and balances
        age += 1
        lengths += age[ended].tolist()
        age[ended] = 0
    assert not lengths
    for _ in range(60):  # a constant push makes every pole fall within a dozen steps
        _, ended = pole.step(torch.ones(4, dtype=torch.long))
        lengths += [True] * int(ended.sum())
    assert len(lengths) > 8


def test_ppo_estimates_advantages_by_their_definition_and_runs():
    ppo = load_example("recurrent_ppo")
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.25, 0.125, 4.0]])
    ended = torch.tensor([[False, True, False]])
    last = 3.0 + 0.5 * 4.0 - 0.125
    middle = 2.0 - 0.25
    expected = torch.tensor([[1.0 + 0.5 * 0.25 - 0.5 + 0.5 * 0.95 * middle, middle, last]])
    assert_close(ppo.estimate_advantages(rewards, values, ended, 0.5), expected)
    without = ppo.learn("repeat-previous", "no-memory", 0, updates=1, report=False)
    assert len(without) == 1
    assert without[-1] < -0.4  # chance is -0.5


@pytest.mark.slow
@pytest.mark.parametrize("model", ["adptnet", "gru"])
def test_ppo_solves_repeat_previous(model):
    assert load_example("recurrent_ppo").learn("repeat-previous", model, 0, updates=40, report=False)[-1] > 0.5


def test_live_words_do_not_depend_on_the_size_of_the_chunks(tmp_path, capsys):
    live = load_example("live_words")
    small = {"channels": 12, "sounds": 8, "steps": 1, "played": ["rise"]}
    heard, probabilities = live.main(chunk=0.03, **small)
    assert set(heard) <= set(live.TONES)
    assert_close(probabilities.sum(-1), torch.ones(len(probabilities)))
    _, in_one = live.main(chunk=10.0, **small)
    assert torch.equal(in_one, probabilities)
    printed = capsys.readouterr().out
    differences = [float(line.split(", to ")[1][:5]) for line in printed.splitlines() if "their sum is" in line]
    assert len(differences) == 2
    assert max(differences) < 1e-10


def test_live_words_of_a_sound_file(tmp_path, capsys):
    live = load_example("live_words")
    sound = np.sin(2 * np.pi * 440 * np.arange(22_050) / 44_100)
    wavfile.write(tmp_path / "a.wav", 44_100, np.stack((sound, sound), -1).astype(np.float32))
    _, probabilities = live.main(tmp_path / "a.wav", channels=12, sounds=8, steps=1)
    assert len(probabilities) == 125
    assert "to " in capsys.readouterr().out
    wavfile.write(tmp_path / "long.wav", 1000, np.zeros(60_000, np.float32))
    with pytest.raises(InputError, match="takes at most 59 s"):
        live.read_sound(tmp_path / "long.wav")
    wavfile.write(tmp_path / "silent.wav", 16_000, np.zeros(8000, np.int16))
    with pytest.raises(InputError, match="is silent"):
        live.read_sound(tmp_path / "silent.wav")
    for chunk in (0.0, float("nan")):
        with pytest.raises(InputError, match=r"--chunk .*must be at least one sample"):
            live.main(tmp_path / "a.wav", chunk=chunk)


def test_live_words_report_errors_like_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["live_words.py", "--run", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "live_words.py"), run_name="__main__")
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(f"InputError: {tmp_path / 'none'} cannot be read")


def train_one_step(tmp_path, task, neurons=None):
    """Train for one step and return the folder of the run."""
    model = task.spiking_model(SpikingModelSpec(neurons or cells.SiLIF(6), input_size=1, output_size=1))
    settings = training.TrainConfig(steps=1, batch_size=2, evaluation_size=2)
    training.run(training.Experiment(task, model, settings), tmp_path / "run")
    return tmp_path / "run"


def write_spike_file(path, channels=12):
    """Write eight recordings of two words by four speakers and return the path."""
    generator = np.random.default_rng(0)
    made = [
        (Events.of(generator.uniform(0, 0.4, 90), generator.integers(0, channels, 90)), number % 2)
        for number in range(8)
    ]
    write_spikes(path, made, words=("high", "low"), speakers=np.arange(8) // 2)
    return str(path)


@pytest.mark.parametrize(
    ("bins", "merge"),
    [
        (Bins(100, 0.6, 12, pool=2), (1, 1)),
        (Bins(100, 0.6, 12, pool=2), (5, 1)),
        (Bins(60, 0.6, 12, pool=2), (4, 3)),
        (Bins(60, 0.3, 12, pool=1, rule="silif"), (3, 2)),  # the sound is longer than its 0.3 s
    ],
    ids=str,
)
def test_live_words_of_a_run_use_the_frames_that_its_task_makes_from_the_same_spikes(
    bins, merge, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    task = tasks.EventFrames(
        write_spike_file(tmp_path / "a.h5"), test_speakers=(3,), bins=bins, merge=merge, masked=False
    )
    run = train_one_step(tmp_path, task)
    live, heard, step = load_example("live_words"), [], SpikingModel.step
    sound = np.random.default_rng(1).standard_normal(8000)
    wavfile.write(tmp_path / "a.wav", 16_000, sound.astype(np.float32))

    def record(model, frame, state):
        heard.append(frame)
        return step(model, frame, state)

    monkeypatch.setattr(SpikingModel, "step", record)
    live.main(tmp_path / "a.wav", run=run)
    ear = Cochlea(channels=12).listen(level=np.sqrt((sound.astype(np.float32).astype(float) ** 2).mean()), piece=0.1)
    spikes = live.join_events(ear(live.read_sound(tmp_path / "a.wav")), ear.end())
    expected = task._batch(EventDataset([(spikes, 0)], bins), torch.zeros(1, dtype=torch.int64)).inputs[0]
    frames = torch.cat(heard)
    common = min(len(frames), len(expected))
    assert_close(frames[:common], expected[:common], rtol=0, atol=0)
    assert frames.sum() == len(spikes.times)  # every spike counts exactly once
    assert not expected[common:].any()
    printed = capsys.readouterr().out
    assert f"frames of {1000 * live.Frames(bins, merge).seconds:.3g} ms, {task.input_size} features" in printed
    assert "high" in printed


def test_live_words_bin_the_events_of_a_file_like_its_task(tmp_path, monkeypatch):
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    live, path = load_example("live_words"), write_spike_file(tmp_path / "a.h5")
    for bins, merge in ((Bins(40, 0.41, 12, pool=1), (5, 2)), (Bins(31, 0.41, 12, pool=3, rule="silif"), (1, 2))):
        task = tasks.EventFrames(path, test_speakers=(3,), bins=bins, merge=merge, masked=False)
        batch = next(task.evaluation("test", 2, 2))
        for frames, number in zip(batch.inputs, (6, 7), strict=True):
            events, _ = SpikeFile(path, channels=12)[number]
            assert torch.equal(live.Frames(bins, merge).counts(events, 0, task.length), frames)


def test_live_words_reject_a_run_whose_frames_they_cannot_make(tmp_path, monkeypatch):
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    live, path = load_example("live_words"), tmp_path / "frames.npz"
    counts = np.random.default_rng(0).poisson(1.0, (8, 20, 6)).astype(np.uint8)
    np.savez(path, frames=counts, label=np.arange(8) % 2, is_test=np.arange(8) > 5)
    run = train_one_step(tmp_path, tasks.EventFrames(str(path)))  # the default bins make 250 frames of 140 features
    with pytest.raises(InputError, match=r"frames of shape \(20, 6\).*their duration is unknown.*--task\.bins"):
        live.load_run(run)
    path.rename(tmp_path / "elsewhere.npz")
    with pytest.raises(InputError, match="does not exist, so their duration is unknown"):
        live.load_run(run)


def test_live_words_accept_frames_of_a_file_with_known_bins(tmp_path):
    live, path, bins = load_example("live_words"), tmp_path / "frames.npz", Bins(20, 0.5, 12, pool=2)
    counts = np.random.default_rng(0).poisson(1.0, (8, 20, 6)).astype(np.uint8)
    np.savez(path, frames=counts, label=np.arange(8) % 2, is_test=np.arange(8) > 5)
    run = train_one_step(tmp_path, tasks.EventFrames(str(path), bins=bins, merge=(2, 3)))
    _, words, frames = live.load_run(run)
    assert words == ()
    assert (frames.bins, frames.merge, frames.features, frames.seconds) == (bins, (2, 3), 2, 0.05)
