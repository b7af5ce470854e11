"""Untrusted data files: malformed ones are rejected by name, before they cost memory or disk."""

import gzip
import hashlib
import json
import os
import struct
import tarfile
import zipfile

import numpy as np
import pytest

from adptnet.errors import CheckpointError, DataError, InputError, NonFiniteError, SpecError
from adptnet_lab import baselines, events
from adptnet_lab.events import (
    EventDataset,
    Events,
    SpikeFile,
    open_archive,
    read_aer,
    read_wav,
    shd,
    spike_files,
    write_spikes,
)
from adptnet_lab.tasks import Text, download, images
from adptnet_lab.training import checkpoint_store as store
from support.archives import MEGABYTE, npy_header, zip_of_zeros

# Limits on unpacked sizes.


def test_an_npz_that_unpacks_to_too_much_is_rejected_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    zip_of_zeros(path, "frames.npy", 70 * MEGABYTE, npy_header((70 * MEGABYTE,)))
    assert path.stat().st_size < MEGABYTE
    monkeypatch.setattr(np, "empty", None)  # nothing is allocated
    with pytest.raises(InputError, match=r"bomb\.npz.* unpack to 73,4.*ADPTNET_UNPACK_LIMIT"):
        open_archive(path)
    zip_of_zeros(path, "x_train.npy", 70 * MEGABYTE, npy_header((70 * MEGABYTE,)))
    with pytest.raises(DataError, match=r"bomb\.npz.* unpack to 73,4.*ADPTNET_UNPACK_LIMIT"):
        images.read_images(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (npy_header(f"({10**12},)"), "do not fit"),
        (npy_header("(4294967296, 4294967296)"), "do not fit"),
        (npy_header("(-1,)"), "do not fit"),
        (npy_header("(3,)", "|S0"), "do not fit"),
        (npy_header("(1,)", "|O"), "Object arrays need pickle"),
        (npy_header("(" * 80), "cannot be read"),
        (b"\x93NUMPY\x09\x00", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_an_array_with_a_wrong_size_is_rejected(header, message, tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("frames.npy", header + b"123")
    with pytest.raises(InputError, match=message):
        open_archive(path)


def test_an_npz_compressed_in_another_way_or_with_two_arrays_of_one_name_is_rejected(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("frames.npy", npy_header("(3,)") + b"123")
    with pytest.raises(InputError, match=r"another method than np\.savez uses"):
        open_archive(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("label.npy", npy_header("(3,)") + b"123")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("label.npy", npy_header("(3,)") + b"456")
    with pytest.raises(InputError, match="two of its arrays have one name"):
        open_archive(path)


def test_a_compressed_bomb_leaves_nothing_behind(tmp_path):
    with gzip.open(tmp_path / "ssc_train.h5.gz", "wb") as file:
        for _ in range(70):
            file.write(bytes(MEGABYTE))
    zip_of_zeros(tmp_path / "ssc_test.h5.zip", "ssc_test.h5", 70 * MEGABYTE)
    for split, verify in (("ssc_train", True), ("ssc_test", False)):
        with pytest.raises(InputError, match="unpack to more, and 67,108,864 are allowed"):
            shd.find_split(tmp_path, split, verify=verify)
    assert len(list(tmp_path.iterdir())) == 2
    inner = tarfile.TarInfo("data_batch_1.bin")
    inner.size = 10**12
    with gzip.open(tmp_path / "images.tar.gz", "wb") as file:
        file.write(inner.tobuf())
        for _ in range(70):
            file.write(bytes(MEGABYTE))
    with pytest.raises(DataError, match="unpack to more, and 67,108,864 are allowed"):
        images.read_images(tmp_path / "images.tar.gz")


# Integer overflow.


def camera(**changes):
    arrays = {name: np.zeros(4, np.int64) for name in ("x", "y", "p", "t_us")}
    return {**arrays, "lengths": np.asarray([1, 3]), "label": np.asarray([0, 1]), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": np.asarray([2**64 - 2, 6], np.uint64)}, "lengths are uint64 from 6 to 18446744073709551614"),
        ({"lengths": np.asarray([2**63 - 1, 2**63 - 1, 6])}, "lengths that sum to 18446744073709551620"),
        ({"lengths": np.asarray([1.0, 3.0])}, "lengths are float64; they must be integers"),
        ({"lengths": np.asarray([[1, 3]])}, "all must agree"),
        ({"label": np.asarray([0, 2**63], np.uint64)}, "labels are uint64 from 0 to 9223372036854775808"),
        ({"label": np.asarray([0, -1])}, "labels are int64 from -1"),
        ({"label": np.asarray([True, False])}, "labels are bool; they must be integers"),
        ({name: np.zeros((2, 2), int) for name in ("x", "y", "p", "t_us")}, "all must agree"),
        ({"speaker": np.asarray(["a", "b"])}, "speaker is <U1; it must hold integers"),
    ],
)
def test_integers_of_an_archive_do_not_overflow(changes, message, tmp_path):
    np.savez(tmp_path / "a.npz", **camera(**changes))
    with pytest.raises(InputError, match=message):
        open_archive(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["x", "y", "t_us"])
def test_events_of_a_camera_do_not_overflow(name, tmp_path):
    values = np.asarray([2**64 - 1, 0, 0, 0], np.uint64)
    np.savez(tmp_path / "a.npz", **camera(**{name: values, "y": values if name == "y" else np.ones(4, int)}))
    with pytest.raises(InputError, match="must fit into 63 bits"):
        open_archive(tmp_path / "a.npz")[0]
    with pytest.raises(InputError, match="units go up to 18446744073709551615"):
        Events.of([0.1], np.asarray([2**64 - 1], np.uint64))
    with pytest.raises(InputError, match="times are"):
        Events.of(["soon"], [1])


def test_labels_of_a_spike_file_and_of_images_do_not_overflow(tmp_path):
    h5py = pytest.importorskip("h5py")
    write_spikes(tmp_path / "a.h5", [(Events.of([0.1], [1]), 0)])
    with h5py.File(tmp_path / "a.h5", "a") as file:
        del file["labels"]
        file["labels"] = np.asarray([2**63], np.uint64)
    with pytest.raises(InputError, match="labels are uint64 from 9223372036854775808"):
        SpikeFile(tmp_path / "a.h5")
    x, y = np.zeros((1, 2, 2), np.uint8), np.asarray([2**63], np.uint64)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=[0])
    with pytest.raises(DataError, match="y_train is uint64"):
        images.read_images(tmp_path / "a.npz")


# Spike files that refer to data outside the file.


@pytest.fixture
def spikes(tmp_path):
    path = tmp_path / "spikes.h5"
    recordings = [(Events.of(np.linspace(0, 1, n), np.arange(n)), n) for n in (3, 0, 5)]
    pytest.importorskip("h5py")
    write_spikes(path, recordings, words=("one",), speakers=(1, 2, 3))
    return path


@pytest.mark.parametrize(
    "kind", ["external link", "soft link", "external data", "virtual data", "group", "too large", "chunk"]
)
def test_the_content_of_a_spike_file_lies_in_the_file(kind, spikes):
    import h5py

    with h5py.File(spikes, "a") as file:
        del file["labels"]
        if kind == "external link":
            file["labels"] = h5py.ExternalLink("/etc/hostname", "/labels")
        elif kind == "soft link":
            file["labels"] = h5py.SoftLink("/extra/speaker")
        elif kind == "external data":
            file.create_dataset("labels", (3,), dtype="u1", external=[("/etc/hostname", 0, 3)])
        elif kind == "virtual data":
            layout = h5py.VirtualLayout((3,), "u1")
            layout[:] = h5py.VirtualSource("other.h5", "labels", (3,))
            file.create_virtual_dataset("labels", layout)
        elif kind == "group":
            file.create_group("labels")
        elif kind == "too large":
            file.create_dataset("labels", (10**12,), dtype="u1", chunks=(1024,))
        else:
            file.create_dataset("labels", (3,), maxshape=(None,), dtype="u1", chunks=(2**31,), compression="gzip")
    messages = {
        "link": "is a link",
        "data": "stored in other files",
        "group": "not one-dimensional",
        "large": "ADPTNET_UNPACK_LIMIT",
    }
    messages["chunk"] = "ADPTNET_UNPACK_LIMIT"
    with pytest.raises(InputError, match=messages[kind.split()[-1]]):
        SpikeFile(spikes)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}])
def test_a_recording_that_claims_to_be_longer_than_its_file_is_rejected(options, spikes):
    import h5py

    with h5py.File(spikes, "a") as file:
        values = list(file["spikes/times"][:])
        del file["spikes/times"]
        kind = h5py.vlen_dtype(np.dtype("float16"))
        made = file.create_dataset("spikes/times", (3,), maxshape=(None,), chunks=(4,), dtype=kind, **options)
        for i, value in enumerate(values):
            made[i] = value
    assert [len(SpikeFile(spikes)[i][0].times) for i in range(3)] == [3, 0, 5]
    with h5py.File(spikes, "r+") as file:
        dataset = file["spikes/times"]
        mask, raw = dataset.id.read_direct_chunk((0,))
        lengths = b"".join(spike_files._read_raw(dataset, "times"))
        assert np.frombuffer(lengths, np.uint32)[::4].tolist() == [3, 0, 5, 0]
        changed = struct.pack("<I", 3_000_000_000) + lengths[4:]
        dataset.id.write_direct_chunk((0,), changed, filter_mask=0xFFFFFFFF if options else mask)
        assert len(raw)
    with pytest.raises(InputError, match=r"spikes/times has an entry of 3,000,000,000 values, more than the"):
        SpikeFile(spikes)


@pytest.mark.parametrize("name", ["labels", "extra/keys", "extra/speaker", "spikes/units"])
def test_values_without_stored_bytes_are_counted_before_they_are_read(name, spikes, monkeypatch):
    import h5py

    with h5py.File(spikes, "a") as file:
        del file[name]
        file.create_dataset(name, (60_000_000,), dtype="u1", chunks=(1024,))
    read = np.asarray
    monkeypatch.setattr(np, "asarray", lambda array, *a: read(array, *a) if len(array) < 10 else pytest.fail("read"))
    with pytest.raises(InputError, match=r"60,?000,?000"):
        SpikeFile(spikes)


def test_a_heap_whose_lengths_overflow_is_rejected(spikes):
    content = bytearray(spikes.read_bytes())
    heap = content.index(spike_files.HEAP)
    for length in (2**64 - 16, 2**64 - 24, 2**63, 5000):
        content[heap + 24 : heap + 32] = struct.pack("<Q", length)
        spikes.write_bytes(content)
        with pytest.raises(InputError, match="have an impossible length"):
            SpikeFile(spikes)


# Sounds.


def wav(samples=b"\0" * 8, *, rate=16_000, channels=1, bits=16, kind=1, data=None):
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * 2 % 2**32, channels * bits // 8 % 2**16, bits)
    body = (
        b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(samples) if data is None else data)
    )
    return b"RIFF" + struct.pack("<I", len(body) + len(samples)) + body + samples


@pytest.mark.parametrize(
    "content",
    [
        wav(data=0xFFFFFFF0),
        wav(channels=0),
        wav(bits=0),
        wav(bits=0, kind=3),
        wav(bits=65535),
        wav(channels=65535),
        wav(kind=65534),
        wav(rate=0),
        wav(rate=2**32 - 1),
        wav(bits=24, channels=3, data=7),
        wav()[:20],
        wav()[:36],
        b"RIFX" + wav()[4:],
        b"RIFF",
        b"",
    ],
)
def test_a_malformed_sound_is_rejected_by_name(content, tmp_path):
    pytest.importorskip("scipy")
    (tmp_path / "bad.wav").write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.wav"):
        read_wav(tmp_path / "bad.wav", mix=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_sound_is_finite(value, channels, tmp_path):
    pytest.importorskip("scipy")
    samples = np.asarray([0.0, 0.5, value, 0.25], np.float32)
    (tmp_path / "bad.wav").write_bytes(wav(samples.tobytes(), kind=3, bits=32, channels=channels))
    with pytest.raises(NonFiniteError, match=rf"bad\.wav: sample {2 // channels} is (nan|inf|-inf)"):
        read_wav(tmp_path / "bad.wav", mix=True)


# Files that are missing, or not the published ones.


def test_missing_files_and_devices_are_named(tmp_path):
    for path in (tmp_path / "none.bin", tmp_path, "/dev/zero"):
        with pytest.raises(InputError, match="there is no file"):
            read_aer(path)
    with pytest.raises(DataError, match="not a regular file"):
        Text(path="/dev/zero").part("train")
    with pytest.raises(InputError, match="is not a file"):
        SpikeFile(tmp_path)


def test_a_data_set_is_recognized_by_its_content(tmp_path, monkeypatch):
    content = bytes(1000)
    file = download.DataFile("small", "small.txt", 1000, hashlib.sha256(content).hexdigest(), (), "", "")
    monkeypatch.setitem(download.FILES, "small", file)
    monkeypatch.setenv("ADPTNET_DATA", str(tmp_path))
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    download._find_verified.cache_clear()
    (tmp_path / "small.txt").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match=r"small\.txt has the wrong SHA-256"):
        download.find_data("small")
    (tmp_path / "small.txt").write_bytes(content)
    assert download.find_data("small") == tmp_path / "small.txt"
    download._find_verified.cache_clear()


def test_a_note_beside_a_file_does_not_replace_the_comparison(spikes, tmp_path, monkeypatch):
    path = spikes.rename(tmp_path / "shd_test.h5")
    status = path.stat()
    note = {"md5": shd.MD5[path.name], "bytes": status.st_size, "modified": status.st_mtime_ns}
    path.with_name(path.name + ".checked").write_text(json.dumps(note))
    with pytest.raises(InputError, match="was published"):
        shd.find_split(tmp_path, "shd_test")
    monkeypatch.setitem(shd.MD5, path.name, hashlib.md5(path.read_bytes()).hexdigest())
    assert shd.find_split(tmp_path, "shd_test") == path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)  # of the same size and date
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match="was published"):
        shd.find_split(tmp_path, "shd_test")


# Caches, manifests and JSON.


@pytest.mark.parametrize(
    "note", ["{}", "[]", "[" * 9999, '{"source": 1}', "\ud7ff", '{"source": {}, "labels": [0, -1]}']
)
def test_a_damaged_note_of_cached_frames_is_rejected(note, spikes, tmp_path):
    cache, bins = tmp_path / "frames.npy", events.Bins(20, 1.0)
    EventDataset(SpikeFile(spikes), bins, cache=cache)
    (tmp_path / "frames.npy.json").write_text(note)
    with pytest.raises(InputError, match="Delete it; it will be made again"):
        EventDataset(SpikeFile(spikes), bins, cache=cache)


@pytest.mark.parametrize("array", [np.zeros((3, 2, 2), np.uint8), np.zeros((3, 20, 140)), np.zeros(0, np.uint8)])
def test_damaged_cached_frames_are_rejected(array, spikes, tmp_path):
    cache = tmp_path / "frames.npy"
    dataset = EventDataset(SpikeFile(spikes), events.Bins(20, 1.0), cache=cache)
    np.save(cache, array)
    with pytest.raises(InputError, match="Delete it; it will be made again"):
        dataset[0]


def manifest(folder, body):
    (folder / "manifest.json").write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode())


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "is not a manifest"),
        ([], "is not a manifest"),
        (3, "is not a manifest"),
        ({"sha256": []}, "is not a manifest"),
        ({"adptnet_checkpoint": 1}, "must name the files"),
        ({"adptnet_checkpoint": 1, "sha256": []}, "must name the files"),
        ({"adptnet_checkpoint": 1, "sha256": {}}, "must name the files"),
        ({"adptnet_checkpoint": "1", "sha256": {"a": "0" * 64}}, "an integer >= 1"),
        ({"adptnet_checkpoint": 2, "sha256": {"a": "0" * 64}}, "newer adptnet"),
        ({"adptnet_checkpoint": 1, "sha256": {"a": 3}}, "no SHA-256 for a"),
        ({"adptnet_checkpoint": 1, "sha256": {"../secret": "0" * 64}}, r"names the file '\.\./secret'"),
        ({"adptnet_checkpoint": 1, "sha256": {"/etc/hostname": "0" * 64}}, "names the file '/etc/hostname'"),
        ({"adptnet_checkpoint": 1, "sha256": {"..": "0" * 64}}, r"names the file '\.\.'"),
        ({"adptnet_checkpoint": 1, "sha256": {"a\0b": "0" * 64}}, "names the file"),
        ({"adptnet_checkpoint": 1, "sha256": {"": "0" * 64}}, "names the file ''"),
        ({"adptnet_checkpoint": 1, "sha256": {"link": hashlib.sha256(b"secret").hexdigest()}}, "not a regular file"),
        ({"adptnet_checkpoint": 1, "sha256": {"sub": "0" * 64}}, "not a regular file"),
        ({"adptnet_checkpoint": 1, "sha256": {"gone": "0" * 64}}, "cannot be read"),
        ({"adptnet_checkpoint": float("nan"), "sha256": {}}, "NaN is not a JSON number"),
    ],
)
def test_a_manifest_names_files_of_its_own_folder(document, message, tmp_path):
    folder = tmp_path / "step-1"
    store.write_folder(folder, {"a": b"1"})
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "sub").mkdir()
    manifest(folder, json.dumps(document).encode())
    with pytest.raises(CheckpointError, match=message):
        store.read_folder(folder)


@pytest.mark.parametrize("body", [b"\xff\xfe\xff", b"[" * 99_999, b'{"adptnet_checkpoint": ' + b"9" * 5000 + b"}", b""])
def test_a_manifest_that_is_not_json_is_rejected(body, tmp_path):
    store.write_folder(tmp_path / "step-1", {"a": b"1"})
    manifest(tmp_path / "step-1", body)
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a manifest"):
        store.read_folder(tmp_path / "step-1")


def test_values_of_a_spec_have_the_types_of_its_fields():
    for make, message in (
        (lambda: events.Bins(steps=2.5), "steps"),
        (lambda: Text(path=3), r"Text\(path=3\): must be str | None"),
        (lambda: Text(carry=1), "must be True or False"),
        (lambda: baselines.Mamba(4, rank="all"), "rank"),
    ):
        with pytest.raises(SpecError, match=message):
            make()


def test_lengths_of_frames_end_at_the_last_count(tmp_path):
    frames = np.zeros((4, 5, 2), np.uint8)
    frames[0, 4, 1], frames[1, 0, 0], frames[2, 1, 0], frames[2, 3, 1] = 1, 2, 3, 4
    np.savez(tmp_path / "a.npz", frames=frames, label=np.arange(4))
    assert open_archive(tmp_path / "a.npz").lengths.tolist() == [5, 1, 4, 1]
