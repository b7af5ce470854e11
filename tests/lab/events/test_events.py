"""Tests of events: frames, files, datasets, and the errors for invalid files."""

import gzip
import hashlib
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from adptnet.errors import InputError, SpecError
from adptnet_lab.events import (
    Bins,
    ChannelShift,
    Drop,
    EventDataset,
    Events,
    PixelEvents,
    SpikeFile,
    TimeJitter,
    collate,
    find_split,
    read_aer,
    shd,
    write_aer,
    write_spikes,
)
from support.golden import golden


def random_events(count: int = 200, end: float = 1.0, seed: int = 0) -> Events:
    generator = np.random.default_rng(seed)
    return Events.of(np.sort(generator.uniform(0, end, count)), generator.integers(0, 700, count))


# Frames.


@pytest.mark.parametrize("pool", [1, 5])
def test_the_floor_rule_agrees_with_counting_events_one_by_one(pool):
    events, bins = random_events(), Bins(40, 1.0, pool=pool)
    expected = np.zeros((40, 700 // pool), int)
    for time, unit in zip(*events, strict=True):
        expected[int(time * 40), unit // pool] += 1
    np.testing.assert_array_equal(bins.frames(events), expected)
    shuffled = np.random.default_rng(1).permutation(200)
    np.testing.assert_array_equal(bins.frames(Events(events.times[shuffled], events.units[shuffled])), expected)
    assert bins.length(events) == int(events.times.max() * 40) + 1


def test_the_silif_rule_agrees_with_digitize():
    bins, events = Bins.of_silif(4), random_events(500)
    frames = bins.frames(events)
    assert frames.shape == (300, 140)
    assert frames.sum() == 500
    assert not frames[0].any()
    assert not frames[251:].any()
    width = 1.2 / 299
    expected = np.zeros((300, 140), int)
    for time, unit in zip(*events, strict=True):
        expected[int(time // width) + 1, unit // 5] += 1
    np.testing.assert_array_equal(frames, expected)
    assert Bins.of_silif(10).frames(Events.of([1.0, 1.1, 0.5], [0, 0, 0])).sum() == 1  # late events are dropped


@pytest.mark.parametrize(("late", "total", "last"), [("drop", 2, 1), ("clamp", 4, 3)])
def test_late_events(late, total, last):
    frames = Bins(10, 1.0, late=late).frames(Events.of([0.05, 1.0, 1.01, 7.0], [3, 3, 3, 3]))
    assert (frames.sum(), frames[-1].sum()) == (total, last)
    with pytest.raises(InputError, match=r"2 of 4 events come after 1\.0 s, the last at 7 s"):
        Bins(10, 1.0, late="raise").frames(Events.of([0.05, 1.0, 1.01, 7.0], [3, 3, 3, 3]))


def test_a_recording_in_milliseconds_raises():
    with pytest.raises(InputError, match=r"all 2 events come after 1\.0 s, the first at 100 s: are these seconds\?"):
        Bins(10, 1.0).frames(Events.of([100.0, 900.0], [3, 3]))
    assert Bins(10, 1.0).frames(Events.of([], np.zeros(0, int))).sum() == 0  # an empty recording does not


@pytest.mark.parametrize("labels", [[0.5, 1.0], [-1, 0]])
def test_labels_of_a_spike_file_are_whole_numbers_from_zero(tmp_path, labels):
    h5py = pytest.importorskip("h5py")
    write_spikes(tmp_path / "a.h5", [(random_events(), 0), (random_events(), 1)])
    with h5py.File(tmp_path / "a.h5", "a") as file:
        del file["labels"]
        file["labels"] = labels
    with pytest.raises(InputError, match=r"labels are .*; they must be integers >= 0"):
        SpikeFile(tmp_path / "a.h5")


def test_a_read_only_folder_raises_only_if_something_must_be_unpacked(tmp_path, monkeypatch):
    write_spikes(tmp_path / "shd_test.h5", [(random_events(), 0)])
    monkeypatch.setitem(shd.MD5, "shd_test.h5", hashlib.md5((tmp_path / "shd_test.h5").read_bytes()).hexdigest())

    def deny(path, content):
        raise PermissionError(13, "Permission denied")

    assert find_split(tmp_path, "shd_test") == tmp_path / "shd_test.h5"  # nothing is written
    (tmp_path / "ssc_test.h5.gz").write_bytes(gzip.compress((tmp_path / "shd_test.h5").read_bytes()))
    monkeypatch.setattr("builtins.open", lambda *a, real=open, **k: deny(*a) if "xb" in a else real(*a, **k))
    with pytest.raises(InputError, match=r"ssc_test\.h5\.gz cannot be unpacked into its folder: Permission denied"):
        find_split(tmp_path, "ssc_test")


def test_half_precision_times_that_round_to_the_end_are_in_the_last_frame():
    times = np.asarray([0.9999, 0.99999], np.float16)
    assert times[1] == 1.0
    frames = Bins(250, 1.0, late="raise").frames(Events.of(times, [0, 1]))
    assert frames[-1].sum() == 2


def test_events_at_huge_times_are_late():
    events = Events.of([0.1, 1e20, 1e300], [0, 1, 2])
    assert Bins().frames(events).sum() == 1
    assert Bins().length(events) == 26
    assert Bins(late="clamp").frames(events)[-1].sum() == 2


def test_an_empty_recording_has_length_one():
    empty = Events.of([], [])
    assert not Bins().frames(empty).any()
    assert Bins().length(empty) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Events.of([0.1], [1, 2]), "one unit for each time"),
        (lambda: Events.of([0.1, np.nan], [1, 2]), r"times\[1\] = nan"),
        (lambda: Events.of([0.1, -0.2], [1, 2]), r"times\[1\] = -0.2"),
        (lambda: Events.of([0.1], [0.5]), "integers"),
        (lambda: Bins().frames(Events.of([0.1, 0.2], [5, 700])), r"units\[1\] = 700; units range from 0 to 699"),
        (lambda: Events.of([0.1], [-1]), r"units\[0\] = -1"),
        (lambda: Bins(2).frames(Events.of(np.zeros(300), np.zeros(300, int))), "counts to 255"),
        (lambda: Bins(rule="round"), "Known: floor, silif"),
        (lambda: Bins(late="ignore"), "Known: clamp, drop, raise"),
        (lambda: Bins(pool=3), "must divide"),
    ],
)
def test_invalid_events_and_bins_raise(make, words):
    with pytest.raises((InputError, SpecError), match=words):
        make()


# Spike files.


@pytest.fixture
def spike_file(tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "shd_test.h5"
    recordings = [(random_events(100, seed=i), i % 3) for i in range(7)] + [(Events.of([], []), 1)]
    assert write_spikes(path, recordings, words=["one", "two", "three"], speakers=range(8)) == 8
    return path


def test_a_file_reads_back(spike_file):
    file = SpikeFile(spike_file)
    assert (len(file), file.words, list(file.speakers)) == (8, ["one", "two", "three"], list(range(8)))
    events, label = file[4]
    assert label == 1
    np.testing.assert_array_equal(events.units, random_events(100, seed=4).units)
    np.testing.assert_allclose(events.times, random_events(100, seed=4).times, atol=5e-4)
    assert events.times.dtype == np.float64
    assert file[7][0].times.size == 0
    with pytest.raises(IndexError):
        file[8]


def test_each_worker_opens_the_file(spike_file):
    dataset = EventDataset(SpikeFile(spike_file), Bins(20, 1.0))
    _ = dataset[0]  # opens the file in this process
    assert pickle.loads(pickle.dumps(dataset.recordings))._file is None
    loader = torch.utils.data.DataLoader(dataset, 3, num_workers=2, collate_fn=collate)
    alone = torch.utils.data.DataLoader(dataset, 3, collate_fn=collate)
    for ours, theirs in zip(loader, alone, strict=True):
        assert_close(ours.frames, theirs.frames)
        assert_close(ours.labels, theirs.labels)


def test_a_zeroed_region_that_would_make_hdf5_loop_forever_raises(spike_file):
    whole = spike_file.read_bytes()
    heap = whole.index(b"GCOL")

    def with_hole(start, size):
        spike_file.write_bytes(whole[:start] + bytes(size) + whole[start + size :])
        return SpikeFile(spike_file)

    inside = with_hole(heap + 40, 32)  # inside the first recording
    assert len(inside[0][0].times) == 100
    del inside
    with pytest.raises(InputError, match=r"is damaged: at byte [\d,]+ recordings were overwritten with zeros"):
        with_hole(heap + 40, 600)


def test_a_truncated_or_foreign_file_raises(spike_file, tmp_path):
    content = spike_file.read_bytes()
    (tmp_path / "cut.h5").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="may be truncated"):
        SpikeFile(tmp_path / "cut.h5")
    (tmp_path / "text.h5").write_text("not HDF5")
    with pytest.raises(InputError, match="cannot be read as HDF5"):
        SpikeFile(tmp_path / "text.h5")
    with pytest.raises(InputError, match="does not exist"):
        SpikeFile(tmp_path / "none.h5")
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["labels"] = [1]
    with pytest.raises(InputError, match="has no spikes/times"):
        SpikeFile(tmp_path / "other.h5")


@pytest.mark.parametrize(
    ("recordings", "speakers", "words"),
    [
        ([(Events.of([0.1], [1]), 0), (Events.of([0.1], [1]), -1)], None, "recording 1: the label is -1"),
        ([(Events.of([0.1], [1]), 0.5)], None, "recording 0: the label is 0.5; labels are integers"),
        ([(Events.of([0.1, 1e5], [1, 1]), 0)], None, r"recording 0: an event at 100000; are these seconds\?"),
        ([(Events.of([0.1], [1]), 0), (Events.of([0.1], [1]), 1)], [4], "1 speakers for 2 recordings"),
    ],
)
def test_writing_an_invalid_recording_raises_and_leaves_no_file(tmp_path, recordings, speakers, words):
    pytest.importorskip("h5py")
    with pytest.raises(InputError, match=words):
        write_spikes(tmp_path / "a.h5", recordings, speakers=speakers)
    assert not list(tmp_path.iterdir())


def test_a_spike_file_needs_a_folder_and_a_speaker_for_each_recording(spike_file, tmp_path):
    h5py = pytest.importorskip("h5py")
    for path in (tmp_path, tmp_path / "none" / "a.h5"):
        with pytest.raises(InputError, match="Make the folder, or pass another name"):
            write_spikes(path, [])
    with h5py.File(spike_file, "a") as file:
        del file["extra/speaker"]
        file["extra/speaker"] = [1, 2]
    with pytest.raises(InputError, match="2 speakers for 8 recordings"):
        SpikeFile(spike_file)


def test_units_out_of_range_are_named_with_the_recording(tmp_path):
    pytest.importorskip("h5py")
    write_spikes(tmp_path / "wide.h5", [(Events.of([0.2, 0.1], [5, 900]), 0)])
    with pytest.raises(InputError, match=r"wide.h5, recording 0: units\[0\] = 900"):
        SpikeFile(tmp_path / "wide.h5")[0]
    assert SpikeFile(tmp_path / "wide.h5", channels=1000)[0][0].times[0] < 0.15  # written in time order


def test_an_interrupted_write_leaves_no_file(tmp_path):
    pytest.importorskip("h5py")

    def failing():
        yield random_events(), 0
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        write_spikes(tmp_path / "out.h5", failing())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".zip", ".gz"])
def test_archives_are_verified_once_and_unpacked_atomically(spike_file, tmp_path, monkeypatch, suffix):
    folder = tmp_path / "data"
    folder.mkdir()
    archive = folder / f"shd_test.h5{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as file:
            file.write(spike_file, "shd_test.h5")
    else:
        archive.write_bytes(gzip.compress(spike_file.read_bytes()))
    with pytest.raises(InputError, match="the download is damaged"):
        find_split(folder, "shd_test")
    assert not (folder / "shd_test.h5").exists()
    monkeypatch.setitem(shd.MD5, archive.name, hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setitem(shd.MD5, "shd_test.h5", hashlib.md5(spike_file.read_bytes()).hexdigest())
    path = find_split(folder, "shd_test")
    assert path.read_bytes() == spike_file.read_bytes()
    find_split(folder, "shd_test")
    monkeypatch.setattr(shd.hashlib, "file_digest", None)  # hashing again would fail
    assert find_split(folder, "shd_test") == path
    assert len(SpikeFile(path)) == 8


def test_a_broken_archive_leaves_no_file(tmp_path):
    (tmp_path / "ssc_valid.h5.gz").write_bytes(gzip.compress(b"x" * 10_000)[:40])
    with pytest.raises(InputError, match="cannot be unpacked"):
        find_split(tmp_path, "ssc_valid")
    (tmp_path / "ssc_test.h5.zip").write_bytes(b"PK")
    with pytest.raises(InputError, match="cannot be unpacked"):
        find_split(tmp_path, "ssc_test", verify=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ssc_test.h5.zip", "ssc_valid.h5.gz"]
    with pytest.raises(InputError, match="Download it from"):
        find_split(tmp_path, "ssc_train")
    with pytest.raises(InputError, match="Perhaps you meant 'ssc_valid'"):
        find_split(tmp_path, "ssc_validation")


@pytest.mark.parametrize("suffix", [".zip", ".gz"])
def test_a_corrupted_archive_raises(spike_file, tmp_path, suffix):
    archive = tmp_path / f"ssc_valid.h5{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            file.write(spike_file, "ssc_valid.h5")
    else:
        archive.write_bytes(gzip.compress(spike_file.read_bytes()))
    content = bytearray(archive.read_bytes())
    content[100:1100] = np.random.default_rng(0).bytes(1000)
    archive.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be unpacked: .*Download it again"):
        find_split(tmp_path, "ssc_valid", verify=False)
    assert not (tmp_path / "ssc_valid.h5").exists()


# Datasets.


def test_a_batch_has_lengths_and_a_mask():
    recordings = [(Events.of([0.1, 0.31], [0, 699]), 2), (Events.of([0.9], [10]), 0), (Events.of([], []), 1)]
    batch = collate([EventDataset(recordings, Bins(10, 1.0))[i] for i in range(3)])
    assert batch.frames.shape == (3, 10, 140)
    assert batch.frames.dtype == torch.float32
    assert batch.labels.tolist() == [2, 0, 1]
    assert batch.lengths.tolist() == [4, 10, 1]
    assert_close(batch.mask.sum(-1), batch.lengths)
    assert not batch.frames[~batch.mask].any()


def test_cached_frames_equal_computed_frames(spike_file, tmp_path):
    file, bins, cache = SpikeFile(spike_file), Bins(20, 1.0), tmp_path / "frames.npy"
    fresh, kept = EventDataset(file, bins), EventDataset(file, bins, cache=cache)
    again = EventDataset(file, bins, cache=cache)
    for i in range(len(file)):
        for a, b, c in zip(fresh[i], kept[i], again[i], strict=True):
            assert_close(torch.as_tensor(a), torch.as_tensor(b))
            assert_close(torch.as_tensor(a), torch.as_tensor(c))
    with pytest.raises(InputError, match="other recordings or bins"):
        EventDataset(file, Bins(21, 1.0), cache=cache)
    with pytest.raises(InputError, match="Drop one"):
        EventDataset(file, bins, cache=cache, augmentations=[Drop()])


def test_a_cache_of_other_recordings_raises(spike_file, tmp_path):
    cache, events = tmp_path / "frames.npy", Events.of([0.1], [5])
    EventDataset([(events, 0)], Bins(), cache=cache)
    assert EventDataset([(Events.of([0.1], [5]), 0)], Bins(), cache=cache)[0].frames.sum() == 1
    for others in ([(Events.of([0.1], [6]), 0)], [(events, 1)]):
        with pytest.raises(InputError, match="frames of other recordings"):
            EventDataset(others, Bins(), cache=cache)
    with pytest.raises(InputError, match=r"there is no folder .*Make it first"):
        EventDataset([(events, 0)], Bins(), cache=tmp_path / "none" / "frames.npy")
    cache.write_bytes(cache.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"frames\.npy cannot be read: .*Delete it"):
        EventDataset([(events, 0)], Bins(), cache=cache)[0]
    (tmp_path / "frames.npy.json").write_text("{")
    with pytest.raises(InputError, match=r"frames\.npy\.json cannot be read. Delete it"):
        EventDataset([(events, 0)], Bins(), cache=cache)
    file = tmp_path / "file.npy"
    EventDataset(SpikeFile(spike_file), Bins(), cache=file)
    os.utime(spike_file, (1, 1))
    with pytest.raises(InputError, match="frames of other recordings"):
        EventDataset(SpikeFile(spike_file), Bins(), cache=file)


def test_an_error_while_binning_names_the_recording(tmp_path):
    recordings = [(Events.of([0.1], [5]), 0), (Events.of([0.1], [1718]), 1)]
    with pytest.raises(InputError, match=r"recording 1: .*units\[0\] = 1718"):
        EventDataset(recordings, Bins())[1]
    with pytest.raises(InputError, match="recording 1: "):
        EventDataset(recordings, Bins(), cache=tmp_path / "frames.npy")
    assert not list(tmp_path.iterdir())


def test_augmentations_are_off_by_default_and_depend_on_seed_epoch_and_recording():
    recordings = [(random_events(), 0), (random_events(), 1)]
    plain = EventDataset(recordings, Bins())
    assert_close(plain[0].frames, torch.from_numpy(Bins().frames(recordings[0][0])))
    changed = EventDataset(recordings, Bins(), augmentations=[Drop(0.3), TimeJitter(0.01), ChannelShift(30)])
    first = changed[0].frames
    assert_close(changed[0].frames, first)
    assert (changed[1].frames != first).any()
    changed.set_epoch(1)
    assert (changed[0].frames != first).any()
    generator = np.random.default_rng(0)
    assert 100 < Drop(0.3)(random_events(), 700, generator).times.size < 180
    shifted = ChannelShift(30)(random_events(), 700, generator)
    assert shifted.units.min() >= 0
    assert shifted.units.max() < 700


# Event cameras.


def test_address_events_are_decoded_bit_by_bit(tmp_path):
    (tmp_path / "one.bin").write_bytes(bytes([3, 33, 0b1000_0001, 2, 4]))
    pixels = read_aer(tmp_path / "one.bin")
    assert [int(v[0]) for v in pixels] == [3, 33, 1, (1 << 16) + (2 << 8) + 4]
    events = pixels.to_events()
    assert (events.units[0], events.times[0]) == (34 * 34 + 33 * 34 + 3, 66052e-6)
    write_aer(tmp_path / "two.bin", pixels)
    assert (tmp_path / "two.bin").read_bytes() == (tmp_path / "one.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(bytes(7))
    with pytest.raises(InputError, match="take five each"):
        read_aer(tmp_path / "cut.bin")
    with pytest.raises(InputError, match="width=41"):
        PixelEvents(*(np.array([v]) for v in (40, 0, 0, 0))).to_events()
    with pytest.raises(InputError, match="microseconds"):
        write_aer(tmp_path / "late.bin", PixelEvents(*(np.array([v]) for v in (0, 0, 0, 2**23))))


# Real recordings.


def test_pixels_of_eight_bits_do_not_overflow(tmp_path):
    small = PixelEvents(*(np.asarray([value], np.uint8) for value in (33, 33, 1)), np.asarray([70_000], np.uint32))
    assert small.to_events().units.tolist() == [(34 + 33) * 34 + 33]
    write_aer(tmp_path / "a.bin", small)
    assert [part.tolist() for part in read_aer(tmp_path / "a.bin")] == [[33], [33], [1], [70_000]]


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (([1], [1], [-1], [5]), r"polarity ranges from -1 to -1; it must hold 0 and 1. Pass \(polarity > 0\)"),
        (([1], [1], [2], [5]), "polarity ranges from 2 to 2"),
        (([-1], [1], [1], [5]), "x ranges from -1 to -1; it must hold integers >= 0"),
        (([1], [1], [1], [0.5]), "microseconds is float64"),
        (([1, 2], [1], [1], [5]), r"y has shape \(1,\), x has \(2,\)"),
        (([40], [1], [1], [5]), r"the camera has width=34. Pass width=41"),
    ],
)
def test_invalid_pixel_events_raise(pixels, words):
    with pytest.raises(InputError, match=words):
        PixelEvents(*map(np.asarray, pixels)).to_events()


def test_speech_in_the_layout_of_shd():
    pytest.importorskip("h5py")
    file = SpikeFile(golden("amnist_shdlike_test.h5"))
    assert len(file) == 50
    faithful, clean = Bins.of_silif(4), Bins(250, 1.0, late="raise")
    for i in range(0, 50, 7):
        events, _ = file[i]
        assert faithful.frames(events).sum() == events.times.size
        assert not faithful.frames(events)[0].any()
        assert clean.frames(events).sum() == events.times.size


def test_digits_seen_by_an_event_camera():
    with np.load(golden("nmnist_1100.npz")) as file:
        end = int(file["lengths"][0])
        pixels = PixelEvents(*(file[name][:end].astype(np.int64) for name in ("x", "y", "p", "t_us")))
    frames = Bins(100, 0.34, channels=34 * 34 * 2, pool=1, late="raise").frames(pixels.to_events())
    assert frames.sum() == end
