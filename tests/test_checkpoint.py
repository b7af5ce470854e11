"""Saving and loading: all of it or nothing, and never code."""

import json
import pickle

import pytest
import safetensors.torch
import torch
from torch.testing import assert_close

import adptnet
from adptnet import ADPTNet, Bidirectional, Recurrent, SequenceModel, Stack, cells, spectra
from adptnet.errors import CheckpointError, SpecError
from members import build, legal, name_of


@pytest.mark.parametrize("axes", legal, ids=name_of)
def test_a_layer_comes_back_with_its_numbers(axes, tmp_path):
    layer = build(axes)
    adptnet.save(layer, tmp_path / "layer.safetensors")
    twin = adptnet.load(tmp_path / "layer.safetensors")
    assert type(twin) is ADPTNet
    assert twin.spec == layer.spec
    x = torch.randn(2, 7, layer.width)
    assert_close(twin(x)[0], layer(x)[0], rtol=1e-12, atol=1e-12)  # loaded weights may lie otherwise in memory
    assert [n for n, p in twin.named_parameters() if p.requires_grad] == [
        n for n, p in layer.named_parameters() if p.requires_grad
    ]


@pytest.mark.parametrize(
    "model",
    [
        Recurrent(cells.ReLURNN(4)),
        Bidirectional(ADPTNet(4).spec),
        Stack(Bidirectional(ADPTNet(4).spec).spec, 2),
        SequenceModel(ADPTNet(4).spec, input_size=4, output_size=3, norm="batch", depth=2),
    ],
    ids=lambda m: type(m).__name__,
)
def test_every_module_with_a_spec_comes_back(model, tmp_path):
    adptnet.save(model, tmp_path / "model")
    twin = adptnet.load(tmp_path / "model")
    x = torch.randn(2, 7, 4)
    assert_close(twin.eval()(x)[0], model.eval()(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_optimiser_marks_come_back(dtype, tmp_path):
    layer = ADPTNet(4, dtype=dtype)
    adptnet.save(layer, tmp_path / "model")
    twin = adptnet.load(tmp_path / "model")
    assert {p.dtype for p in twin.parameters()} == {dtype}
    assert twin.cell.spectrum.log_dt._no_weight_decay
    assert twin.cell.spectrum.log_dt._optim == {"weight_decay": 0.0}


def test_loading_leaves_random_numbers_alone(tmp_path):
    adptnet.save(ADPTNet(4), tmp_path / "model")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    adptnet.load(tmp_path / "model")
    assert torch.equal(torch.rand(3), expected)


def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "model"
    adptnet.save(ADPTNet(4), path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        adptnet.save(ADPTNet(5), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_is_not_a_checkpoint_is_refused_by_name(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(CheckpointError, match="There is no file"):
        adptnet.load(path)
    adptnet.save(ADPTNet(4), path)
    whole = path.read_bytes()
    for broken in (whole[:100], whole[:-10], b"", pickle.dumps({"a": 1})):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="not a complete safetensors file"):
            adptnet.load(path)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        adptnet.load(tmp_path)
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="no adptnet spec"):
        adptnet.load(path)
    spec = json.loads(ADPTNet(4).spec.to_json())
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}, {"adptnet": json.dumps(spec)}))
    with pytest.raises(CheckpointError, match="do not belong together"):
        adptnet.load(path)
    spec["adptnet_spec"] = 2
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}, {"adptnet": json.dumps(spec)}))
    with pytest.raises(SpecError, match="written by a newer adptnet"):
        adptnet.load(path)


def test_a_changed_byte_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "model"
    adptnet.save(ADPTNet(2, spectrum=spectra.Negative()), path)
    whole = path.read_bytes()
    adptnet.save(adptnet.load(path), path)
    assert path.read_bytes() == whole  # the same model is the same file
    for position in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises((CheckpointError, SpecError)):
            adptnet.load(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="model is not as it was written: weights and spec have another SHA-256"):
        adptnet.load(path)


def test_a_file_from_before_sums_were_written_still_loads(tmp_path):
    layer = ADPTNet(4)
    path = tmp_path / "model"
    path.write_bytes(safetensors.torch.save(layer.state_dict(), {"adptnet": layer.spec.to_json()}))
    assert_close(adptnet.load(path).state_dict(), layer.state_dict(), rtol=0, atol=0)


def test_a_layers_layout_comes_back(tmp_path):
    adptnet.save(ADPTNet(4, batch_first=False), tmp_path / "model")
    assert not adptnet.load(tmp_path / "model").batch_first


def test_a_link_is_followed_and_permissions_are_the_users(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    adptnet.save(ADPTNet(4), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "plain").touch()
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode


def tampered(path, change, **tensors):
    """A checkpoint of ADPTNet(4) with half its spectrum negative, its spec or its tensors changed."""
    layer = ADPTNet(4, spectrum=spectra.Negative())
    text = change(layer.spec.to_json())
    path.write_bytes(safetensors.torch.save({**layer.state_dict(), **tensors}, {"adptnet": text}))
    return path


def test_a_tampered_checkpoint_is_refused_before_it_costs_anything(tmp_path):
    huge = tampered(tmp_path / "huge", lambda text: text.replace('"width": 4', '"width": 30000'))
    with pytest.raises(CheckpointError, match="a larger model than the"):
        adptnet.load(huge)
    floats = tampered(tmp_path / "floats", str, **{"cell.spectrum.negative": torch.full((4,), -5.0)})
    with pytest.raises(CheckpointError, match=r"cell\.spectrum\.negative is torch\.float64, where torch\.bool"):
        adptnet.load(floats)
    weird = tampered(
        tmp_path / "weird", str, **{"cell.spectrum.spectrum.log_dt": torch.zeros(4, dtype=torch.complex64)}
    )
    with pytest.raises(CheckpointError, match=r"log_dt is torch\.complex64"):
        adptnet.load(weird)
    with pytest.raises(CheckpointError, match="describes no whole module"):
        adptnet.load(tampered(tmp_path / "part", lambda _: spectra.Linspace().to_json()))


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch.compile's own
def test_what_has_no_spec_is_not_saved(tmp_path):
    layer = ADPTNet(4)

    class Mine(ADPTNet):
        pass

    for model in (
        torch.nn.Linear(2, 2),
        torch.compile(layer),
        layer.cell.directions[0],
        layer.cell.drive.gain,
        Mine(4),
    ):
        with pytest.raises(CheckpointError, match="load could not build a"):
            adptnet.save(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match="is a folder"):
        adptnet.save(layer, tmp_path)
    with pytest.raises(CheckpointError, match="mkdir -p"):
        adptnet.save(ADPTNet(4), tmp_path / "nowhere" / "model")
    assert not list(tmp_path.iterdir())
