"""Tests of the cochlea against the program it is modelled on and against itself, and of its command."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")

from scipy.io import wavfile

from adptnet.errors import InputError
from adptnet.integrations.silif import from_silif
from adptnet_lab import cli
from adptnet_lab.cli.cochlea import center_sound
from adptnet_lab.events import Bins, Cochlea, SpikeFile, bushy_cells, hair_cells, read_wav
from support.golden import golden


def tone(frequency: float, seconds: float = 0.4, rate: int = 16_000) -> np.ndarray:
    return np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def test_membrane_and_hair_cells_agree_with_lauscher():
    with np.load(golden("golden/cochlea_golden.npz")) as file:
        sound, velocity, probability = file["pcm16"], file["bm_velocity"], file["hair_prob"]
    cochlea = Cochlea(channels=8, ramp=None)
    ours = cochlea.velocity(sound)
    assert np.abs(ours - velocity).max() < 1e-6 * np.abs(velocity).max()
    assert np.abs(cochlea.probabilities(sound) - probability).max() < 1e-6


def test_high_tones_move_the_base_and_low_ones_the_apex():
    # Best places: 2.1 kHz at channel 300 of 700, 473 Hz at 500.
    cochlea = Cochlea(channels=36)
    for frequency, place in ((2100, 300), (473, 500)):
        amplitude = np.abs(cochlea.velocity(tone(frequency, 0.2))).max(-1)
        assert abs(amplitude.argmax() * 699 / 35 - place) < 40


def joined(*parts):
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


@pytest.mark.parametrize("piece", [0.1, 0.75])
def test_sound_in_chunks_gives_the_spikes_of_the_whole(piece):
    cochlea = Cochlea(channels=20)
    sound = np.random.default_rng(0).standard_normal(14_001)
    ear = cochlea.listen(level=1.0, piece=piece, seed=3)
    expected = joined(ear(sound), ear.end())
    assert len(expected[0]) > 300
    for size in (37, 800, 5000):
        ear, parts, final = cochlea.listen(level=1.0, piece=piece, seed=3), [], 0.0
        for start in range(0, len(sound), size):
            parts.append(ear(sound[start : start + size]))
            assert not len(parts[-1].times) or parts[-1].times.min() >= final
            assert final <= ear.complete_until
            final = ear.complete_until
        parts.append(ear.end())
        for found, wanted in zip(joined(*parts), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert ear.complete_until == 7000 / 8000


def test_a_stream_gives_the_spikes_of_a_sound_that_is_filtered_in_pieces():
    """Sounds beyond two seconds are filtered in pieces; here at the same loudness and without fading."""
    cochlea, sound = Cochlea(channels=20, ramp=0.0), np.random.default_rng(0).standard_normal(37_000)
    ear = cochlea.listen(level=np.sqrt((sound**2).mean()), seed=5)
    whole = cochlea(sound, seed=5)
    for found, wanted in zip(joined(ear(sound), ear.end()), whole, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_stream_rejects_invalid_arguments_and_chunks():
    cochlea = Cochlea(channels=4)
    with pytest.raises(InputError, match=r"level=0\): pass the root mean square"):
        cochlea.listen(level=0)
    with pytest.raises(InputError, match=r"piece=9\): must be from 0\.05 to 2 seconds"):
        cochlea.listen(level=1.0, piece=9)
    ear = cochlea.listen(level=1.0)
    with pytest.raises(InputError, match=r"one-dimensional array of finite samples; got shape \(4, 2\)"):
        ear(np.zeros((4, 2)))
    ear.end()
    with pytest.raises(InputError, match="the sound has ended"):
        ear(np.zeros(4))


def test_the_command_names_the_file_that_it_cannot_convert(tmp_path, capsys):
    wavfile.write(tmp_path / "short.wav", 16_000, np.zeros(20, np.int16))
    (tmp_path / "text.wav").write_text("no sound at all" * 10)
    for name, message in (("short", "short.wav: a sound of 20 samples is too short"), ("text", "not understood. Only")):
        assert cli.main(["cochlea", str(tmp_path / f"{name}.wav"), str(tmp_path / "out.h5")]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert ".." not in error.replace(str(tmp_path), "")
    assert not (tmp_path / "out.h5").exists()


def test_spikes_agree_with_a_simulation_of_individual_fibres():
    """The reference draws forty fibres, each with a refractory time of 1 ms, and integrates the bushy cell directly."""
    dt, channels, steps = 1 / 8000, 30, 1200
    probability = np.full((steps, channels), 0.03, np.float32)
    probability[400:800] = 0.12
    rng = np.random.default_rng(0)
    ready = np.zeros((channels, 40))
    v, current, asleep = np.zeros(channels), np.zeros(channels), np.zeros(channels)
    fibre_spikes = expected = 0
    for t in range(steps):
        fired = v >= 1
        expected += fired.sum()
        v = np.where(fired, 0.0, v * np.exp(-dt / 1e-3))
        asleep = np.where(fired, t + 8, asleep)
        current = current * np.exp(-dt / 0.5e-3)
        fibres = (rng.random((channels, 40)) < probability[t][:, None]) & (ready <= t)
        ready[fibres] = t + 8
        fibre_spikes += fibres.sum()
        current = current + fibres.sum(-1)
        v = np.minimum(np.where(asleep > t, v, v + 325 * dt * current), 1)
    cells = bushy_cells.BushyCells(channels, dt, np.random.default_rng(1))
    found = cells.count_firing_fibres(probability).sum()
    assert abs(found - fibre_spikes) < 4 * np.sqrt(fibre_spikes)
    when, where = bushy_cells.BushyCells(channels, dt, np.random.default_rng(1)).spikes(probability)
    assert abs(when.size - expected) < 0.05 * expected
    assert expected > 1000
    same = np.diff(when[where == 3])
    assert same.min() >= 8


def test_the_nerve_carries_its_state_between_blocks():
    probability = np.random.default_rng(0).uniform(0, 0.2, (300, 5)).astype(np.float32)
    cells = bushy_cells.BushyCells(5, 1 / 8000, np.random.default_rng(0))
    cells.refractory = 1000  # a fibre that has fired stays silent, also in later blocks
    counts = sum(cells.count_firing_fibres(part).sum(0) for part in np.split(probability, 3))
    assert (counts <= 40 * 3).all()
    hair = hair_cells.HairCells(5, 1 / 8000)
    velocity = np.random.default_rng(1).normal(0, 50, (300, 5))
    whole = hair_cells.HairCells(5, 1 / 8000).probabilities(velocity)
    parts = np.concatenate([hair.probabilities(part) for part in np.split(velocity, 3)])
    np.testing.assert_allclose(parts, whole, rtol=1e-12)


def test_filtering_a_long_sound_in_pieces_approximates_filtering_it_whole():
    cochlea = Cochlea(channels=12)
    sound = np.random.default_rng(0).normal(size=40_000)
    sound[:4000] *= np.linspace(0, 1, 4000)
    pieces = np.concatenate(list(cochlea.filter_blocks(sound)))
    whole = cochlea.filter_padded(sound, 48_000)[:20_000]
    assert pieces.shape == whole.shape
    error = np.linalg.norm(pieces - whole, axis=0) / np.linalg.norm(whole, axis=0)
    assert error.max() < 0.03  # channels above the highest frequency of the sound ring longest
    assert error[3:].max() < 0.01


def test_a_seed_gives_the_same_spikes():
    cochlea = Cochlea(channels=50)
    first, again, other = (cochlea(tone(800), seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.times, again.times)
    assert np.array_equal(first.units, again.units)
    assert first.times.size != other.times.size or not np.array_equal(first.units, other.units)
    assert 0 <= first.times.min() < first.times.max() <= 0.4
    assert (np.diff(first.times) >= 0).all()


def test_another_rate_is_resampled_and_loudness_does_not_matter():
    cochlea = Cochlea(channels=30)
    here = cochlea.probabilities(tone(900))
    there = cochlea.probabilities(7 * tone(900, rate=44_100), 44_100)
    middle = slice(800, 2400)
    assert np.abs(here[:, middle] - there[:, middle]).max() < 0.05 * here.max()


@pytest.mark.parametrize(
    ("sound", "words"),
    [
        (np.zeros((100, 2)), "For stereo"),
        (np.zeros(0), "too short"),
        (np.full(1000, np.nan), "NaN"),
    ],
)
def test_an_invalid_sound_raises(sound, words):
    with pytest.raises(InputError, match=words):
        Cochlea(channels=8)(sound)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Cochlea(loudness=np.inf), "loudness must be above 0"),
        (lambda: Cochlea(channels=70.5), "integer from 2 to 1638"),
        (lambda: Cochlea(rate=16_000.5), "an integer"),
        (lambda: Cochlea(channels=8)(np.ones(1000), 44_100.5), "samples per second are an integer >= 1000"),
        (lambda: Cochlea(channels=8)(np.ones(1000), seed=-1), "seed=-1"),
    ],
)
def test_invalid_arguments_raise(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_silence_has_spontaneous_spikes_only():
    cochlea = Cochlea(channels=40)
    assert cochlea(np.zeros(8000)).times.size < 0.5 * cochlea(tone(900, 0.5)).times.size


# Sound files and the command.


def write(path, sound, rate=16_000, dtype=np.int16):
    scale = 20_000 if np.issubdtype(dtype, np.integer) else 0.5
    wavfile.write(path, rate, (scale * sound).astype(dtype))


def test_sound_files(tmp_path):
    write(tmp_path / "a.wav", tone(500), 44_100)
    sound, rate = read_wav(tmp_path / "a.wav")
    assert (sound.size, rate) == (6400, 44_100)
    write(tmp_path / "b.wav", np.stack((tone(500), -tone(500)), -1))
    with pytest.raises(InputError, match="--mix"):
        read_wav(tmp_path / "b.wav")
    assert not read_wav(tmp_path / "b.wav", mix=True)[0].any()
    write(tmp_path / "c.wav", tone(500), dtype=np.float32)
    assert abs(read_wav(tmp_path / "c.wav")[0]).max() == pytest.approx(0.5, abs=1e-3)
    for name, sides in (("d.wav", 1), ("e.wav", 2)):  # 8-bit samples, whose zero is 128
        wavfile.write(tmp_path / name, 16_000, np.full((1000, sides), 138, np.uint8))
        assert set(read_wav(tmp_path / name, mix=True)[0].tolist()) == {10.0}
    content = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(content[:5000])
    with pytest.raises(InputError, match="may be truncated"):
        read_wav(tmp_path / "cut.wav")
    (tmp_path / "text.wav").write_text("not a sound")
    with pytest.raises(InputError, match="cannot be read as a wav file"):
        read_wav(tmp_path / "text.wav")
    write(tmp_path / "empty.wav", np.zeros(0))
    with pytest.raises(InputError, match="holds no samples"):
        read_wav(tmp_path / "empty.wav")


def test_padding_and_cropping_keep_a_sound_center_sound():
    assert center_sound(np.arange(1, 4), 7).tolist() == [0, 0, 1, 2, 3, 0, 0]
    assert center_sound(np.arange(7), 3).tolist() == [2, 3, 4]


@pytest.fixture
def few_channels(monkeypatch):
    """Replace the command's cochlea by one with fewer channels, for speed."""
    monkeypatch.setattr("adptnet_lab.cli.cochlea.Cochlea", lambda **options: Cochlea(channels=60, **options))


def test_the_command_converts_folders_to_a_spike_file(tmp_path, few_channels, capsys):
    pytest.importorskip("h5py")
    for word, frequency in (("low", 300), ("high", 2000)):
        (tmp_path / word).mkdir()
        write(tmp_path / word / "1.wav", tone(frequency, 0.3))
        write(tmp_path / word / "2.WAV", tone(frequency, 0.2, 44_100), 44_100)
    out = tmp_path / "out.h5"
    assert cli.main(["cochlea", str(tmp_path), str(out), "--seconds", "0.4"]) == 0
    file = SpikeFile(out)
    assert file.words == ["high", "low"]
    assert file.labels.tolist() == [0, 0, 1, 1]
    places = [np.median(file[i][0].units) for i in range(4)]
    assert max(places[:2]) < min(places[2:])
    assert all(file[i][0].times.max() <= 0.4 for i in range(4))
    assert cli.main(["cochlea", str(tmp_path), str(out)]) == 1
    assert "exists" in capsys.readouterr().err
    before = out.read_bytes()
    (tmp_path / "low" / "3.wav").write_text("not a sound")
    assert cli.main(["cochlea", str(tmp_path), str(out), "--overwrite"]) == 1
    assert out.read_bytes() == before
    assert not list(tmp_path.glob(".out*"))
    assert cli.main(["cochlea", str(tmp_path / "nothing"), str(tmp_path / "x.h5")]) == 1


def test_the_command_takes_words_from_file_names(tmp_path, few_channels, capsys):
    pytest.importorskip("h5py")
    for name in ("7_theo_0", "3_jackson_7", "3_theo_1", "seven"):
        write(tmp_path / f"{name}.wav", tone(500, 0.1))
    out = tmp_path / "out.h5"
    assert cli.main(["cochlea", str(tmp_path), str(out), "--label-from", "name"]) == 0
    assert SpikeFile(out).words == ["3", "7", "seven"]
    assert SpikeFile(out).labels.tolist() == [0, 0, 1, 2]
    printed = capsys.readouterr()
    assert f"4 recordings, 3 words (3, 7, seven): {out}" in " ".join(printed.out.split())
    assert "warning" not in printed.err


def test_the_command_warns_where_every_recording_would_have_one_label(tmp_path, few_channels, capsys, monkeypatch):
    pytest.importorskip("h5py")
    (tmp_path / "wavs").mkdir()
    monkeypatch.chdir(tmp_path / "wavs")
    write(Path("3_jackson_7.wav"), tone(500, 0.1))
    assert cli.main(["cochlea", ".", "../one.h5"]) == 0
    assert "warning" not in capsys.readouterr().err  # one recording has one word
    write(Path("7_jackson_7.wav"), tone(500, 0.1))
    assert cli.main(["cochlea", ".", "../two.h5"]) == 0
    printed = capsys.readouterr()
    assert "2 recordings, 1 words (wavs)" in printed.out
    assert "warning: all 2 recordings have the label 0, the word 'wavs'" in printed.err
    assert "--label-from name" in printed.err
    assert "'3_jackson_7.wav' would be '3'" in printed.err


def test_folders_of_one_name_are_one_word(tmp_path, few_channels, capsys):
    pytest.importorskip("h5py")
    for folder in ("train/low", "train/high", "test/low"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder / "a.wav", tone(500, 0.1))
    assert cli.main(["cochlea", str(tmp_path), str(tmp_path / "out.h5")]) == 0
    file = SpikeFile(tmp_path / "out.h5")
    assert file.words == ["high", "low"]
    assert file.labels.tolist() == [1, 0, 1]
    assert repr(file) == f"SpikeFile({str(file.path)!r}, channels=700): 3 recordings, 2 words, 0 speakers"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.h5", "--seconds", "nan"], "--seconds nan: must be a positive length"),
        (["a.h5", "--seconds", "-1"], "--seconds -1: must be a positive length"),
        (["a.h5", "--seed", "-1"], "--seed -1"),
        (["", "--overwrite"], "is a folder, or its folder does not exist. Pass the name of a file"),
        (["none/a.h5"], "is a folder, or its folder does not exist. Pass the name of a file"),
    ],
)
def test_the_command_reports_invalid_arguments(tmp_path, capsys, arguments, words):
    write(tmp_path / "a.wav", tone(500, 0.2))
    output, *options = arguments
    assert cli.main(["cochlea", str(tmp_path / "a.wav"), str(tmp_path / output), *options]) == 1
    assert words in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["a.wav"]


def test_importing_events_imports_neither_h5py_nor_scipy():
    code = "import sys, adptnet_lab.events, adptnet_lab.cli; print([m for m in ('h5py', 'scipy') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


# At full size, on real speech.


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_network_trained_on_speech_commands_recognises_digits_through_the_cochlea():
    model = from_silif(golden("golden/silif_ssc_4ms_seed13.npz"))
    with np.load(golden("audiomnist_16k_1800.npz")) as file:
        clips = np.split(file["audio"], np.cumsum(file["lengths"])[:-1])
        chosen = np.flatnonzero((file["take"] == 0) & (file["speaker"] % 6 == 1))  # ten speakers
        sounds, digits = [clips[i] for i in chosen], file["label"][chosen]
    cochlea, bins = Cochlea(), Bins.of_silif(4)
    frames = [bins.frames(cochlea(center_sound(sound, 16_000), seed=i)) for i, sound in enumerate(sounds)]
    with torch.no_grad():
        answers = model(torch.from_numpy(np.stack(frames)).float())[0].argmax(-1).numpy()
    accuracy = (answers == digits).mean()
    print(f"{100 * accuracy:.0f} % of {len(digits)} digits among 35 words")
    assert accuracy >= 0.4


@pytest.mark.slow
def test_the_cochlea_runs_twice_as_fast_as_real_time():
    with np.load(golden("audiomnist_16k_1800.npz")) as file:
        sound = center_sound(file["audio"][: file["lengths"][0]], 16_000)
    cochlea = Cochlea()
    cochlea(sound)
    times = []
    for seed in range(5):
        start = time.process_time()
        cochlea(sound, seed=seed)
        times.append(time.process_time() - start)
    print(f"{1 / min(times):.1f} times real time")
    assert min(times) < 0.5
