"""Saving and loading: atomic, complete, and without pickle."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch.nn.utils import prune
from torch.testing import assert_close

import adptnet
from adptnet import (
    ADPTNet,
    Bidirectional,
    Recurrent,
    SequenceModel,
    Stack,
    cells,
    conjugates,
    directions,
    projections,
    spectra,
)
from adptnet._layout import lay_out
from adptnet.errors import CheckpointError, SpecError
from support.members import build, legal, name_of


@pytest.mark.parametrize("axes", legal, ids=name_of)
def test_a_layer_loads_with_its_values(axes, tmp_path):
    layer = build(axes)
    adptnet.save(layer, tmp_path / "layer.safetensors")
    twin = adptnet.load(tmp_path / "layer.safetensors")
    assert type(twin) is ADPTNet
    assert twin.spec == layer.spec
    x = torch.randn(2, 7, layer.width)
    assert_close(twin(x)[0], layer(x)[0], rtol=1e-12, atol=1e-12)  # loaded weights may have other strides
    assert [n for n, p in twin.named_parameters() if p.requires_grad] == [
        n for n, p in layer.named_parameters() if p.requires_grad
    ]


@pytest.mark.parametrize(
    "model",
    [
        Recurrent(cells.ReLURNN(4)),
        Bidirectional(ADPTNet.paper(4).spec),
        Stack(Bidirectional(ADPTNet.paper(4).spec).spec, 2),
        SequenceModel(ADPTNet.paper(4).spec, input_size=4, output_size=3, norm="batch", depth=2),
    ],
    ids=lambda m: type(m).__name__,
)
def test_every_module_with_a_spec_loads(model, tmp_path):
    adptnet.save(model, tmp_path / "model")
    twin = adptnet.load(tmp_path / "model")
    x = torch.randn(2, 7, 4)
    assert_close(twin.eval()(x)[0], model.eval()(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_optimizer_marks_are_restored(dtype, tmp_path):
    layer = ADPTNet.paper(4, dtype=dtype)
    adptnet.save(layer, tmp_path / "model")
    twin = adptnet.load(tmp_path / "model")
    assert {p.dtype for p in twin.parameters()} == {dtype}
    assert twin.cell.spectrum.log_dt._no_weight_decay
    assert twin.cell.spectrum.log_dt._optim == {"weight_decay": 0.0}


@pytest.mark.parametrize("spectrum", [spectra.S4DReal(), spectra.Sparse(), spectra.LRURing()], ids=repr)
def test_saving_and_loading_leave_random_numbers_alone(spectrum, tmp_path):
    layer = ADPTNet.paper(4, spectrum=spectrum)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    adptnet.save(layer, tmp_path / "model")
    adptnet.load(tmp_path / "model")
    assert torch.equal(torch.rand(3), expected)


def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "model"
    adptnet.save(ADPTNet.paper(4), path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        adptnet.save(ADPTNet.paper(5), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_is_not_a_checkpoint_is_rejected_by_name(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(CheckpointError, match="There is no file"):
        adptnet.load(path)
    adptnet.save(ADPTNet.paper(4), path)
    whole = path.read_bytes()
    for broken in (whole[:100], whole[:-10], b"", pickle.dumps({"a": 1})):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="not a complete safetensors file"):
            adptnet.load(path)
    with pytest.raises(CheckpointError, match=r"There is no file .*model\.safetensors"):
        adptnet.load(tmp_path)
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="no adptnet spec"):
        adptnet.load(path)
    spec = json.loads(ADPTNet.paper(4).spec.to_json())
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}, {"adptnet": json.dumps(spec)}))
    with pytest.raises(CheckpointError, match="do not belong together"):
        adptnet.load(path)
    spec["adptnet_spec"] = 2
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}, {"adptnet": json.dumps(spec)}))
    with pytest.raises(SpecError, match="written by a newer adptnet"):
        adptnet.load(path)


def test_a_changed_byte_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "model"
    adptnet.save(ADPTNet.paper(2, spectrum=spectra.Negative()), path)
    whole = path.read_bytes()
    adptnet.save(adptnet.load(path), path)
    assert path.read_bytes() == whole  # equal models give equal files
    for position in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises((CheckpointError, SpecError)):
            adptnet.load(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="model was changed after it was written"):
        adptnet.load(path)


def test_a_file_from_before_sums_were_written_still_loads(tmp_path):
    layer = ADPTNet.paper(4)
    path = tmp_path / "model"
    path.write_bytes(safetensors.torch.save(layer.state_dict(), {"adptnet": layer.spec.to_json()}))
    assert_close(adptnet.load(path).state_dict(), layer.state_dict(), rtol=0, atol=0)


def test_batch_first_is_restored(tmp_path):
    adptnet.save(ADPTNet.paper(4, batch_first=False), tmp_path / "model")
    assert not adptnet.load(tmp_path / "model").batch_first


def test_a_link_is_followed_and_permissions_are_the_users(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    adptnet.save(ADPTNet.paper(4), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "plain").touch()
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode


def tampered(path, change, **tensors):
    """Write a checkpoint of ADPTNet.paper(4), half of its spectrum negative, with a changed spec or changed tensors."""
    layer = ADPTNet.paper(4, spectrum=spectra.Negative())
    text = change(layer.spec.to_json())
    path.write_bytes(safetensors.torch.save({**layer.state_dict(), **tensors}, {"adptnet": text}))
    return path


def test_a_tampered_checkpoint_is_rejected_before_it_costs_memory(tmp_path):
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
    with pytest.raises(CheckpointError, match="does not describe a complete module"):
        adptnet.load(tampered(tmp_path / "part", lambda _: spectra.Linspace().to_json()))


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # from torch.compile
def test_what_has_no_spec_is_not_saved(tmp_path):
    layer = ADPTNet.paper(4)

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
        adptnet.save(ADPTNet.paper(4), tmp_path / "nowhere" / "model")
    assert not list(tmp_path.iterdir())


def test_a_loaded_model_does_not_depend_on_its_file(tmp_path):
    path = tmp_path / "model"
    adptnet.save(ADPTNet.paper(4), path)
    model = adptnet.load(path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    size = path.stat().st_size
    with open(path, "rb+") as file:  # overwritten in place, as by cp or rsync --inplace
        file.write(b"\xff" * size)
        file.flush()
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    with open(path, "rb+") as file:
        file.truncate(0)  # reading a memory map of it would kill the process
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))


def model_spec(**changes):
    spec = json.loads(SequenceModel(ADPTNet.paper(4).spec, depth=2, vocabulary=7).spec.to_json())["spec"]
    return {**spec, **changes}


def cell_spec(**changes):
    spec = json.loads(ADPTNet.paper(4).spec.to_json())["spec"]
    return {**spec, "cell": {**spec["cell"], **changes}}


def nested(kind, count):
    text = '{"type": "Linspace"}'
    for _ in range(count):
        text = f'{{"type": "{kind}", "spectrum": {text}}}'
    return text


def written(spec):
    return json.dumps({"adptnet_spec": 1, "spec": spec})


huge = 2**31 - 1
documents = {
    "width": json.dumps(cell_spec(width=200_000_000)),
    "wide and sparse": json.dumps(cell_spec(width=huge, spectrum={"type": "Sparse"})),
    "wide and complex": json.dumps(cell_spec(width=2**30, spectrum={"type": "S4DInv"}, rope={"type": "RoPE"})),
    "ring": json.dumps(cell_spec(width=2**30, spectrum={"type": "LRURing"})),
    "orthogonal": json.dumps(cell_spec(width=2**16, projection={"type": "Orthogonal"})),
    "nested": json.dumps(cell_spec(width=2_000_000)).replace('{"type": "Linspace"', nested("Negative", 20)[:-21], 1),
    "product": json.dumps(cell_spec(conjugate={"type": "Product", "steps": huge}, projection={"type": "Identity"})),
    "depth": json.dumps(model_spec(depth=huge)),
    "vocabulary": json.dumps(model_spec(vocabulary=huge)),
    "output": json.dumps(model_spec(output_size=huge)),
    "mamba": json.dumps({"type": "Mamba", "width": huge, "expand": huge}),
    "taps": json.dumps({"type": "Hawk", "width": 4, "taps": huge}),
    "delay": json.dumps({"type": "LayerSpec", "cell": {"type": "DelayedLIF", "width": huge, "delay": huge}}),
}


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is measured by /proc")
def test_a_small_file_that_describes_a_huge_model_costs_little(tmp_path):
    paths = []
    for name, document in documents.items():
        paths.append(tmp_path / name)
        text = f'{{"adptnet_spec": 1, "spec": {document}}}'
        paths[-1].write_bytes(safetensors.torch.save({"a": torch.zeros(9)}, {"adptnet": text}))
    many = {str(i): torch.zeros(0) for i in range(2000)}
    paths.append(tmp_path / "many")
    text = json.dumps({"adptnet_spec": 1, "spec": model_spec(depth=2000)})
    paths[-1].write_bytes(safetensors.torch.save(many, {"adptnet": text}))
    program = """
import contextlib, sys, adptnet, safetensors.torch, torch
def peak():  # in MB; getrusage would count what the parent used before exec
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) / 1024
adptnet.ADPTNet.paper(4, projection=adptnet.projections.Orthogonal())  # what torch loads at first use, LAPACK too,
# and to unwind its first error
with contextlib.suppress(RuntimeError):
    torch.empty(2**40, 2**40, device="meta")
before = peak()
for path in sys.argv[1:]:
    try:
        adptnet.load(path)
    except adptnet.errors.AdptnetError as error:
        assert path in str(error), error
        print("rejected", path)
assert peak() - before < 10, f"{peak() - before} MB"
assert "sympy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rejected") == len(paths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"adptnet_spec": 1, "spec": ' + nested("Negative", 240) + "}", "nested more than 32 deep"),
        ('{"adptnet_spec": 1, "spec": ' + '{"type": "Negative", "spectrum": ' * 90_000, "nested too deeply"),
        ('{"adptnet_spec": ' + "9" * 5000 + ', "spec": {}}', "not JSON"),
        ('{"adptnet_spec": ' + "9" * 4000 + ', "spec": {}}', "newer adptnet"),
        (written(cell_spec(beta=float("nan"))), "NaN is not a JSON number"),
        (written(cell_spec(beta=10**400)), "beta"),
        (written(cell_spec(memory={"type": "SlowMemory", "feedback": 10**400})), "feedback"),
        (written(cell_spec(spectrum={"type": "FromExponents", "exponents": [10**400]})), "needs finite numbers"),
        (written(cell_spec(start=None)), "must be True or False"),
        (written(cell_spec(retraction="Caley")), "retraction"),
        ('{"adptnet_spec": 1, "spec": 3, "tied": [[]]}', "tied"),
        ('{"adptnet_spec": 1, "spec": 3, "tied": {"a": 1}}', "tied"),
        ('{"adptnet_spec": 1, "spec": 3, "tied": [["a", "a"]]}', "tied"),
        ('{"adptnet_spec": 1, "spec": 3, "tied": [["a", "b"]]}', "tied"),
        ('{"adptnet_spec": 1, "spec": 3, "tied": [["a", "c"]]}', "a and c are tied but differ"),
        ("\x00", "not JSON"),
    ],
)
def test_a_malformed_spec_is_rejected_with_the_name_of_the_file(text, message, tmp_path):
    path = tmp_path / "named"
    path.write_bytes(safetensors.torch.save({"a": torch.zeros(2), "c": torch.ones(2)}, {"adptnet": text}))
    with pytest.raises((CheckpointError, SpecError)) as error:
        adptnet.load(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_device_or_an_unreadable_file_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            adptnet.load(path)


def test_tied_weights_load_tied(tmp_path):
    model = SequenceModel(ADPTNet.paper(4).spec, vocabulary=20)
    model.decoder.weight = model.encoder.weight
    adptnet.save(model, tmp_path / "model")
    twin = adptnet.load(tmp_path / "model")
    assert twin.decoder.weight is twin.encoder.weight
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in model.parameters())
    x = torch.randint(20, (2, 5))
    for each in (model, twin):
        optimiser = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x)[0].square().sum().backward()
        optimiser.step()
    assert_close(twin.state_dict(), model.state_dict())
    adptnet.save(twin, tmp_path / "twin")
    assert adptnet.load(tmp_path / "twin").decoder.weight is not None


def test_shared_modules_load_shared(tmp_path):
    model = Stack(ADPTNet.paper(4, projection=projections.Orthogonal()).spec, 3)
    model.layers[2] = model.layers[0]
    adptnet.save(model, tmp_path / "model")
    twin = adptnet.load(tmp_path / "model")
    assert len(list(twin.parameters())) == len(list(model.parameters()))
    assert twin.layers[2].cell.spectrum.log_dt is twin.layers[0].cell.spectrum.log_dt
    assert twin.layers[2].cell.spectrum.log_dt._no_weight_decay
    x = torch.randn(2, 5, 4)
    assert_close(twin(x)[0], model(x)[0])


def test_views_of_one_storage_are_saved_apart_and_overlaps_rejected(tmp_path):
    model = SequenceModel(ADPTNet.paper(4).spec, vocabulary=20)
    both = torch.randn(40, 4)
    model.encoder.weight, model.decoder.weight = torch.nn.Parameter(both[:20]), torch.nn.Parameter(both[20:])
    adptnet.save(model, tmp_path / "model")
    twin = adptnet.load(tmp_path / "model")
    assert_close(twin.state_dict(), model.state_dict())
    assert len(list(twin.parameters())) == len(list(model.parameters()))
    model.decoder.weight = torch.nn.Parameter(both[10:30])
    with pytest.raises(CheckpointError, match=r"encoder\.weight and decoder\.weight overlap in memory"):
        adptnet.save(model, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def prune_decoder(model):
    prune.random_unstructured(model.decoder, "weight", amount=0.5)


def normalize_decoder(model):
    torch.nn.utils.parametrizations.weight_norm(model.decoder)


def constrain_input(model):
    torch.nn.utils.parametrizations.spectral_norm(model.blocks[0].layer.cell.drive.input_projection)


def widen_decoder(model):
    model.decoder = torch.nn.Linear(4, 99)


def add_adapter(model):
    model.blocks[0].adapter = torch.nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (prune_decoder, r"torch\.nn\.utils\.prune\.remove\(model\.get_submodule\('decoder'\), 'weight'\)"),
        (normalize_decoder, r"remove_parametrizations\(model\.get_submodule\('decoder'\), 'weight'\)"),
        (
            constrain_input,
            r"get_submodule\('blocks\.0\.layer\.cell\.drive\.input_projection'\), 'weight'\)",
        ),
        (widen_decoder, r"decoder\.bias has shape \(99,\), where \(20,\) is needed"),
        (add_adapter, r"adapter\.bias is not part of the model"),
    ],
)
def test_a_model_that_load_could_not_rebuild_is_not_saved(change, remedy, tmp_path):
    model = SequenceModel(ADPTNet.paper(4).spec, vocabulary=20)
    change(model)
    with pytest.raises(CheckpointError, match=remedy) as error:
        adptnet.save(model, tmp_path / "model")
    assert "was changed after it was built" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_advice_of_the_error_makes_a_pruned_model_savable(tmp_path):
    model = SequenceModel(ADPTNet.paper(4).spec, vocabulary=20)
    prune_decoder(model)
    prune.remove(model.decoder, "weight")
    adptnet.save(model, tmp_path / "model")
    assert_close(adptnet.load(tmp_path / "model").state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match="meta device and has no weights"):
        adptnet.save(model.spec.build(device="meta"), tmp_path / "model")


@pytest.mark.parametrize("axes", legal, ids=name_of)
def test_the_layout_of_a_layer_is_that_of_the_layer(axes):
    layer = build(axes)
    layout = lay_out(lambda: layer.spec.build(device="meta"))
    assert all(tensor.is_meta for tensor in layout.values())
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in layout.items()}
    assert described == {name: (tensor.shape, tensor.dtype) for name, tensor in layer.state_dict().items()}


def test_a_module_that_cannot_be_built_on_meta_is_reported_when_saving(tmp_path, monkeypatch):
    layer = ADPTNet.paper(4)

    def read_values(self, state_size, **options):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(spectra.Linspace, "build", read_values)
    with pytest.raises(CheckpointError, match=r"ADPTNet cannot be built on the meta device \(Tensor\.item\(\)"):
        adptnet.save(layer, tmp_path / "model")


def test_changes_of_shape_in_place_are_laid_out():
    def make():
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.empty(3, 4).uniform_(-1, 1).data.t_())
        module.register_buffer("column", torch.zeros(3).unsqueeze_(-1))
        return module

    assert {name: tuple(t.shape) for name, t in lay_out(make).items()} == {"weight": (4, 3), "column": (3, 1)}


@pytest.mark.parametrize(
    "axes",
    [
        {"conjugate": conjugates.Product(4)},
        {"direction": directions.FromState(heads=8)},
        {"direction": directions.FromState(heads=4), "conjugate": conjugates.Product(2)},
    ],
    ids=["planes", "heads", "both"],
)
@pytest.mark.parametrize("projection", [projections.Identity(), projections.Dense()], ids=repr)
def test_planes_and_heads_without_tensors_load(tmp_path, axes, projection):
    layer = adptnet.ADPTNet.paper(16, projection=projection, **axes)
    adptnet.save(layer, tmp_path / "layer.safetensors")
    assert adptnet.load(tmp_path / "layer.safetensors").spec == layer.spec
