"""Tests of data files: locating, verifying, downloading and reading them, and the errors for invalid files."""

import functools
import hashlib
import http.server
import io
import itertools
import os
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from adptnet import Spec
from adptnet.errors import DataError, InputError, SpecError
from adptnet_lab import cli
from adptnet_lab.tasks import SequentialImage, Text, download
from adptnet_lab.tasks.base import make_generator
from adptnet_lab.tasks.images import read_images

real = pytest.mark.skipif("ADPTNET_DATA" not in os.environ, reason="needs real data: set ADPTNET_DATA to its folder")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Set ADPTNET_DATA and the cache to empty folders; return the former."""
    monkeypatch.setenv("ADPTNET_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def small(monkeypatch):
    """Return a function that registers a data set of 5 000 bytes with the given mirrors."""
    content = np.random.default_rng(0).bytes(5_000)
    file = download.DataFile(
        "small", "small.bin", len(content), hashlib.sha256(content).hexdigest(), (), "random bytes", "no terms"
    )

    def with_mirrors(*urls):
        monkeypatch.setitem(download.FILES, "small", download.DataFile(**{**vars(file), "urls": urls}))
        return content

    return with_mirrors


class Server(http.server.BaseHTTPRequestHandler):
    """Server of /right, /wrong (one byte changed), /cut (the first half only), /plain (ignores ranges) and /long."""

    content = b""
    requests: tuple = ()

    def do_GET(self):
        ranged = self.headers.get("Range")
        Server.requests += ((self.path, ranged),)
        content = self.content
        if self.path == "/wrong":
            content = bytes([content[0] ^ 1]) + content[1:]
        elif self.path == "/long":
            content = content + b"more"
        elif self.path not in ("/right", "/cut", "/plain"):
            self.send_error(404)
            return
        start = int(ranged[6:-1]) if ranged and self.path != "/plain" else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : len(content) // 2 if self.path == "/cut" else None])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(small):
    pytest.importorskip("pooch", reason="downloads need pooch: pip install 'adptnet[data]'")
    Server.content, Server.requests = small(), ()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield lambda *paths: small(*(f"http://127.0.0.1:{running.server_port}/{path}" for path in paths))
        running.shutdown()


def test_a_file_is_downloaded_verified_and_found(server, here):
    content = server("right")
    seen = []
    path = download.fetch("small", report=lambda have, total: seen.append((have, total)))
    assert path.read_bytes() == content
    assert seen[-1] == (5000, 5000)
    assert download.find_data("small") == path
    assert download.fetch("small") == path  # without a second download
    assert Server.requests == (("/right", None),)
    assert [p.name for p in path.parent.iterdir()] == ["small.bin"]


def test_an_interrupted_download_resumes_from_another_mirror(server, here):
    content = server("cut", "gone", "right")
    assert download.fetch("small").read_bytes() == content
    assert Server.requests == (("/cut", None), ("/gone", "bytes=2500-"), ("/right", "bytes=2500-"))


def test_a_later_call_starts_over_if_the_mirror_does_not_support_ranges(server, here):
    server("cut")
    with pytest.raises(DataError, match="ended after 2,500 of 5,000 bytes"):
        download.fetch("small")
    content = server("plain")
    assert download.fetch("small").read_bytes() == content


def test_wrong_content_is_discarded(server, here):
    server("wrong", "long")
    with pytest.raises(DataError) as caught:
        download.fetch("small")
    text = str(caught.value)
    assert "the content has the wrong hash; it was discarded" in text
    assert "sends more than the 5,000 bytes" in text
    assert f"small.bin (5,000 bytes, sha256 {download.FILES['small'].sha256})" in text
    assert not list((here.parent / "cache" / "data").iterdir())
    content = server("wrong", "right")  # the next mirror starts from the beginning
    assert download.fetch("small").read_bytes() == content
    assert Server.requests[-1] == ("/right", None)


def test_a_failing_mirror_is_named(server, here):
    server("gone")
    with pytest.raises(DataError, match=r"(?s)/gone: HTTP Error 404.*put small\.bin \(5,000 bytes"):
        download.fetch("small")


def test_the_error_for_a_missing_file_gives_size_hash_and_folder(here):
    with pytest.raises(DataError) as caught:
        download.find_data("cifar10")
    text = str(caught.value)
    for part in (
        str(here),
        "adptnet data fetch cifar10",
        "cifar-10-binary.tar.gz",
        "170,052,171 bytes",
        "c4a38c50a1bc",
    ):
        assert part in text
    (here / "cifar-10-binary.tar.gz").write_bytes(b"half")
    with pytest.raises(DataError, match="has 4 bytes, so it is not the whole file"):
        download.find_data("cifar10")
    with pytest.raises(DataError, match="Perhaps you meant 'cifar10'"):
        download.find_data("cifar-10")


def test_subfolders_of_adptnet_data_are_searched(here, small):
    content = small()
    (here / "deep" / "er").mkdir(parents=True)
    (here / "deep" / "er" / "small.bin").write_bytes(content)
    assert download.find_data("small") == here / "deep" / "er" / "small.bin"


def test_a_file_that_appears_later_in_a_process_is_found(here, small, monkeypatch, tmp_path):
    content = small()
    with pytest.raises(DataError, match="small is not in"):
        download.find_data("small")
    (here / "small.bin").write_bytes(content[:10])
    with pytest.raises(DataError, match="has 10 bytes"):
        download.find_data("small")
    (here / "small.bin").write_bytes(content)
    assert download.find_data("small") == here / "small.bin"
    other = tmp_path / "other"
    other.mkdir()
    (other / "small.bin").write_bytes(content)
    monkeypatch.setenv("ADPTNET_DATA", str(other))
    assert download.find_data("small") == other / "small.bin"


def test_adptnet_data_must_be_a_folder(monkeypatch):
    monkeypatch.setenv("ADPTNET_DATA", "/nowhere/at/all")
    with pytest.raises(DataError, match="ADPTNET_DATA=/nowhere/at/all is not a folder"):
        download.find_data("cifar10")


def test_the_command_lists_fetches_and_verifies(server, here, capsys):
    content = server("right")
    assert cli.main(["data"]) == 0
    assert "small: random bytes; no terms" in (shown := capsys.readouterr().out)
    assert "not found; adptnet data fetch small" in shown
    assert cli.main(["data", "verify"]) == 0
    assert "small: missing or incomplete" in capsys.readouterr().out
    assert cli.main(["data", "verify", "small"]) == 1
    assert "Fetch it: adptnet data fetch small" in capsys.readouterr().err
    assert cli.main(["data", "fetch", "small", "--folder", str(here)]) == 0
    assert str(here / "small.bin") in capsys.readouterr().out
    assert cli.main(["data", "verify", "small"]) == 0
    assert "has the expected hash" in capsys.readouterr().out
    (here / "small.bin").write_bytes(content[::-1])
    assert cli.main(["data", "verify", "small"]) == 1
    shown = capsys.readouterr()
    assert "has the WRONG hash" in shown.out
    assert "Delete it and run: adptnet data fetch small" in shown.err
    assert cli.main(["data", "fetch"]) == 1
    assert "fetch needs a name" in capsys.readouterr().err
    assert cli.main(["data", "fetch", "imagenet"]) == 1
    assert "there is no data set 'imagenet'" in capsys.readouterr().err


def test_published_files_are_downloaded_over_https_only():
    for file in download.FILES.values():
        assert all(url.startswith("https://") for url in file.urls)
        assert len(file.sha256) == 64
        assert len(file.urls) > 1


def images(count, seed, channels=3, side=32):
    generator = np.random.default_rng(seed)
    shape = (count, side, side, channels) if channels > 1 else (count, side, side)
    return generator.integers(0, 256, shape, dtype=np.uint8), generator.integers(0, 10, count).astype(np.uint8)


def write_npz(path, channels=3, side=32, **replaced):
    x_train, y_train = images(40, 0, channels, side)
    x_test, y_test = images(12, 1, channels, side)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test, **replaced}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return arrays


def write_archive(path, records=4, drop=None, cut=0):
    """Write CIFAR-10's binary layout: a label, then the red, the green and the blue plane, row by row."""
    written = []
    with tarfile.open(path, "w:gz") as archive:
        for i, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
            x, y = images(records, 10 + i)
            written.append((x, y))
            content = b"".join(
                bytes([label]) + image.transpose(2, 0, 1).tobytes() for image, label in zip(x, y, strict=True)
            )
            content = content[: len(content) - cut]
            if name != drop:
                info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return written


def test_the_binary_archive_round_trips(tmp_path):
    written = write_archive(tmp_path / "cifar.tar.gz")
    found = read_images(tmp_path / "cifar.tar.gz")
    assert np.array_equal(found.x_train, np.concatenate([x for x, _ in written[:5]]))
    assert np.array_equal(found.y_train, np.concatenate([y for _, y in written[:5]]))
    assert np.array_equal(found.x_test, written[5][0])


def test_pixels_come_row_by_row_normalised_by_the_training_images(tmp_path):
    arrays = write_npz(tmp_path / "own.npz", side=6)
    task = SequentialImage(str(tmp_path / "own.npz"), validation=0.25)
    assert (task.size("train"), task.size("validation"), task.size("test")) == (30, 10, 12)
    assert (task.input_size, task.output_size, task.length, task.head) == (3, 10, 36, "mean")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(42))
    training = arrays["x_train"][order[:30]].astype(np.float64) / 255
    batch = task.examples("test", torch.tensor([5, 2]))
    for row, image in zip(batch.inputs.tolist(), arrays["x_test"][[5, 2]] / 255, strict=True):
        for t, pixel in enumerate(row):
            expected = (image[t // 6, t % 6] - training.mean((0, 1, 2))) / training.std((0, 1, 2), ddof=1)
            assert pixel == pytest.approx(expected, abs=1e-5)
    assert batch.targets.tolist() == arrays["y_test"][[5, 2]].tolist()
    both = torch.cat([task.examples(split, torch.arange(n)).inputs for split, n in (("train", 30), ("validation", 10))])
    assert len(both.unique(dim=0)) == 40
    assert task.training_size == 30
    assert Spec.from_json(task.to_json()) == task


def test_images_can_be_grey_averaged_and_permuted(tmp_path):
    arrays = write_npz(tmp_path / "own.npz", side=6)
    path = str(tmp_path / "own.npz")
    plain = SequentialImage(path, grey=True, side=3)
    batch = plain.examples("test", torch.arange(12))
    assert batch.inputs.shape == (12, 9, 1)
    grey = arrays["x_test"] @ np.array([0.299, 0.587, 0.114]) / 255
    tiles = np.stack([grey[:, 2 * (t // 3) :, 2 * (t % 3) :][:, :2, :2].mean((1, 2)) for t in range(9)], 1)
    found = batch.inputs[..., 0].numpy()
    slope, offset = np.polyfit(tiles.ravel(), found.ravel(), 1)
    assert found == pytest.approx(slope * tiles + offset, abs=1e-5)
    shuffled = SequentialImage(path, grey=True, side=3, permutation=7).examples("test", torch.arange(12)).inputs
    order = torch.randperm(9, generator=torch.Generator().manual_seed(7))
    assert torch.equal(shuffled, batch.inputs[:, order])
    few = SequentialImage(path, training_images=5, test_images=3)
    assert (few.size("train"), few.size("test")) == (5, 3)
    one_channel = write_npz(tmp_path / "grey.npz", channels=1, side=4)
    task = SequentialImage(str(tmp_path / "grey.npz"), grey=True)
    assert task.input_size == 1
    assert one_channel["x_train"].ndim == 3


def test_cifar10_is_normalised_by_the_usual_constants(here):
    arrays = write_npz(here / "cifar10_some.npz")
    batch = SequentialImage().examples("test", torch.arange(3))
    mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.247, 0.243, 0.261])
    expected = ((arrays["x_test"][:3] / 255 - mean) / deviation).reshape(3, 1024, 3)
    assert_close(batch.inputs, torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_scores_of_images():
    task = SequentialImage()
    outputs = torch.eye(10)[[1, 2, 3, 4]]
    assert task.scores(outputs, torch.tensor([1, 2, 0, 4])) == {"accuracy": 0.75}
    assert float(task.loss(50 * outputs, torch.tensor([1, 2, 3, 4]))) < 1e-6


def objects(path):
    np.savez(path, x_train=np.array([{}], dtype=object), y_train=[0], x_test=[0], y_test=[0])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.write_bytes(b"not a zip"), "is not an npz file"),
        (functools.partial(write_npz, y_test=None), "has no array 'y_test'; it has x_test, x_train, y_train"),
        (functools.partial(write_npz, x_train=np.zeros((4, 3))), "x_train is float64 of shape"),
        (functools.partial(write_npz, y_train=np.zeros(3, int)), "must hold 40 labels"),
        (functools.partial(write_npz, y_test=np.full(12, -1)), "integers >= 0"),
        (objects, "Save plain arrays of numbers"),
    ],
)
def test_an_invalid_npz_raises(tmp_path, write, message):
    path = tmp_path / "bad.npz"
    write(path)
    with pytest.raises(DataError, match=message):
        SequentialImage(str(path)).size("train")


def test_an_invalid_archive_raises(tmp_path):
    for i, (options, message) in enumerate(
        [({"drop": "data_batch_3.bin"}, "nothing under data_batch_3.bin"), ({"cut": 7}, "12,285 bytes under")]
    ):
        path = tmp_path / f"{i}.tar.gz"
        write_archive(path, **options)
        with pytest.raises(DataError, match=message):
            read_images(path)
    whole = tmp_path / "whole.tar.gz"
    write_archive(whole)
    whole.write_bytes(whole.read_bytes()[:2000])
    with pytest.raises(DataError, match="cannot be read"):
        read_images(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": 4}, "side=4 does not divide images of 6 × 6; averaging needs whole tiles. Pass side=3"),
        ({"training_images": 99}, "99 train images were requested, but there are 36"),
    ],
)
def test_options_that_do_not_fit_the_images_raise(tmp_path, options, message):
    write_npz(tmp_path / "own.npz", side=6)
    with pytest.raises(InputError, match=message):
        SequentialImage(str(tmp_path / "own.npz"), **options).examples("train", torch.tensor([0]))
    with pytest.raises(InputError, match="these images have 36 pixels"):
        SequentialImage(str(tmp_path / "own.npz")).examples("test", torch.tensor([0]), length=100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequentialImage(data=""), "pass data='cifar10'"),
        (lambda: SequentialImage(side=0), "side must be an integer >= 1"),
        (lambda: SequentialImage(permutation=-1), "permutation must be an integer >= 0"),
        (lambda: SequentialImage(validation=1.0), "validation must be in"),
        (lambda: Text(length=0), "length must be an integer >= 1"),
        (lambda: Text(symbols="words"), 'pass symbols="characters"'),
        (lambda: Text(validation=0.6, test=0.4), "something must be left to train on"),
    ],
)
def test_invalid_settings_raise(make, message):
    with pytest.raises(SpecError, match=message):
        make()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(ord("a") + i % 26) for i in range(1000)) + "äß€", encoding="utf-8")
    return path


def test_the_target_is_the_next_symbol(text):
    task = Text(str(text), length=20)
    assert task.vocabulary == 29
    assert task.decode(task.encode("abcä€")) == "abcä€"
    batch = task.batch(8, make_generator(0))
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    for row in batch.inputs:
        assert task.decode(row) in text.read_text(encoding="utf-8")
    with pytest.raises(InputError, match="the file has no character '!'"):
        task.encode("!")
    bytewise = Text(str(text), symbols="bytes", length=20)
    assert bytewise.vocabulary == 256
    assert bytewise.decode(bytewise.encode("ä")) == "ä"
    assert len(bytewise.part("train")) + len(bytewise.part("validation")) + len(bytewise.part("test")) == 1007
    assert bytewise.part("test").tolist() == list(text.read_bytes()[-51:])


def test_the_text_is_split_in_order(text):
    task = Text(str(text), validation=0.2, test=0.1)
    whole = "".join(task.decode(task.part(split)) for split in ("train", "validation", "test"))
    assert whole == text.read_text(encoding="utf-8")
    assert [len(task.part(split)) for split in ("train", "validation", "test")] == [702, 200, 101]


def test_an_evaluation_reads_every_symbol_once(text):
    task = Text(str(text), length=20)
    batches = list(task.evaluation("train", 1000, 4))
    read = torch.cat([batch.targets.flatten() for batch in batches])
    assert torch.equal(read, task.part("train")[1 : len(read) + 1].long())
    assert len(read) == 20 * ((len(task.part("train")) - 1) // 20)
    assert sum(len(batch.inputs) for batch in task.evaluation("train", 5, 4)) == 5
    assert next(task.evaluation("test", 1, 1, length=7)).inputs.shape == (1, 7)


def test_with_carry_rows_continue_from_batch_to_batch(text):
    task = Text(str(text), length=20, carry=True)
    steps = len(task.part("train")) // 3 // 20 - 1
    batches = [task.training_batch(step, 3, 5) for step in range(2 * steps)]
    assert [batch.continues for batch in batches] == ([False] + [True] * (steps - 1)) * 2
    for before, after in itertools.pairwise(batches):
        if after.continues:
            assert torch.equal(before.targets[:, -1], after.inputs[:, 0])
            assert torch.equal((before.inputs + 20) % 26, after.inputs % 26)
    evaluated = list(task.evaluation("train", 1000, 4))
    assert [batch.continues for batch in evaluated] == [False] + [True] * (len(evaluated) - 1)
    rows = torch.cat([batch.inputs for batch in evaluated], 1)
    assert all(task.decode(row) in text.read_text(encoding="utf-8") for row in rows)
    fresh = Text(str(text), length=20).training_batch(1, 3, 5)
    assert not fresh.continues


def test_bits_per_character():
    task = Text(length=4, symbols="bytes")
    targets = torch.randint(256, (2, 4))
    assert task.scores(torch.zeros(2, 4, 256), targets)["bits_per_character"] == pytest.approx(8) == task.chance
    sure = torch.nn.functional.one_hot(targets, 256) * 100.0
    assert task.scores(sure, targets) == pytest.approx({"bits_per_character": 0, "accuracy": 1})
    assert "bits_per_character" in task.lower_is_better


def test_an_unusable_text_raises(tmp_path, here, text):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        Text(str(tmp_path / "gone.txt")).batch(1, make_generator(0))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="is empty"):
        Text(str(tmp_path / "empty.txt")).part("train")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=r"not UTF-8 at byte 3\. Read it with symbols='bytes'"):
        Text(str(tmp_path / "latin.txt")).part("train")
    with pytest.raises(InputError, match=r"the train split of .* has 902 symbols, but 2,001 are needed"):
        Text(str(text), length=2000).batch(1, make_generator(0))
    with pytest.raises(DataError, match="adptnet data fetch tiny-shakespeare"):
        Text().part("train")
    with pytest.raises(InputError, match="all must be at least 1"):
        next(Text(str(text)).evaluation("test", 0, 1))


@real
def test_real_shakespeare():
    try:
        path = download.find_data("tiny-shakespeare")
    except DataError as error:
        pytest.skip(str(error))
    assert download.compute_sha256(path) == download.FILES["tiny-shakespeare"].sha256
    task = Text()
    assert task.vocabulary == 65
    assert task.decode(task.part("train")[:14]) == "First Citizen:"
    assert sum(len(task.part(split)) for split in ("train", "validation", "test")) == 1_115_394


@real
def test_real_cifar10():
    try:
        path = download.find_data("cifar10")
    except DataError as error:
        pytest.skip(str(error))
    found = read_images(Path(path))
    assert found.x_train[0, 0, 0].tolist() == [59, 62, 63]
    assert found.y_train[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    task = SequentialImage(side=16, training_images=4000, test_images=1000)
    batch = task.training_batch(0, 500, 0)
    assert batch.inputs.shape == (500, 256, 3)
    assert_close(batch.inputs.mean((0, 1)), torch.zeros(3), atol=0.1, rtol=0)
    assert float(batch.inputs.std()) == pytest.approx(0.93, abs=0.1)  # averaging reduces the contrast
