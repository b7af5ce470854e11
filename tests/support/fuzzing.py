"""Fuzzer: mutates files of every kind that the package reads, and checks how they are read.

    python tests/support/fuzzing.py SEED KIND=COUNT ...

It runs in a separate process, so that a crash by a signal is detected. A reader may reject a file with an error of the
package, or accept it and return the content of the file. Any other outcome is a fault, and is printed.
"""

import contextlib
import copy
import gzip
import hashlib
import io
import json
import math
import random
import resource
import signal
import struct
import sys
import tarfile
import tempfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

import adptnet
from adptnet import ADPTNet, SequenceModel, Spec, Stack, TrainableBeta, cells, checkpoint, nn, spectra
from adptnet.errors import AdptnetError
from adptnet.integrations.silif import from_silif
from adptnet_lab import baselines, events, training
from adptnet_lab.events import Events, open_archive, read_aer, read_wav, shd, write_aer, write_spikes
from adptnet_lab.events.archives import FrameFile
from adptnet_lab.paper.registry import load_results
from adptnet_lab.paper.rows import RowStore
from adptnet_lab.tasks import Parity, Text, images
from adptnet_lab.training import checkpoint_store as store
from adptnet_lab.training import run_metrics as metrics
from adptnet_lab.training.runs import read_experiment

PATIENCE = 20  # seconds per file, after which SIGALRM ends the process


class Fault(Exception):
    """A file was accepted, but its content was not returned faithfully."""


def ensure(holds, what):
    if not holds:
        raise Fault(what)


# Mutations of bytes and of JSON.


def change_bytes(content, rng, within=None):
    """Return `content` with one to four random changes in its first `within` bytes, or unchanged without `rng`."""
    if rng is None:
        return content
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = max(1, min(len(content), within or len(content)))
        at, length = rng.randrange(end), rng.choice((1, 2, 4, 8, 16, 64))
        kind = rng.randrange(9)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            content[at : at + length] = bytes(length)
        elif kind == 3:
            content[at : at + length] = b"\xff" * length
        elif kind == 4:
            del content[at : at + length]
        elif kind == 5:
            content[at:at] = rng.randbytes(length)
        elif kind == 6:
            del content[at:]
        elif kind == 7:
            number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 16, 2**63 - 1, 2**63, 2**64 - 1))
            content[at : at + 8] = struct.pack("<Q", number)[: rng.choice((2, 4, 8))]
        else:
            other = rng.randrange(end)
            content[at : at + length] = content[other : other + length]
    return bytes(content)


DEEP, LONG = "@@deep@@", "@@long@@"
VALUES = (
    *(0, 1, -1, 2, 3, 7, 32, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400), 200_000_000),
    *(0.5, -0.5, 1.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, True, False, None),
    *("", "x" * 300, "Linspace", "type", "../../etc/passwd", "\ud800", DEEP, LONG),
    *([], [[]], {}, [1, 2], [0.1] * 40, {"type": "Linspace"}, {"type": "Negative"}, {"type": ["Sparse"]}),
    *({"type": "Identity"}, {"type": "Product", "steps": 2**31 - 1}, {"type": "FromExponents", "exponents": [10**400]}),
)


def iterate_paths(node, path=()):
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, item in items:
        yield from iterate_paths(item, (*path, name))


def change_json(document, rng):
    """Return `document` as JSON text with one to three of its values, names or parts changed."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice([path for path in iterate_paths(document) if path] or [()])
        if not path:
            return json.dumps(rng.choice(VALUES))
        parent = document
        for name in path[:-1]:
            parent = parent[name]
        name, kind = path[-1], rng.randrange(8)
        if kind == 0:
            del parent[name]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice((f"{name}x", "", "type", "sha256", "tied", "adptnet_spec"))] = parent.pop(name)
        elif kind == 2:
            parent[name] = [parent[name]]
        elif kind == 3:
            source = document
            for step in rng.choice(list(iterate_paths(document))):
                source = source[step]
            parent[name] = json.loads(json.dumps(source))
        elif kind == 4 and isinstance(parent, dict) and isinstance(parent[name], dict):
            for _ in range(rng.choice((3, 30, 240))):
                parent[name] = {"type": rng.choice(("Negative", "Sparse")), "spectrum": parent[name]}
            break  # anything deeper could not be serialized
        else:
            parent[name] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(document)
    return text.replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000).replace(f'"{LONG}"', "9" * 5000)


def contains(given, kept):
    """Return whether everything in the JSON `given` is also in `kept`; a text may name an object of that type."""
    if isinstance(given, str) and isinstance(kept, dict):
        return given.translate(str.maketrans("", "", "-_ ")).lower() == kept["type"].lower()
    if isinstance(given, dict):
        return isinstance(kept, dict) and all(
            name in kept and contains(item, kept[name]) for name, item in given.items()
        )
    if isinstance(given, list):
        return isinstance(kept, list) and len(given) == len(kept) and all(map(contains, given, kept))
    return (type(given) is type(kept) and given == kept) or (
        all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (given, kept))
        and given == kept
    )


# Kinds of files. Each function makes valid files once and returns (mutate, read). `mutate(rng)` returns the bytes of a
# mutated file and a note; `mutate(None)` those of a valid file. `read(path, note)` calls a public reader and raises
# Fault if it returns something other than the content of the file.


def models():
    torch.manual_seed(0)
    yield ADPTNet.paper(4, spectrum=spectra.Negative(spectra.Sparse()))
    tied = SequenceModel(ADPTNet.paper(3, beta=TrainableBeta(0.5)).spec, vocabulary=5)
    tied.decoder.weight = tied.encoder.weight
    yield tied
    yield Stack(nn.LayerSpec(cells.GRU(2)), 2)
    yield nn.SpikingModelSpec(cells.DelayedLIF(3), 2, 2).build()


def checkpoints(folder):
    kept = []
    for number, model in enumerate(models()):
        adptnet.save(model, folder / f"model{number}")
        kept.append((model.spec, model.state_dict(), (folder / f"model{number}").read_bytes()))

    def mutate(rng):
        if rng is None:
            return kept[0][2], kept[0][:2]
        spec, weights, content = rng.choice(kept)
        kind = rng.randrange(4)
        if kind == 0:
            return change_bytes(content, rng, rng.choice((None, 16, 400))), (spec, weights)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        document = json.loads(header["__metadata__"]["adptnet"])
        data, original = content[8 + size :], (spec, weights)
        if kind == 1:  # the table of the tensors
            metadata = header.pop("__metadata__")
            text = change_json(header, rng)
            text = f'{{"__metadata__": {json.dumps(metadata)}, {text[1:]}'
        else:  # the spec, with the old hash or a matching one
            text = change_json(document, rng)
            if kind == 3:
                original = None
                with contextlib.suppress(ValueError, AttributeError, RecursionError):
                    changed = json.loads(text)
                    changed.pop("sha256", None)
                    tensors = safetensors.torch.load(content)
                    signed = {**changed, "sha256": checkpoint._sha256(changed, tensors)}
                    text = json.dumps(signed)
            header["__metadata__"] = {"adptnet": text}
            text = json.dumps(header)
        raw = text.encode(errors="surrogatepass")
        return struct.pack("<Q", len(raw)) + raw + data, original

    def read(path, original):
        model = adptnet.load(path)
        spec, weights = original or (model.spec, safetensors.torch.load(path.read_bytes()))
        found = model.state_dict()
        ensure(found.keys() == weights.keys(), "the tensors are not those saved")
        document = json.loads(parse_metadata(path)["adptnet"])
        if "sha256" in document or original is None:
            ensure(contains(json.loads(spec.to_json()), json.loads(model.spec.to_json())), "not the saved spec")
            ensure(all(torch.equal(as_bytes(found[n]), as_bytes(weights[n])) for n in found), "not the saved weights")
        ensure(contains(document["spec"], json.loads(model.spec.to_json())["spec"]), "not the spec of the file")

    return mutate, read


def parse_metadata(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


def as_bytes(tensor):
    return tensor.detach().flatten().contiguous().view(torch.uint8)


def specs(folder):
    pool = [model.spec for model in models()]
    pool += [
        nn.StackSpec(nn.BidirectionalSpec(ADPTNet.paper(4).spec), 2),
        baselines.Mamba(4),
        baselines.Hawk(4),
    ]
    pool += [training.TrainConfig(lengths=(8, 16)), Text(path="a"), events.Bins(), cells.LIF(4)]
    texts = [json.loads(spec.to_json()) for spec in pool]

    def mutate(rng):
        if rng is None:
            return json.dumps(texts[0]).encode(), None
        document = rng.choice(texts)
        text = change_json(document, rng) if rng.random() < 0.8 else None
        if text is None:
            return change_bytes(json.dumps(document).encode(), rng), None
        return text.encode(errors="surrogatepass"), None

    def read(path, _):
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise AdptnetError("not text") from error
        spec = Spec.from_json(text)
        ensure(Spec.from_json(spec.to_json()) == spec, "a JSON round trip changes it")
        ensure(contains(json.loads(text)["spec"], json.loads(spec.to_json())["spec"]), "not the spec of the text")

    return mutate, read


def configs(folder):
    model = Parity().model(nn.BlockSpec(ADPTNet.paper(4).spec), 2)
    experiment = training.Experiment(Parity(), model, training.TrainConfig(steps=3))
    document = json.loads(experiment.to_json())

    def mutate(rng):
        if rng is None:
            return json.dumps(document).encode(), None
        whole = json.dumps(document).encode()
        return change_bytes(whole, rng) if rng.random() < 0.3 else change_json(document, rng).encode(
            "utf8", "ignore"
        ), 0

    def read(path, _):
        found = read_experiment(path)
        ensure(
            contains(json.loads(path.read_text())["spec"], json.loads(found.to_json())["spec"]), "another experiment"
        )

    return mutate, read


def npz(arrays, rng):
    """Return an npz, compressed or not, in which shapes, dtypes, headers or sizes may be wrong."""
    arrays, buffer = {name: np.asarray(array) for name, array in arrays.items()}, io.BytesIO()
    if rng is None:
        np.savez(buffer, **arrays)
        return buffer.getvalue()
    kind = rng.randrange(6)
    name = rng.choice(list(arrays))
    if kind == 0:
        arrays[name] = arrays[name].astype(rng.choice(("u8", "i8", "f4", "?", "S3", "U2", "c8", "O", "M8[s]", ">i4")))
    elif kind == 1:
        flat = arrays[name].astype(rng.choice((np.uint64, np.int64))).reshape(-1)
        if flat.size:
            flat[rng.randrange(flat.size)] = rng.choice((2**62, 2**63 - 1)) if flat.dtype == np.int64 else 2**64 - 2
        arrays[name] = flat.reshape(arrays[name].shape)
    elif kind == 2:
        shapes = ((-1,), (1, -1), (-1, 1), arrays[name].shape[::-1])
        rows = np.atleast_1d(arrays[name])
        arrays[name] = rng.choice((rows[:0], rows[1:], rows.reshape(rng.choice(shapes))))
    elif kind == 3 and rng.random() < 0.5:
        del arrays[name]
    save = rng.choice((np.savez, np.savez_compressed))
    save(buffer, **arrays)
    content = buffer.getvalue()
    if kind == 4:  # the header of an array, with a matching checksum
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
            for info in old.infolist():
                inner = old.read(info)
                if info.filename == f"{name}.npy":
                    inner = rng.choice((huge_header, lambda c, rng: change_bytes(c, rng, 128)))(inner, rng)
                new.writestr(info.filename, inner)
        content = buffer.getvalue()
    return change_bytes(content, rng) if kind == 5 else content


def huge_header(content, rng):
    old = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False) if b"|O" not in content else np.zeros(1)
    shape = rng.choice((f"({10**12},)", "(4294967296, 4294967296)", "(-1,)", "(0, 99999999999)", "(" * 60, "('a',)"))
    text = f"{{'descr': '{old.dtype.str}', 'fortran_order': {rng.choice((True, False))}, 'shape': {shape}, }}"
    text += " " * (64 - (len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + old.tobytes()


def load_with_numpy(path):
    """Return the arrays of an npz as NumPy reads them; none if NumPy cannot read it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception:
        return {}


def archives(folder):
    frames = {"frames": np.arange(60, dtype=np.uint8).reshape(3, 4, 5), "label": [0, 2, 1], "is_test": [True, False, 1]}
    pixels = {"x": [0, 33, 4, 5], "y": [1, 2, 3, 33], "p": [0, 1, 1, 0], "t_us": [5, 9, 2, 4], "lengths": [1, 3]}
    pixels |= {"label": [3, 4], "speaker": [1, 2]}

    def read(path, _):
        file = open_archive(path)
        content = load_with_numpy(path)
        ensure(content, "NumPy cannot read it")
        ensure(file.labels.tolist() == content["label"].tolist(), "the labels differ")
        if isinstance(file, FrameFile):
            ensure(np.array_equal(file.frames, content["frames"]), "the frames differ")
        lengths = content["lengths"].tolist() if "lengths" in content else []
        for index in range(len(file)):
            with contextlib.suppress(AdptnetError):
                found = file[index]
                if not isinstance(file, FrameFile):
                    ensure(len(found[0].times) == lengths[index], "the events differ")
                    begin = sum(lengths[:index])
                    own = slice(begin, begin + lengths[index])
                    x, y, p = (np.asarray(content[name][own].tolist(), object) for name in "xyp")
                    ensure(((p * 34 + y) * 34 + x).tolist() == found[0].units.tolist(), "the units differ")

    return lambda rng: (npz(rng.choice((frames, pixels)) if rng else pixels, rng), None), read


def pictures(folder):
    arrays = {"x_train": np.arange(64, dtype=np.uint8).reshape(4, 4, 4), "y_train": [0, 1, 2, 1]}
    arrays |= {"x_test": np.zeros((2, 4, 4, 3), np.uint8), "y_test": [2, 0]}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
            info = tarfile.TarInfo(f"cifar/{name}")
            info.size = images.RECORD
            archive.addfile(info, io.BytesIO(bytes([7]) * images.RECORD))
    tar = buffer.getvalue()

    def mutate(rng):
        if rng is None:
            return gzip.compress(tar), ".tar.gz"
        kind = rng.randrange(3)
        if kind:
            return npz(arrays, rng), ".npz"
        changed = gzip.compress(change_bytes(tar, rng, 2000), 1)
        return rng.choice((changed, change_bytes(gzip.compress(tar, 1), rng))), ".tar.gz"

    def read(path, suffix):
        path = path.rename(path.with_name(path.name + suffix))
        images.read_images.cache_clear()
        found = images.read_images(path)
        ensure(len(found.x_train) == len(found.y_train) and len(found.x_test) == len(found.y_test), "number of labels")
        if suffix == ".npz":
            content = load_with_numpy(path)
            ensure(found.y_train.tolist() == content["y_train"].tolist(), "the labels differ")
            ensure(found.x_train.flatten().tolist() == content["x_train"].flatten().tolist(), "the images differ")

    return mutate, read


def sounds(folder):
    from scipy.io import wavfile

    kinds, made = (np.int16, np.uint8, np.int32, np.float32, np.float64), []
    for kind in kinds:
        for sides in (1, 2):
            wavfile.write(folder / "a.wav", 16_000, (np.arange(40).reshape(-1, sides) % 7).astype(kind))
            made.append((folder / "a.wav").read_bytes())
    fields = ((4, 4), (16, 4), (20, 2), (22, 2), (24, 4), (28, 4), (32, 2), (34, 2), (36, 4), (40, 4))
    numbers = (0, 1, 2, 3, 7, 16, 24, 64, 255, 65534, 65535, 2**31 - 1, 2**31, 0xFFFFFFF0, 2**32 - 1)

    def mutate(rng):
        if rng is None:
            return made[0], None
        content = bytearray(rng.choice(made))
        kind = rng.randrange(3)
        if kind == 0:
            return change_bytes(content, rng, rng.choice((None, 60))), None
        for _ in range(rng.choice((1, 2))):
            at, size = rng.choice(fields)
            content[at : at + size] = (rng.choice(numbers) % 256**size).to_bytes(size, "little")
        if kind == 2:
            at = rng.randrange(44, len(content) - 8)
            content[at : at + 8] = struct.pack("<d", rng.choice((math.nan, math.inf, -math.inf, 1e308)))
        return bytes(content), None

    def read(path, _):
        sound, rate = read_wav(path, mix=True)
        ensure(sound.ndim == 1 and sound.dtype == np.float64 and 0 < sound.size <= path.stat().st_size, "not samples")
        ensure(rate >= 1 and np.isfinite(sound).all(), "rate 0, or samples that are not finite")

    return mutate, read


def address_events(folder):
    rng = np.random.default_rng(0)
    write_aer(folder / "a.bin", events.PixelEvents(*(rng.integers(0, end, 20) for end in (34, 34, 2, 99_999))))
    whole = (folder / "a.bin").read_bytes()

    def read(path, _):
        found, content = read_aer(path), path.read_bytes()
        ensure(len(found.x) * 5 == len(content), "not five bytes per event")
        for i in range(len(found.x)):
            x, y, high, middle, low = content[5 * i : 5 * i + 5]
            expected = [x, y, high >> 7, (high & 127) * 65536 + middle * 256 + low]
            ensure([int(part[i]) for part in found] == expected, "the events differ")
        found.to_events()

    return lambda rng: (change_bytes(whole, rng), None), read


def spike_files(folder):
    import h5py

    rng = np.random.default_rng(0)
    path = folder / "a.h5"
    recordings = [(Events.of(rng.random(n), rng.integers(0, 700, n)), n % 3) for n in (5, 0, 9, 30)]
    write_spikes(path, recordings, words=("one", "two", "three"), speakers=(1, 2, 3, 4))
    whole = path.read_bytes()

    def rewrite(rng):
        path.write_bytes(whole)
        name = rng.choice(("labels", "spikes/times", "spikes/units", "extra/keys", "extra/speaker", "spikes", "extra"))
        with h5py.File(path, "a") as file:
            del file[name]
            kind = rng.randrange(9)
            if kind == 0:
                file[name] = rng.choice((np.zeros(4), np.zeros((4, 2), int), np.asarray([b"a"] * 4), 3.0, np.zeros(0)))
            elif kind == 1:
                file[name] = np.asarray([0, 1, 2**64 - 1, 2**63], np.uint64)
            elif kind == 2:
                size, chunk = rng.choice(((10**12, 1024), (60_000_000, 1024), (4, 2**31)))
                file.create_dataset(name, (size,), maxshape=(None,), dtype="u1", chunks=(chunk,))
            elif kind == 3:
                file[name] = h5py.ExternalLink("/etc/passwd", "/x")
            elif kind == 4:
                file[name] = h5py.SoftLink(rng.choice(("/labels", f"/{name}")))
            elif kind == 5:
                file.create_dataset(name, (4,), dtype="u1", external=[("/etc/hostname", 0, 4)])
            elif kind == 6:
                made = file.create_dataset(name, (4,), dtype=h5py.vlen_dtype(np.dtype(rng.choice(("f8", "i8", "u8")))))
                for i in range(4):
                    made[i] = np.full(rng.choice((0, 5, 9)), rng.choice((0, 3, 700, 2**31)))
            elif kind == 7:
                made = file.create_dataset(name, (4,), dtype=h5py.string_dtype())
                made[0] = "x"
        return path.read_bytes()

    def mutate(rng):
        if rng is None:
            return whole, None
        return (rewrite(rng) if rng.random() < 0.3 else change_bytes(whole, rng)), None

    def read(path, _):
        file = events.SpikeFile(path)
        ensure(file.labels.dtype == np.int64 and (file.labels >= 0).all(), "labels that overflowed")
        for index in range(len(file)):
            with contextlib.suppress(AdptnetError):
                found = file[index][0]
                ensure(len(found.times) == len(found.units), "not one unit per time")
                ensure(not found.units.size or 0 <= found.units.min() <= found.units.max() < 700, "units out of range")

    return mutate, read


def packed(folder):
    path = folder / "b.h5"
    write_spikes(path, [(Events.of([0.1, 0.2], [3, 4]), 1)])
    whole = path.read_bytes()
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("ssc_train.h5", whole)
    bomb = gzip.compress(bytes(80 * 2**20), 9)

    def mutate(rng):
        if rng is None:
            return gzip.compress(whole), ".gz"
        kind = rng.randrange(40)
        if kind == 0:
            return bomb, ".gz"
        return (
            (change_bytes(gzip.compress(whole), rng), ".gz")
            if kind % 2
            else (change_bytes(zipped.getvalue(), rng), ".zip")
        )

    def read(path, suffix):
        own = path.parent / "packed"
        own.mkdir(exist_ok=True)
        target = own / "ssc_train.h5"
        for old in own.iterdir():
            old.unlink()
        path.rename(own / f"ssc_train.h5{suffix}")
        shd.find_split(own, "ssc_train", verify=suffix == ".gz")
        content = target.read_bytes()
        ensure(content == whole, "not the content that was packed")

    return mutate, read


def rows(folder):
    result = load_results()["fig:copy_memory"]
    lines = []
    for point in result.recipe.points("smoke")[:6]:
        row = {"label": result.name, "scale": "smoke", "settings": dict(point.settings), "seed": point.seed}
        lines.append(
            {**row, "recipe": result.recipe.version, "numbers": {"accuracy": 50.0, "x": "inf"}, "time": {"a": 1}}
        )

    def mutate(rng):
        if rng is None:
            return b"\n".join(json.dumps(line).encode() for line in lines), None
        texts = [json.dumps(line).encode() for line in lines]
        if rng.random() < 0.3:
            return change_bytes(b"\n".join(texts) + b"\n", rng), None
        at = rng.randrange(len(texts))
        texts[at] = change_json(lines[at], rng).encode(errors="surrogatepass")
        return b"\n".join(texts), None

    def read(path, _):
        own = path.parent / "rows"
        store_of_rows = RowStore(own)
        target = store_of_rows.path(result, "smoke")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        given = []
        for text in target.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                given.append(json.loads(text))
        found = store_of_rows.read_lines(result, "smoke")
        ensure(all(row in given for row in found.values()), "a row that is not in the file")
        store_of_rows.read_rows(result, "smoke")

    return mutate, read


def manifests(folder):
    files = {"model.safetensors": b"weights", "progress.json": b"{}"}

    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    document = {"adptnet_checkpoint": 1, "sha256": sums}
    bodies = (b"{}", b"[]", b'{"sha256": []}', b"\xff\xfe", b"3", b"", b"null", b'{"adptnet_checkpoint": 1}')
    names = ("../../../../etc/hostname", "/etc/hostname", "..", ".", "", "a/b", "a\0b", "link", "sub")

    def sign(body):
        return body + b"\n" + hashlib.sha256(body).hexdigest().encode()

    def mutate(rng):
        kind = 0 if rng is None else rng.randrange(4)
        if kind == 0:
            return change_bytes(sign(json.dumps(document).encode()), rng), None
        if kind == 1:
            body = json.dumps({**document, "sha256": {rng.choice(names): "0" * 64, **sums}}).encode()
        elif kind == 2:
            body = rng.choice(bodies)
        else:
            body = change_json(document, rng).encode(errors="surrogatepass")
        return sign(body), None

    def read(path, _):
        own = path.parent / "step-000000001"
        if not own.exists():
            store.write_folder(own, files)
            (own / "link").symlink_to("/etc/hostname")
            (own / "sub").mkdir()
        path.replace(own / "manifest.json")
        found = store.read_folder(own)
        ensure(found and all(files.get(name) == content for name, content in found.items()), "not the written files")

    return mutate, read


def metric_files(folder):
    whole = b"".join(
        json.dumps({"step": i, "loss": 1 / (i + 1), "exponents": "nan"}).encode() + b"\n" for i in range(9)
    )

    def read(path, _):
        given = [json.loads(text) for text in whole.splitlines()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = metrics.read_metrics(path)
        ensure(isinstance(found, list) and len(found) <= 2 * len(given), "not a list, or too long")

    return lambda rng: (change_bytes(whole, rng), None), read


def networks(folder):
    model = nn.SpikingModelSpec(cells.SiLIF(3), 4, 2, depth=1).build()
    from adptnet.integrations.silif import _map_names

    arrays = {theirs: model.state_dict()[ours].numpy() for theirs, ours in _map_names(1)}

    def read(path, _):
        found = from_silif(path).state_dict()
        content = load_with_numpy(path)
        for theirs, ours in _map_names(1):
            ensure(
                np.array_equal(content[theirs].astype(found[ours].numpy().dtype), found[ours].numpy(), equal_nan=True),
                theirs,
            )

    return lambda rng: (npz(arrays, rng), None), read


KINDS = {
    "checkpoints": checkpoints,
    "specs": specs,
    "configs": configs,
    "archives": archives,
    "pictures": pictures,
    "sounds": sounds,
    "address_events": address_events,
    "spike_files": spike_files,
    "packed": packed,
    "rows": rows,
    "manifests": manifests,
    "metrics": metric_files,
    "networks": networks,
}


def measure_peak():
    """Return the peak memory of this process, in MB. The peak by getrusage includes that of the parent before exec."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def attempt(read, path, note):
    """Read one file and return the outcome and, for a fault, its description."""
    try:
        read(path, note)
        return "accepted", None
    except AdptnetError:
        return "rejected", None
    except Fault as fault:
        return "wrong", str(fault)
    except BaseException as error:
        return "raw", f"{type(error).__name__}: {str(error)[:300]}"


def main(seed, counts):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report = {}
    with tempfile.TemporaryDirectory() as scratch:
        prepared = {}
        for kind in counts:
            (Path(scratch) / kind).mkdir()
            prepared[kind] = KINDS[kind](Path(scratch) / kind)
        before = measure_peak()
        for kind, count in counts.items():
            mutate, read = prepared[kind]
            outcomes, faults = Counter(), []
            path = Path(scratch) / kind / "mutated"
            content, note = mutate(None)
            path.write_bytes(content)
            outcome, fault = attempt(read, path, note)
            if outcome != "accepted":
                faults.append(f"{kind}: a valid file is {outcome}: {fault}")
            for number in range(count):
                print(f"{kind} {number}", file=sys.stderr, flush=True)  # the last line names the file of a crash
                rng = random.Random(f"{seed} {kind} {number}")
                content, note = mutate(rng)
                path.write_bytes(content)
                signal.alarm(PATIENCE)
                outcome, fault = attempt(read, path, note)
                signal.alarm(0)
                outcomes[outcome] += 1
                if fault is not None:
                    faults.append(f"{kind} {number}: {outcome}: {fault}")
            report[kind] = {**outcomes, "faults": faults[:20], "megabytes": round(measure_peak() - before, 1)}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], {kind: int(count) for kind, _, count in (text.partition("=") for text in sys.argv[2:])})
