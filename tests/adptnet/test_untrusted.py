"""Untrusted files: malformed ones are rejected by name, before they cost memory or disk."""

import io
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch

import adptnet
from adptnet import cells, nn
from adptnet._io.untrusted import LimitedReader, parse_json, read_npz, unpacked_limit
from adptnet.errors import CheckpointError, SpecError
from adptnet.integrations.silif import from_silif
from support.archives import MEGABYTE, npy_header, zip_of_zeros


def test_the_limit_grows_with_the_file_and_can_be_raised(monkeypatch):
    assert unpacked_limit(100) == 64 * MEGABYTE
    assert unpacked_limit(10 * MEGABYTE) == 2000 * MEGABYTE
    monkeypatch.setenv("ADPTNET_UNPACK_LIMIT", "123")
    assert unpacked_limit(10 * MEGABYTE) == 123
    monkeypatch.setenv("ADPTNET_UNPACK_LIMIT", "lots")
    with pytest.raises(ValueError, match="ADPTNET_UNPACK_LIMIT=lots is not a number of bytes"):
        unpacked_limit(100)


def test_a_stream_ends_at_its_limit(monkeypatch):
    monkeypatch.setenv("ADPTNET_UNPACK_LIMIT", "1000")
    assert LimitedReader(io.BytesIO(bytes(1000)), 10).read() == bytes(1000)
    with pytest.raises(ValueError, match=r"its 10 bytes unpack to more, and 1,000 are allowed.*ADPTNET_UNPACK_LIMIT"):
        LimitedReader(io.BytesIO(bytes(1001)), 10).read()


def test_weights_that_unpack_to_too_much_are_rejected_before_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    zip_of_zeros(path, "snn.0.dt.npy", 70 * MEGABYTE, npy_header((70 * MEGABYTE,)))
    assert path.stat().st_size < MEGABYTE
    monkeypatch.setattr(np, "empty", None)  # nothing is allocated
    with pytest.raises(CheckpointError, match=r"bomb\.npz.* unpack to 73,4.*ADPTNET_UNPACK_LIMIT"):
        from_silif(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (npy_header(f"({10**12},)"), "do not fit"),
        (npy_header("(4294967296, 4294967296)"), "do not fit"),
        (npy_header("(-1,)"), "do not fit"),
        (npy_header("(1,)", "|O"), "Object arrays need pickle"),
        (b"", "magic string"),
    ],
)
def test_an_array_that_does_not_fit_its_header_is_rejected(header, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("snn.0.dt.npy", header + b"123")
    with pytest.raises(ValueError, match=message):
        read_npz(tmp_path / "a.npz")


def test_arrays_are_read_as_numpy_reads_them(tmp_path):
    arrays = {
        "a": np.arange(6).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "z": np.zeros((0, 3)),
    }
    arrays |= {"scalar": np.asarray(3), "big": np.arange(3, dtype=">i4"), "s": np.asarray(["x", "yy"])}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found, names = read_npz(tmp_path / "a.npz")
        assert names == sorted(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)


def test_untrusted_json_raises_one_kind_of_error():
    assert parse_json('{"a": [1, 2.5, "x", null]}') == {"a": [1, 2.5, "x", None]}
    for text in ("[" * 99_999, "9" * 5000, "NaN", "[-Infinity]", b"\xff\xfe\xff", "{", ""):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)


def test_values_of_a_spec_have_the_types_of_its_fields():
    with pytest.raises(SpecError, match="threshold"):
        cells.LIF(4, threshold="high")
    with pytest.raises(SpecError, match="depth"):
        nn.StackSpec(adptnet.ADPTNet.paper(4).spec, depth="2")


def test_delays_of_a_checkpoint_are_those_of_its_spec(tmp_path):
    model = nn.SpikingModelSpec(cells.DelayedLIF(3, delay=(2, 5)), 2, 2).build()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = next(name for name in tensors if name.endswith("delays"))
    for value in (0, 6, 10**9, -1):
        tensors[name][0] = value
        content = safetensors.torch.save(tensors, {"adptnet": model.spec.to_json()})
        (tmp_path / "model").write_bytes(content)
        with pytest.raises(CheckpointError, match="the spec has 2 to 5"):
            adptnet.load(tmp_path / "model")
    assert torch.get_default_dtype() == torch.float64
