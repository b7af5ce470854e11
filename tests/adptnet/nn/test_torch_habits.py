"""Common uses of a torch module, for every kind of layer and model: copies, devices, hooks, compilers, optimizers."""

import copy
import io
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import adptnet as adpt
from adptnet import adjoints, analysis, cells, directions, projections, solvers, spectra
from adptnet.cells import ADPTState
from adptnet.errors import IncompatibleError, InputError, SpecError, WeightDecayWarning
from adptnet.nn import LayerSpec, LayerStates, SequenceModel
from adptnet.ops import _backends, _build
from support.members import KIND_WIDTH as WIDTH
from support.members import all_kinds, few_kinds, layer_kinds

SPEC = LayerSpec(cells.ADPTSpec(WIDTH, beta=1.0))

every = pytest.mark.parametrize("make", all_kinds.values(), ids=all_kinds)
some = pytest.mark.parametrize("make", few_kinds.values(), ids=few_kinds)
every_slowly = pytest.mark.parametrize("make", all_kinds.values(), ids=all_kinds)
with_directions = {
    name: make for name, make in layer_kinds.items() if "GRU" not in name and "LSTM" not in name
}  # the kinds that have K and V


def inputs(steps=6, batch=3, **options):
    return torch.randn(batch, steps, WIDTH, **options)


def outputs(model, *args, **kwargs):
    return model(*args, **kwargs)[0]


def leaves(state):
    return torch.utils._pytree.tree_leaves(state)


def assert_states_close(state, other):
    assert type(state) is type(other)
    for one, two in zip(leaves(state), leaves(other), strict=True):
        assert_close(one, two)


# Copies, files, devices, dtypes.


@every
def test_copies_and_files_keep_every_value(make):
    model, x = make().eval(), inputs()
    expected = outputs(model, x)
    twins = [copy.deepcopy(model)]
    if not any(hasattr(module, "parametrizations") for module in model.modules()):  # torch cannot pickle it
        twins.append(pickle.loads(pickle.dumps(model)))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for assign in (False, True):
        file.seek(0)
        twin = make().eval()
        twin.load_state_dict(torch.load(file), strict=True, assign=assign)
        twins.append(twin)
    for twin in twins:
        assert torch.equal(outputs(twin, x), expected)


@every
def test_a_state_saves_detaches_moves_and_selects_rows(make):
    model, x = make().eval(), inputs(8)
    first, second = x.split((5, 3), 1)
    bidirectional = any(isinstance(module, adpt.Bidirectional) for module in model.modules())
    _, state = model(first)
    assert isinstance(state, tuple)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert_states_close(torch.load(file, weights_only=True), state.detach())
    assert not any(leaf.requires_grad for leaf in leaves(state.detach()))
    assert_states_close(state.to("cpu"), state)
    assert all(leaf.is_meta for leaf in leaves(state.to(device="meta")))
    narrow = state.to(torch.float32)
    assert {leaf.dtype for leaf in leaves(narrow)} == {torch.float32, torch.int64}
    for rows in ([2, 0, 0], torch.tensor([False, True, True]), slice(1, 3), []):
        chosen = state.select(rows)
        index = torch.arange(3)[rows]
        assert type(chosen) is type(state)
        assert all(len(leaf) == len(index) for leaf in leaves(chosen))
        if len(index) and not bidirectional:
            assert_close(outputs(model, second[index], chosen), outputs(model, second, state)[index])


def test_invalid_row_selections_are_reported():
    state = adpt.ADPTNet.paper(WIDTH)(inputs())[1]
    with pytest.raises(InputError, match="indices or a mask"):
        state.select(1)
    with pytest.raises(InputError, match="indices or a mask"):
        state.select([0.5])
    with pytest.raises(InputError, match="one sequence"):
        adpt.ADPTNet.paper(WIDTH)(torch.randn(6, WIDTH))[1].select([0])


def test_a_state_of_several_layers_is_still_a_tuple_and_a_tuple_is_still_a_state():
    model, x = adpt.Stack(SPEC, 2).eval(), inputs()
    _, state = model(x)
    first, second = state
    assert isinstance(state, LayerStates)
    assert isinstance(first, ADPTState)
    assert torch.equal(outputs(model, x, (first, second)), outputs(model, x, state))
    assert torch.equal(outputs(model, x, [first, second]), outputs(model, x, state))
    assert isinstance(pickle.loads(pickle.dumps(state.detach())), LayerStates)


@every
def test_meta_gives_the_shapes_of_outputs_states_and_gradients(make):
    x = inputs()
    lengths = torch.tensor([6, 3, 1])
    model = make()
    expected, state = model(x)
    padded = outputs(model, x, lengths=lengths)
    with torch.device("meta"):
        model = make()
        x = torch.randn(3, 6, WIDTH, requires_grad=True)
        y, after = model(x)
        assert y.is_meta
        assert y.shape == expected.shape
        assert [leaf.shape for leaf in leaves(after)] == [leaf.shape for leaf in leaves(state)]
        y.sum().backward()
        assert outputs(model, x, lengths=torch.tensor([6, 3, 1])).shape == padded.shape
    assert x.grad.shape == x.shape
    assert all(p.grad is None or p.grad.is_meta for p in model.parameters())


def test_meta_gives_the_shapes_of_every_solver_and_adjoint():
    with torch.device("meta"):
        layer, x = adpt.ADPTNet.paper(WIDTH), torch.randn(3, 6, WIDTH)
        for options in ({"solver": solvers.DEER()}, {"solver": solvers.Auto()}, {"adjoint": adjoints.Implicit()}):
            assert outputs(layer, x, **options).shape == x.shape
        assert outputs(layer, x, dt=torch.ones(3, 6), beta=torch.ones(3)).shape == x.shape


@every
def test_a_model_made_on_meta_is_filled_from_a_state_dict(make):
    model, x = make().eval(), inputs()
    with torch.device("meta"):
        assigned, emptied = make().eval(), make().eval()
    assigned.load_state_dict(model.state_dict(), assign=True)
    emptied.to_empty(device="cpu").load_state_dict(model.state_dict())
    for twin in (assigned, emptied):
        assert torch.equal(outputs(twin, x), outputs(model, x))


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)], ids=["square", "tall", "wide"])
def test_an_orthogonal_matrix_made_on_meta_is_filled_assigned_and_trained(shape):
    rows, columns = shape
    real = projections.Orthogonal().build(columns, rows)
    state = torch.get_rng_state()
    meta = projections.Orthogonal().build(columns, rows, device="meta")
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(meta) == repr(real)
    assert meta.dense().shape == shape
    meta.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert torch.equal(meta.dense(), real.dense())
    meta.weight = nn.init.orthogonal_(torch.empty(shape))  # by the parametrization's inverse
    before = meta.dense()
    (before * torch.randn(shape)).sum().backward()
    torch.optim.SGD(meta.parameters(), lr=0.1).step()
    assert not torch.allclose(meta.dense(), before)
    thin = meta.dense() if rows >= columns else meta.dense().mT
    assert_close(thin.mT @ thin, torch.eye(min(shape)))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs_forward_and_backward_or_raises(make, dtype):
    model, x = make().to(dtype), inputs(dtype=dtype)
    wrapped = any(isinstance(module, nn.RNNCellBase) for module in model.modules())
    if wrapped:
        with pytest.raises(IncompatibleError, match=r"Call \.float\(\)"):
            model(x)
        return
    y, state = model(x)
    assert y.dtype == dtype
    assert all(leaf.dtype in (torch.float32, torch.int64, dtype) for leaf in leaves(state))
    y.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
        if "parametrizations" not in name:  # torch.orthogonal has no finite derivative in half precision
            assert parameter.grad is None or parameter.grad.isfinite().all(), name


@every
def test_autocast_changes_results_by_rounding_only(make):
    model, x = make().float().eval(), inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = outputs(model, x)
    if "Spiking" not in repr(model):  # spikes are binary
        assert_close(y.float(), outputs(model, x), rtol=0.1, atol=0.05)


@every
def test_reset_parameters_draws_as_the_constructor_does(make):
    torch.manual_seed(5)
    model = make()
    torch.manual_seed(6)
    other = make()
    kept = [id(parameter) for parameter in other.parameters()]
    outputs(other, inputs())  # updates the statistics of batch norms
    torch.manual_seed(5)
    other.reset_parameters()
    for (name, one), (_, two) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(one, two), name
    assert [id(parameter) for parameter in other.parameters()] == kept


def test_a_cell_without_reset_parameters_is_named():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

        def forward(self, state, x):
            return torch.tanh(state @ self.weight + x)

    layer = adpt.Recurrent(cells.from_function(Step(), WIDTH, WIDTH))
    with pytest.raises(IncompatibleError, match=r"function\.weight belongs to no module"):
        layer.reset_parameters()
    layer = adpt.ADPTNet.paper(WIDTH)
    prune.l1_unstructured(layer.cell.directions[0].key_projection, "weight", 0.5)
    with pytest.raises(IncompatibleError, match="pruning"):
        layer.reset_parameters()


def test_a_read_out_of_another_size_is_reset():
    layer = adpt.Recurrent(cells.from_torch(nn.GRUCell(WIDTH, 5)), readout=projections.Dense())
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    assert not any(torch.equal(before[name], value) for name, value in layer.state_dict().items())


# Derivatives and transforms.


@every
def test_functional_calls_and_gradients_are_those_of_autograd(make):
    model, x = make().eval(), inputs(4)
    weights = dict(model.named_parameters())
    assert_close(torch.func.functional_call(model, weights, (x,))[0], outputs(model, x))
    found = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,))[0].square().sum())(weights)
    outputs(model, x).square().sum().backward()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(found[name], expected)


@every
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # from torch, in GRUCell
def test_vmap_over_sets_of_inputs_is_each_alone(make):
    model = make().eval()
    if any(isinstance(module, nn.LSTMCell) for module in model.modules()):
        pytest.skip("torch has no rule for its LSTM cell under vmap")
    x = torch.randn(2, 2, 4, WIDTH)
    assert_close(torch.func.vmap(partial(outputs, model))(x), torch.stack([outputs(model, part) for part in x]))
    _, states = torch.func.vmap(model)(x)
    assert type(states) is type(model(x[0])[1])


@every
def test_activation_checkpointing_changes_no_gradient(make):
    model, x = make().eval(), inputs(requires_grad=True)
    outputs(model, x).square().sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(partial(outputs, model), x, use_reentrant=False).square().sum().backward()
    assert_close(x.grad, expected)


@every
def test_hooks_see_inputs_outputs_and_gradients(make):
    model, x, seen = make(), inputs(requires_grad=True), []
    model.register_forward_pre_hook(lambda module, given: seen.append("pre"))
    model.register_forward_hook(lambda module, given, made: seen.append(made[0].shape))
    model.register_full_backward_hook(lambda module, to_input, to_output: seen.append("backward"))
    y = outputs(model, x)
    y.sum().backward()
    assert seen == ["pre", y.shape, "backward"]


# K and V: hooks, replaced modules, parametrizations.


def key_of(layer):
    return next(module.key_projection for module in layer.modules() if isinstance(module, directions.Directions))


@pytest.mark.parametrize("make", with_directions.values(), ids=with_directions)
def test_a_hook_on_k_is_called_and_may_change_what_it_returns(make):
    layer, x, calls = make().eval(), inputs(4), []
    expected = outputs(layer, x)
    handle = key_of(layer).register_forward_hook(lambda module, given, made: calls.append(made.shape))
    assert_close(outputs(layer, x), expected)
    assert calls
    handle.remove()
    turn = torch.linspace(-1.0, 2.0, made_size(layer))
    handle = key_of(layer).register_forward_hook(lambda module, given, made: made * turn)
    changed = outputs(layer, x)
    handle.remove()
    with torch.no_grad():
        same = copy.deepcopy(layer)
        replace_key(same, lambda key: nn.Sequential(key, Times(turn)))
    assert_close(changed, outputs(same, x))
    assert not torch.allclose(changed, expected)
    assert_close(outputs(layer, x), expected)


def made_size(layer):
    return key_of(layer).out_features


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def replace_key(layer, change):
    found = [module for module in layer.modules() if isinstance(module, directions.Directions)]
    for module in found[:1]:
        module.key_projection = change(module.key_projection)


class LowRankAdapter(nn.Module):
    """A frozen map plus a trainable low-rank map, as in LoRA."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("make", with_directions.values(), ids=with_directions)
def test_an_adapter_in_the_place_of_k_starts_as_k_and_learns(make):
    layer, x = make().eval(), inputs(4)
    expected = outputs(layer, x)
    replace_key(layer, LowRankAdapter)
    assert_close(outputs(layer, x), expected)
    outputs(layer, x).square().sum().backward()
    adapter = key_of(layer)
    assert adapter.up.weight.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in adapter.base.parameters())
    layer.half()
    assert outputs(layer, inputs(4, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize(
    "place",
    [
        "directions.0",
        "directions.0.value_projection",
        "directions.0.key_projection.projection",
        "directions.0.key_projection.projection.low_rank",
        "directions.0.key_norm",
    ],
)
def test_every_module_between_state_and_key_calls_its_hooks(place, caplog):
    _backends._logged.clear()
    layer = adpt.ADPTNet.paper(
        WIDTH,
        beta=1.0,
        direction=directions.FromState(layer_norm=True),
        projection=projections.LowParam((4, 2), 2, bias=True),
    )
    x, calls = inputs(4), []
    expected = outputs(layer, x)
    assert not caplog.records
    handle = layer.cell.get_submodule(place).register_forward_hook(lambda *_: calls.append(1))
    for options in ({}, {"solver": solvers.DEER()}, {"solver": solvers.ConvDEER()}, {"beta": torch.ones(3)}):
        calls.clear()
        assert_close(outputs(layer, x, **options), expected, rtol=1e-5, atol=1e-7)
        assert calls
    assert [record.getMessage().count("K or V has hooks") for record in caplog.records] == [1]
    handle.remove()
    calls.clear()
    assert torch.equal(outputs(layer, x), expected)
    assert not calls


def test_a_hook_on_one_head_is_called():
    layer, x, calls = adpt.ADPTNet.paper(WIDTH, beta=1.0, direction=directions.FromState(heads=2)), inputs(4), []
    expected = outputs(layer, x)
    key_of(layer).projections[1].register_forward_hook(lambda *_: calls.append(1))
    assert_close(outputs(layer, x), expected)
    assert calls


@pytest.mark.parametrize("solver", [solvers.DEER(), solvers.QuasiDEER(), solvers.KoopmanDEER()], ids=repr)
def test_solvers_find_the_states_of_a_layer_with_other_modules(solver):
    layer, x = adpt.ADPTNet.paper(WIDTH, beta=1.0), inputs(12)
    replace_key(layer, lambda key: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    assert_close(outputs(layer, x, solver=solver), outputs(layer, x), rtol=1e-5, atol=1e-7)


def test_a_norm_of_another_kind_in_place_of_the_layer_norm_is_called():
    layer, x = adpt.ADPTNet.paper(WIDTH, beta=1.0, direction=directions.FromState(layer_norm=True)), inputs(4)
    plane = layer.cell.directions[0]
    nn.init.normal_(plane.key_norm.bias)
    kept = outputs(layer, x)
    wide = nn.LayerNorm(WIDTH, eps=0.5)
    wide.load_state_dict(plane.key_norm.state_dict())
    for norm in (wide, nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False)):
        plane.key_norm = norm
        seen = outputs(layer, x)
        assert not torch.allclose(seen, kept)
        plane.key_norm.register_forward_hook(lambda module, given, made: None)
        assert torch.equal(outputs(layer, x), seen)


def test_a_module_of_the_wrong_size_in_the_place_of_v_is_named():
    layer = adpt.ADPTNet.paper(WIDTH, beta=1.0)
    layer.cell.directions[0].value_projection = nn.Linear(WIDTH, 5)
    with pytest.raises(InputError, match="Linear, used as K or V"):
        layer(inputs())


def test_bounds_of_maps_that_are_not_linear_are_rejected():
    layer = adpt.ADPTNet.paper(WIDTH, beta=1.0)
    replace_key(layer, lambda key: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    with pytest.raises(IncompatibleError, match="replaced by another module"):
        analysis.deviation_bounds(layer, torch.randn(2, WIDTH))


def test_an_adapter_in_the_place_of_b_and_of_the_read_out_is_called():
    layer, x = adpt.ADPTNet.paper(WIDTH, state_size=6, beta=1.0), inputs(80)
    expected = outputs(layer, x)
    layer.cell.drive.input_projection = LowRankAdapter(layer.cell.drive.input_projection)
    layer.readout = LowRankAdapter(layer.readout)
    assert_close(outputs(layer, x), expected)
    layer.half()(x.half())


def parametrize_key(change):
    def changed(layer):
        change(key_of(layer))
        return layer

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda key: parametrizations.weight_norm(key),
        lambda key: parametrizations.spectral_norm(key),
        lambda key: parametrizations.orthogonal(key),
        lambda key: nn.utils.weight_norm(key),
        lambda key: nn.utils.spectral_norm(key),
        lambda key: prune.l1_unstructured(key, "weight", 0.5),
    ],
    ids=["weight norm", "spectral norm", "orthogonal", "old weight norm", "old spectral norm", "pruned"],
)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning")
def test_a_parametrized_k_is_the_matrix_it_evaluates_to_and_learns(change, monkeypatch):
    layer, x = adpt.ADPTNet.paper(WIDTH, beta=1.0).eval(), inputs()
    key = key_of(layer)
    change(key)
    plain = adpt.ADPTNet.paper(WIDTH, beta=1.0)
    key(torch.zeros(1, WIDTH))  # lets hooks compute the weight
    plain.load_state_dict(
        {
            name: key.weight.detach() if name == "cell.directions.0.key_projection.weight" else layer.state_dict()[name]
            for name in plain.state_dict()
        }
    )
    assert_close(outputs(layer, x), outputs(plain, x))
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    for _ in range(2):  # a cached weight would fail at the second backward pass, or be stale
        optimizer.zero_grad()
        before = outputs(layer, x)
        before.square().sum().backward()
        optimizer.step()
    after = outputs(layer, x)
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    assert_close(after, outputs(layer, x))
    assert not torch.allclose(after, before)


def test_pruning_and_weight_norm_keep_the_compiled_kernel(caplog):
    _backends._logged.clear()
    layer = adpt.ADPTNet.paper(WIDTH, beta=1.0)
    prune.l1_unstructured(key_of(layer), "weight", 0.5)
    parametrizations.weight_norm(layer.cell.directions[0].value_projection)
    outputs(layer, inputs())
    assert not caplog.records
    assert (key_of(layer).weight == 0).sum() == WIDTH * WIDTH // 2


# Compilers and graphs.


def run_unchecked(*jobs):
    """Run jobs of unchecked.py in a separate process."""
    program = [sys.executable, "-m", "support.unchecked"]
    ended = subprocess.run([*program, *jobs], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_options_and_hooks_compile_sizes_are_dynamic_and_a_traced_root_is_named():
    run_unchecked(
        "options:real", "steps:real", "hooks:real", "batch norm:real", "dynamic:real", "dynamic:gated", "root:stack"
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("job", ["options", "fully", "dynamic", "root"])
def test_every_kind_compiles(job):
    run_unchecked(*[f"{job}:{name}" for name in all_kinds])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_packages_compiled_ahead_of_time_give_the_same_results():
    if _build.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    run_unchecked(*[f"package:{name}" for name in all_kinds])


def exported(model, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from torch, about its pytrees
        return torch.export.export(model, (x,), **options)


def reloaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@some
def test_an_exported_program_is_saved_and_loaded_with_its_state(make):
    model, x = make().eval(), inputs()
    y, state = reloaded(exported(model, x))(x)
    assert_close(y, outputs(model, x))
    assert_states_close(state, model(x)[1])


@pytest.mark.slow
@every_slowly
def test_every_exported_program_is_saved_and_loaded(make):
    model, x = make().eval(), inputs()
    y, state = reloaded(exported(model, x))(x)
    assert_close(y, outputs(model, x))
    assert_states_close(state, model(x)[1])


class Around(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, state=None):
        y, after = self.layer(2 * x, state)
        return y + 1, after


@every
def test_in_a_symbolic_trace_a_layer_is_one_node(make):
    model, x = Around(make()).eval(), inputs()
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["layer"]
    y, state = graph(x)
    assert torch.equal(y, outputs(model, x))
    assert_states_close(state, model(x)[1])


def test_a_traced_call_keeps_its_options():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = adpt.ADPTNet.paper(WIDTH, beta=1.0)

        def forward(self, x, lengths):
            return self.layer(x, lengths=lengths, solver=self.layer.solver if self.named else None)[0]

    model, x, lengths = Masked(), inputs(), torch.tensor([6, 3, 1])
    model.named = False
    assert torch.equal(torch.fx.symbolic_trace(model)(x, lengths), model(x, lengths))
    model.named = True
    with pytest.raises(IncompatibleError, match="Pass it to the layer instead"):
        torch.fx.symbolic_trace(model)


@every
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_rejected_with_what_to_pass(make, layout):
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=layout)
    model = make()
    with pytest.raises(InputError, match="to_padded_tensor"):
        model(nested)
    lengths = torch.tensor([len(row) for row in nested.unbind()])
    model(torch.nested.to_padded_tensor(nested, 0.0), lengths=lengths)


# Counting.


DENSE = ["real", "complex", "heads", "LayerNorm", "coupled", "Taylor", "linear", "gate and rope", "stack", "model"]


def counted(model, x, *, backward=False, **options):
    counter = FlopCounterMode(display=False)
    with counter:
        y = outputs(model, x, **options)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("axes", [{}, {"spectrum": spectra.S4DInv()}, {"memory": cells.SlowMemory()}], ids=str)
def test_the_counter_of_torch_counts_b_k_and_v(axes):
    layer = adpt.ADPTNet.paper(WIDTH, beta=1.0, **axes)
    once = 2 * 3 * 6 * WIDTH * WIDTH  # one matrix-vector product per step and sequence
    assert counted(layer, inputs()) == 3 * once
    assert counted(layer, inputs(requires_grad=True), backward=True) == 3 * 3 * once
    assert counted(layer, inputs(requires_grad=True), backward=True, adjoint=adjoints.Checkpointed()) == 11 * once


def test_the_counter_counts_a_backward_alone_and_heads_and_no_products_at_beta_zero():
    once = 2 * 3 * 6 * WIDTH * WIDTH
    y = outputs(adpt.ADPTNet.paper(WIDTH, beta=1.0), inputs(requires_grad=True))
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 6 * once
    assert counted(adpt.ADPTNet.paper(WIDTH, direction=directions.FromState(heads=2)), inputs()) == 2 * once
    assert counted(adpt.ADPTNet.paper(WIDTH, beta=0.0), inputs()) == once
    few = adpt.ADPTNet.paper(64, input_projection=projections.Identity(), projection=projections.LowRank(2))
    matrices = 2 * 2 * 64 * 2 * 64  # K and V as dense matrices for the derivative, once per call
    assert counted(few, torch.randn(3, 6, 64)) == 2 * 3 * 6 * 2 * (2 * 2 * 64) + matrices


@pytest.mark.parametrize("make", [all_kinds[name] for name in DENSE], ids=DENSE)
def test_the_counter_counts_the_same_with_and_without_the_kernel(make, monkeypatch):
    model, x = make().eval(), inputs()
    with torch.no_grad():
        by_kernel = counted(model, x)
        monkeypatch.setenv("ADPTNET_BACKEND", "reference")
        assert counted(model, x) == by_kernel > 0


# Optimizers.


@every
def test_weight_decay_is_for_matrices_and_never_for_timescales(make):
    model = make()
    groups = adpt.optim.param_groups(model, lr=1e-3, weight_decay=0.1)
    decayed = {id(p) for group in groups for p in group["params"] if group["weight_decay"]}
    unmarked = copy.deepcopy(model)
    for parameter in unmarked.parameters():  # as torch replaces parameters when it shards them
        parameter.__dict__.clear()
    assert [len(group["params"]) for group in adpt.optim.param_groups(unmarked, 1e-3, 0.1)] == [
        len(group["params"]) for group in groups
    ]
    owners = [module for module in model.modules() if isinstance(module, adpt.optim.DirectionOnly)]
    only_direction = {id(p) for module in owners for p in module.parameters()}  # K and V
    for name, parameter in model.named_parameters():
        asks = getattr(parameter, "_no_weight_decay", False) or id(parameter) in only_direction
        assert (id(parameter) in decayed) == (parameter.dim() > 1 and not asks), name
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    optimizer = torch.optim.AdamW(groups)
    outputs(model, inputs()).sum().backward()
    optimizer.step()  # a warning would be an error


@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)])
def test_an_optimizer_that_decays_timescales_warns_once(kind):
    layer = adpt.ADPTNet.paper(WIDTH, beta=adpt.TrainableBeta(1.0))
    frozen = copy.deepcopy(layer).requires_grad_(False)
    for each in (layer, frozen):
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
    optimizer = kind(layer.parameters())
    with pytest.warns(WeightDecayWarning, match=r"decay to 3 parameters that are marked as exempt.*param_groups"):
        optimizer.step()
    optimizer.step()
    kind(frozen.parameters()).step()  # no decay
    kind(nn.Linear(2, 2).parameters()).step()


def test_an_optimizer_without_decay_does_not_warn():
    torch.optim.Adam(adpt.ADPTNet.paper(WIDTH).parameters()).step()
    torch.optim.AdamW(adpt.ADPTNet.paper(WIDTH).parameters(), weight_decay=0.0).step()


@every
def test_a_moving_average_of_weights_follows_them(make):
    model = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    average.update_parameters(model)
    for one, two in zip(average.module.parameters(), model.parameters(), strict=True):
        assert_close(one, two - 0.005)
    assert outputs(average.eval(), inputs()).isfinite().all()


@every
def test_dynamic_quantization_replaces_the_linear_maps_and_not_the_recurrence(make):
    model, x = make().float().eval(), inputs(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that it will move
        quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is nn.Linear for module in quantised.modules())
    if "Spiking" not in repr(model):
        assert_close(outputs(quantised, x), outputs(model, x), rtol=0.1, atol=0.05)


def test_a_synchronized_batch_norm_is_still_over_batch_and_time():
    model, x = (
        all_kinds["model, batch norm"](),
        inputs(WIDTH),
    )  # as many steps as features, so that shapes do not reveal a wrong layout
    outputs(model, x)
    expected = outputs(model.eval(), x)
    assert_close(outputs(nn.SyncBatchNorm.convert_sync_batchnorm(model), x), expected)


# Names.


def test_the_number_of_layers_has_one_name_and_that_of_torch_is_accepted():
    assert adpt.Stack(SPEC, num_layers=2).spec == adpt.Stack(SPEC, depth=2).spec
    assert SequenceModel(SPEC, num_layers=2, vocabulary=5).spec == SequenceModel(SPEC, depth=2, vocabulary=5).spec
    with pytest.raises(SpecError, match=r"Stack\(depth=2, num_layers=3\)"):
        adpt.Stack(SPEC, 2, num_layers=3)
    with pytest.raises(SpecError, match="Pass vocabulary="):
        SequenceModel(SPEC, vocab_size=5)
    with pytest.raises(SpecError, match="depth must be an integer"):
        SequenceModel(SPEC, num_layers=0, vocabulary=5)
    with pytest.raises(SpecError, match="Perhaps you meant 'dropout'"):
        adpt.Stack(SPEC, drop_out=0.5)


# Processes.


class Features(torch.utils.data.Dataset):
    """Data set of outputs of a model, computed in the worker."""

    def __init__(self, model, x):
        self.model = model
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        with torch.no_grad():
            return outputs(self.model, self.x[i : i + 1])[0]


@pytest.mark.parametrize("name", ["real", "model"])
def test_a_model_runs_in_forked_workers_of_a_data_loader(name):
    model, x = all_kinds[name]().eval(), inputs(4)
    outputs(model, x).sum().backward()  # kernels and threads of this process are in use before the fork
    model.zero_grad()
    loader = torch.utils.data.DataLoader(
        Features(model, x), batch_size=3, num_workers=1, multiprocessing_context="fork"
    )
    (found,) = list(loader)
    assert_close(found, outputs(model, x).detach())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("job", ["ddp", "fsdp"])
def test_two_processes_take_the_step_of_one(job):
    run_unchecked(*[f"{job}:{name}" for name in all_kinds])


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("name", ["real", "coupled", "model"])
def test_a_model_runs_in_spawned_workers_of_a_data_loader(name, start):
    model, x = all_kinds[name]().eval(), inputs(4)
    data = Features(model, x)
    loader = torch.utils.data.DataLoader(data, batch_size=3, num_workers=2, multiprocessing_context=start)
    (found,) = list(loader)
    assert_close(found, outputs(model, x).detach())
