"""Tests of event data as a task: splits, batches, training on spike files, and the errors for invalid files."""

import json

import numpy as np
import pytest
import torch

from adptnet import analysis, cells
from adptnet.errors import DataError, IncompatibleError, InputError, SpecError
from adptnet.nn import SpikingModelSpec
from adptnet.spec import Spec
from adptnet_lab import cli, training
from adptnet_lab.events import Bins, Drop, Events, PixelFile, SpikeFile, TimeJitter, open_archive, write_spikes
from adptnet_lab.tasks import EventFrames
from support.golden import golden

WORDS = ("high", "low")


def recordings(count: int, seed: int) -> list[tuple[Events, int]]:
    """Return recordings of two words, in the lower and the upper half of the units, at random times up to 0.8 s."""
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        size = int(generator.integers(30, 60))
        units = generator.integers(0, 350, size) + 350 * (number % 2)
        made.append((Events.of(generator.uniform(0, 0.8, size), units), number % 2))
    return made


@pytest.fixture
def speech(tmp_path, monkeypatch):
    """Return a folder with tiny versions of the three files of Spiking Speech Commands; use an empty cache."""
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, (split, count) in enumerate((("train", 40), ("valid", 12), ("test", 16))):
        made = recordings(count, seed)
        write_spikes(folder / f"ssc_{split}.h5", made, words=WORDS, speakers=np.arange(count) // 4)
    monkeypatch.setenv("ADPTNET_DATA", str(folder))
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def frames(tmp_path):
    """Return an npz of frames: five speakers, two words, three takes."""
    generator = np.random.default_rng(0)
    path = tmp_path / "frames.npz"
    counts = generator.poisson(0.3, (30, 12, 6)).astype(np.uint8)
    counts[0, 5:] = 0
    np.savez(path, frames=counts, label=np.arange(30) % 2, speaker=np.arange(30) // 6)
    return path


# Splits.


def indices_of(task: EventFrames, split, every: np.ndarray) -> list[int]:
    """Return the indices in `every`, frames that all differ, of the recordings of a split."""
    batch = task.examples(split, torch.arange(task.size(split)))
    return [int((every == frames).all((1, 2)).argmax()) for frames in batch.inputs.numpy()]


def speakers_of(task: EventFrames, split) -> set[int]:
    with np.load(task.path) as file:
        return set(file["speaker"][indices_of(task, split, file["frames"])].tolist())


def test_no_speaker_is_in_two_splits(frames):
    task = EventFrames(str(frames), test_speakers=(1, 4), validation=0.3)
    train, validation, test = (speakers_of(task, split) for split in ("train", "validation", "test"))
    assert test == {1, 4}
    assert len(validation) == 1  # of three
    assert train | validation == {0, 2, 3}
    assert not train & validation
    assert [task.size(split) for split in ("train", "validation", "test")] == [12, 6, 12]
    assert {frozenset(speakers_of(EventFrames(str(frames), test_speakers=(1, 4), split_seed=s), "validation"))
            for s in range(9)} == {frozenset({n}) for n in (0, 2, 3)}  # fmt: skip


def test_without_speakers_recordings_are_held_out(tmp_path):
    path = tmp_path / "frames.npz"
    frames = np.arange(240, dtype=np.uint8).reshape(20, 4, 3)
    np.savez(path, frames=frames, label=np.arange(20) % 3, is_test=np.arange(20) < 5)
    task = EventFrames(str(path), validation=0.2)
    assert [task.size(split) for split in ("train", "validation", "test")] == [12, 3, 5]
    assert indices_of(task, "test", frames) == list(range(5))


def test_a_relative_path_is_searched_for_in_the_data_folder(frames, tmp_path, monkeypatch):
    expected = EventFrames(str(frames), test_speakers=(1,)).size("train")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("ADPTNET_DATA", str(frames.parent))
    assert EventFrames(frames.name, test_speakers=(1,)).size("train") == expected
    with pytest.raises(DataError, match=r"there is no file none\.npz"):
        EventFrames("none.npz", test_speakers=(1,)).size("train")


def test_published_files_have_their_own_splits(speech):
    task = EventFrames("ssc", bins=Bins(20, 1.0))
    assert [task.size(split) for split in ("train", "validation", "test")] == [40, 12, 16]
    assert (task.length, task.input_size, task.output_size, task.chance) == (20, 140, 2, 0.5)
    given = EventFrames(str(speech / "ssc_train.h5"), str(speech / "ssc_valid.h5"), str(speech / "ssc_test.h5"))
    assert [given.size(split) for split in ("train", "validation", "test")] == [40, 12, 16]
    held = EventFrames(str(speech / "ssc_train.h5"), test_path=str(speech / "ssc_test.h5"), validation=0.2)
    assert [held.size(split) for split in ("train", "validation", "test")] == [32, 8, 16]
    file = SpikeFile(speech / "ssc_train.h5")
    every = np.stack([held.bins.frames(file[i][0]) for i in range(len(file))])
    train, validation = (set(file.speakers[indices_of(held, split, every)]) for split in ("train", "validation"))
    assert len(train | validation) == 10
    assert not train & validation


# Batches.


def test_a_batch_holds_the_merged_frames(frames):
    counts = np.load(frames)["frames"].astype(float)
    task = EventFrames(str(frames), test_speakers=(0,), merge=(3, 2))
    batch = next(task.evaluation("test", 6, 6))
    expected = np.zeros((6, 4, 3))
    for t in range(12):
        for f in range(6):
            expected[:, t // 3, f // 2] += counts[:6, t, f]
    np.testing.assert_array_equal(batch.inputs.numpy(), expected)
    assert batch.inputs.dtype == torch.get_default_dtype()
    assert batch.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert batch.lengths[0] == 2  # five frames, merged three by three
    assert next(EventFrames(str(frames), test_speakers=(0,), masked=False).evaluation("test", 6, 6)).lengths is None


def test_cached_frames_equal_computed_frames(speech, tmp_path):
    bins = Bins(25, 1.0, pool=10)
    kept, counted = (EventFrames("ssc", bins=bins, cached=cached) for cached in (True, False))
    for step in range(3):
        for one, other in zip(
            kept.training_batch(step, 16, 0)[:3], counted.training_batch(step, 16, 0)[:3], strict=True
        ):
            assert torch.equal(one, other)
    assert [path.suffix for path in sorted((tmp_path / "cache" / "frames").iterdir())] == [".npy", ".json"]
    events, label = SpikeFile(speech / "ssc_test.h5")[3]
    batch = kept.examples("test", torch.tensor([3]))
    np.testing.assert_array_equal(batch.inputs[0].numpy(), bins.frames(events))
    assert (batch.targets.item(), batch.lengths.item()) == (label, bins.length(events))
    assert len(list((tmp_path / "cache" / "frames").glob("*.npy"))) == 2  # one more, for the test file


def test_augmentations_change_only_training_and_depend_on_seed_and_step(speech):
    plain = EventFrames("ssc", bins=Bins(20, 1.0))
    task = EventFrames("ssc", bins=Bins(20, 1.0), augmentations=(Drop(0.5), TimeJitter(0.01)))
    first = task.training_batch(0, 40, 0).inputs
    assert torch.equal(first, task.training_batch(0, 40, 0).inputs)
    assert 0.4 < first.sum() / plain.training_batch(0, 40, 0).inputs.sum() < 0.6
    totals = {task.training_batch(step, 40, seed).inputs.sum().item() for step, seed in ((0, 0), (1, 0), (0, 1))}
    assert len(totals) == 3
    assert torch.equal(
        next(task.evaluation("validation", 12, 12)).inputs, next(plain.evaluation("validation", 12, 12)).inputs
    )
    assert EventFrames("ssc", augmentations=Drop(0.5)).augmentations == (Drop(0.5),)
    assert Spec.from_json(task.to_json()) == task


# Training on spike files.


@pytest.mark.parametrize("layer", ["silif-network", "spiking-adpt-network"])
def test_the_recipe_of_spiking_speech_commands_runs_from_files_to_a_report(speech, tmp_path, capsys, layer):
    task = ["--task.path", "ssc", "--task.bins", "Bins(30, 1.2, rule='silif')", "--task.no-masked"]
    model = ["--model.layer", layer, "--model.width", 16, "--model.dropout", 0.1, "--model.momentum", 0.3]
    how = ["--training.optimizer", "adam", "--training.learning-rate", 0.02, "--training.clip", "None"]
    how += ["--training.schedule", "ReduceOnPlateau(factor=0.7, patience=10)", "--training.evaluate-every", 10]
    how += ["--training.steps", 60, "--training.batch-size", 20]
    run = tmp_path / "run"
    arguments = ["train", "event-frames", *task, *model, *how, "--output", run]
    assert cli.main([str(argument) for argument in arguments]) == 0
    found = training.read_experiment(run)
    assert found.task == EventFrames("ssc", bins=Bins(30, 1.2, rule="silif"), masked=False)
    assert isinstance(found.model, SpikingModelSpec)
    assert (found.model.input_size, found.model.output_size, found.model.dropout) == (140, 2, 0.1)
    result = training.read_result(run)
    assert result["score"] == 1.0  # the two words have no unit in common
    assert result["parameters"] == sum(p.numel() for p in found.model.build().parameters())
    capsys.readouterr()
    assert cli.main(["evaluate", str(run), "--efficiency"]) == 0
    printed = capsys.readouterr().out
    model = training.load_model(run)
    batch = next(found.task.evaluation("test", 16, 16))
    assert str(analysis.efficiency(model, batch.inputs)) in printed
    assert json.loads((run / "evaluation-test.json").read_text())["30"]["accuracy"] == 1.0


def test_a_spiking_network_from_a_saved_config_takes_flags(speech, tmp_path):
    arguments = ["train", "event-frames", "--task.bins", "Bins(10, 1.0)", "--model.layer", "lif-network"]
    arguments += ["--model.width", "8", "--model.spike", "ATan(alpha=3)", "--training.steps", "2"]
    arguments += ["--training.batch-size", "8", "--output", str(tmp_path / "a")]
    assert cli.main(arguments) == 0
    spec = training.read_experiment(tmp_path / "a").model
    assert spec == SpikingModelSpec(cells.LIF(8, spike=cells.ATan(alpha=3)), 140, 2)
    again = ["train", "--config", str(tmp_path / "a"), "--model.depth", "1", "--output", str(tmp_path / "b")]
    assert cli.main(again) == 0
    assert training.read_experiment(tmp_path / "b").model == SpikingModelSpec(spec.neuron, 140, 2, depth=1)
    assert cli.main(["train", "--output", str(tmp_path / "b"), "--resume"]) == 0


def test_the_trainer_accepts_real_recordings(tmp_path, monkeypatch):
    train, test = golden("amnist_shdlike_train.h5"), golden("amnist_shdlike_test.h5")
    camera = golden("nmnist_1100.npz")
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    words = EventFrames(str(train), test_path=str(test), bins=Bins(25, 1.0, pool=20))
    digits = EventFrames(str(camera), bins=Bins(10, 0.34, channels=2312, pool=1))
    assert [words.size(split) for split in ("train", "validation", "test")][2] == 50
    assert (digits.size("test"), digits.output_size, digits.input_size) == (100, 10, 2312)
    for task in (words, digits):
        network = task.spiking_model(SpikingModelSpec(cells.SiLIF(12, dt=0.04), 1, 1, momentum=0.3))
        model, settings = network.build(), training.TrainConfig(steps=12, batch_size=50, learning_rate=0.02)
        losses = training.train(model, task, settings).losses
        assert sum(losses[-3:]) < sum(losses[:3])


# Errors.


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"frames": np.ones((3, 4, 5), np.uint8)}, "arrays frames; it must have label, and frames or x, y"),
        ({"frames": np.ones((3, 4)), "label": np.arange(3)}, "frames are float64 of shape \\(3, 4\\)"),
        ({"frames": np.ones((3, 4, 5), np.uint8), "label": np.arange(2)}, "label has shape \\(2,\\); there are 3"),
        ({"frames": np.ones((3, 4, 5), np.uint8), "label": np.arange(3) - 1}, "integers >= 0"),
        ({"frames": np.asarray([{}]), "label": np.arange(1)}, "cannot be read: Object arrays"),
        ({**dict.fromkeys("xyp", np.zeros(4)), "t_us": np.zeros(4), "lengths": np.asarray([2, 1]), "label": [0, 1]},
         "lengths that sum to 3"),
        ({**dict.fromkeys(("x", "y", "p", "t_us"), np.zeros(3, int)), "lengths": np.asarray([5, -2]), "label": [0, 1]},
         "lengths are int64 from -2"),
        ({**dict.fromkeys(("x", "y", "p", "t_us", "lengths", "label"), np.zeros(0, int))}, "holds no recordings"),
    ],
)  # fmt: skip
def test_invalid_archives_raise(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=message):
        open_archive(tmp_path / "a.npz")


def test_a_truncated_archive_raises(tmp_path, frames):
    (tmp_path / "cut.npz").write_bytes(frames.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"not an npz file, or it is truncated"):
        EventFrames(str(tmp_path / "cut.npz"), test_speakers=(1,)).size("train")
    content = bytearray(frames.read_bytes())
    content[400:900] = bytes(500)
    (tmp_path / "hole.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read: .*download it again"):
        open_archive(tmp_path / "hole.npz")


def test_events_of_a_camera_are_validated(tmp_path):
    arrays = {"x": [0, 40], "y": [1, 1], "p": [0, 1], "t_us": [5, 9], "lengths": [1, 1], "label": [3, 4]}
    np.savez(tmp_path / "a.npz", **arrays)
    file = open_archive(tmp_path / "a.npz")
    assert isinstance(file, PixelFile)
    events, label = file[0]
    assert (events.times.tolist(), events.units.tolist(), label) == ([5e-6], [34], 3)
    with pytest.raises(InputError, match="x ranges from 40 to 40; the camera has width=34"):
        file[1]
    with pytest.raises(InputError, match="x ranges from 40 to 40"):
        file[-1]
    with pytest.raises(IndexError):
        file[2]


def test_invalid_tasks_raise(frames, tmp_path, speech):
    task = EventFrames(str(frames))
    with pytest.raises(DataError, match=r"the test set is not defined. Pass test_path=.*its speakers are 0 to 4"):
        task.size("train")  # raised before training starts
    with pytest.raises(DataError, match=r"no speaker 7; its speakers are 0 to 4"):
        EventFrames(str(frames), test_speakers=(7,)).size("train")
    with pytest.raises(IncompatibleError, match="the same file is used for training and"):
        EventFrames("a.h5", test_path="a.h5")
    with pytest.raises(DataError, match="no recording is left for validation"):
        EventFrames(str(frames), validation=0.0, test_speakers=(1,)).size("validation")
    with pytest.raises(InputError, match=r"5 does not divide 12 frames. Pass 4 instead"):
        EventFrames(str(frames), merge=(5, 1)).input_size  # noqa: B018
    with pytest.raises(InputError, match="these recordings have 12 frames"):
        next(EventFrames(str(frames), test_speakers=(1,)).evaluation("test", 2, 2, length=3))
    with pytest.raises(IncompatibleError, match="holds frames; augmentations apply to events"):
        EventFrames(str(frames), augmentations=(Drop(),), test_speakers=(1,)).training_batch(0, 2, 0)
    with pytest.raises(DataError, match="there is no file"):
        EventFrames(str(tmp_path / "none.h5")).size("train")
    (tmp_path / "a.wav").touch()
    with pytest.raises(DataError, match=r"recordings are in \.h5 files"):
        EventFrames(str(tmp_path / "a.wav")).size("train")
    with pytest.raises(DataError, match=r"shd_train\.h5 is not in .*Download https://zenkelab.org"):
        EventFrames("shd").size("train")
    with pytest.raises(IncompatibleError, match="has its own splits"):
        EventFrames("ssc", test_speakers=(1,))
    with pytest.raises(IncompatibleError, match="both define the test set"):
        EventFrames("a.h5", test_path="b.h5", test_speakers=(1,))
    np.savez(tmp_path / "other.npz", frames=np.ones((3, 12, 7), np.uint8), label=np.arange(3))
    with pytest.raises(DataError, match=r"has \(12, 7\) frames and features, those of .* have \(12, .*the same bins"):
        next(EventFrames(str(frames), test_path=str(tmp_path / "other.npz")).evaluation("test", 2, 2))
    with pytest.raises(SpecError, match=r"merge=\(2,\)"):
        EventFrames(merge=(2,))
    with pytest.raises(SpecError, match="as text"):
        EventFrames(path="")


def test_a_published_file_with_another_md5_raises(speech):
    (speech / "ssc_train.h5").rename(speech / "shd_train.h5")
    with pytest.raises(DataError, match=r"has the MD5 .*but 8e98.* was published.*pass its path: --task\.path FILE"):
        EventFrames("shd").size("train")


def test_only_spiking_networks_have_an_efficiency(frames, tmp_path, capsys):
    arguments = ["train", "event-frames", "--task.path", str(frames), "--task.test-speakers", "1", "--model.width", "4"]
    arguments += ["--model.layer", "gru", "--training.steps", "1", "--training.batch-size", "4"]
    assert cli.main([*arguments, "--output", str(tmp_path / "gru")]) == 0
    assert cli.main(["evaluate", str(tmp_path / "gru"), "--efficiency"]) == 1
    assert "holds no spiking network" in capsys.readouterr().err
