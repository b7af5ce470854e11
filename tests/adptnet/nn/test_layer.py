"""The interface of the layer: results do not depend on chunking, packing, layout or dtype."""

import copy

import pytest
import torch
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

from adptnet import ADPTNet, ADPTState, Recurrent, TrainableBeta, adjoints, analysis, cells, drive, solvers, spectra
from adptnet.cells.structure import compute_jacobian, compute_jacobian_blocks
from adptnet.optim import param_groups
from support.members import build, legal, name_of

every_layer = pytest.mark.parametrize("axes", legal, ids=name_of)


def close(found, expected):
    assert_close(found, expected, atol=1e-12, rtol=1e-12)


def layer_and_input(axes, batch=3, steps=11):
    layer = build(axes)
    return layer, torch.randn(batch, steps, layer.width)


@every_layer
def test_chunks_that_carry_the_state_are_the_whole(axes):
    layer, x = layer_and_input(axes)
    whole, final = layer(x)
    state, pieces = None, []
    for piece in x.split([1, 4, 2, 4], 1):
        y, state = layer(piece, state)
        pieces.append(y)
    close(torch.cat(pieces, 1), whole)
    close(state.state, final.state)
    assert state.position.tolist() == final.position.tolist() == [11, 11, 11]


@every_layer
def test_steps_are_the_whole(axes):
    layer, x = layer_and_input(axes)
    whole, final = layer(x)
    state, steps = None, []
    for t in range(x.shape[1]):
        y, state = layer.step(x[:, t], state)
        steps.append(y)
    close(torch.stack(steps, 1), whole)
    close(state.state, final.state)


@every_layer
def test_a_ragged_batch_is_each_sequence_alone(axes):
    layer, x = layer_and_input(axes)
    lengths = torch.tensor([11, 1, 7])
    x[1, 1:], x[2, 7:] = torch.nan, torch.inf  # padding must not affect the result
    y, final = layer(x, lengths=lengths)
    for i, n in enumerate(lengths.tolist()):
        alone, end = layer(x[i : i + 1, :n])
        close(y[i, :n], alone[0])
        assert not y[i, n:].any()
        close(final.state[i], end.state[0])
        assert final.position[i] == n
    gradients = torch.autograd.grad(y.sum(), [p for p in layer.parameters() if p.requires_grad], allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)


@every_layer
def test_a_reset_begins_a_new_sequence(axes):
    layer, x = layer_and_input(axes, batch=2)
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[0, 4], reset[1, 0], reset[1, 10] = True, True, True
    carried = layer(torch.randn(2, 3, layer.width))[1]
    y, final = layer(x, carried, reset=reset)
    before, _ = layer(x[:1, :4], ADPTState(carried.state[:1], carried.position[:1]))
    after, end = layer(x[:1, 4:])
    close(y[:1], torch.cat((before, after), 1))
    close(final.state[0], end.state[0])
    close(y[1, :10], layer(x[1:, :10])[0][0])
    close(y[1, 10:], layer(x[1:, 10:])[0][0])
    assert final.position.tolist() == [7, 1]


@every_layer
def test_packed_rows_are_each_sequence_alone(axes):
    layer, x = layer_and_input(axes, batch=1)
    bounds = torch.tensor([0, 3, 4, 11])
    y, final = layer(x, cu_seqlens=bounds)
    for i in range(3):
        alone, end = layer(x[:, bounds[i] : bounds[i + 1]])
        close(y[:, bounds[i] : bounds[i + 1]], alone)
        close(final.state[i : i + 1], end.state)
    again, _ = layer(x, final, cu_seqlens=bounds)
    close(again[:, :3], layer(x[:, :3], ADPTState(final.state[:1], final.position[:1]))[0])


@pytest.mark.parametrize("sort", [True, False])
def test_a_packed_sequence_returns_packed(sort):
    layer, x = layer_and_input(legal[0])
    lengths = torch.tensor([11, 7, 2] if sort else [2, 11, 7])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sort)
    y, final = layer(packed)
    padded, found = pad_packed_sequence(y, batch_first=True)
    expected, end = layer(x, lengths=lengths)
    assert found.tolist() == lengths.tolist()
    close(padded, expected)
    close(final.state, end.state)


def test_time_major_and_single_sequences():
    layer, x = layer_and_input(legal[0])
    turned = ADPTNet.paper(**legal[0], batch_first=False)
    turned.load_state_dict(layer.state_dict())
    reset = torch.rand(3, 11) < 0.3
    expected, end = layer(x, reset=reset)
    y, final = turned(x.transpose(0, 1), reset=reset.T)
    close(y.transpose(0, 1), expected)
    close(final.state, end.state)
    close(turned.solve(x.transpose(0, 1), reset=reset.T).states, layer.solve(x, reset=reset).states)
    alone, state = layer(x[0])
    close(alone, layer(x[:1])[0][0])
    assert state.state.shape == (layer.state_size,)
    assert state.position.shape == ()
    again, _ = layer(x[1], state)
    close(again, layer(torch.cat((x[0], x[1])))[0][11:])
    stepped, state = layer.step(x[0, 0])
    close(stepped, alone[0])


@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (3, 0), (0, 0)])
def test_no_batch_one_step_and_no_steps(shape):
    layer = build(legal[0])
    x = torch.randn(*shape, layer.width)
    y, final = layer(x)
    assert y.shape == x.shape
    assert final.state.shape == (shape[0], layer.state_size)
    assert final.position.tolist() == [shape[1]] * shape[0]
    assert layer.solve(x).result == solvers.Result.CONVERGED


def test_gradients_flow_into_the_given_state_and_out_of_the_returned_one():
    layer, x = layer_and_input(legal[0])
    start = torch.randn(3, layer.state_size, requires_grad=True)
    _, middle = layer(x[:, :5], layer.initial_state(3)._replace(state=start))
    _, final = layer(x[:, 5:], middle)
    (found,) = torch.autograd.grad(final.state.sum(), start)
    _, whole = layer(x, layer.initial_state(3)._replace(state=start))
    (expected,) = torch.autograd.grad(whole.state.sum(), start)
    close(found, expected)
    assert found.any()
    assert not middle.detach().state.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_have_a_float32_state(dtype):
    layer = ADPTNet.paper(6, beta=1.0, state_size=8, dtype=torch.float32)
    x = torch.randn(2, 9, 6).to(dtype)
    y, final = layer(x)
    assert (y.dtype, final.state.dtype) == (dtype, torch.float32)
    assert_close(y, layer(x.float())[0].to(dtype))
    assert layer.step(x[:, 0])[0].dtype == dtype


def test_low_precision_parameters_still_compute_in_float32():
    layer = ADPTNet.paper(6, beta=1.0, dtype=torch.bfloat16)
    x = torch.randn(2, 9, 6, dtype=torch.bfloat16)
    y, final = layer(x)
    assert (y.dtype, final.state.dtype) == (torch.bfloat16, torch.float32)
    close(final.state, copy.deepcopy(layer).float()(x.float())[1].state)


def test_under_autocast_the_recurrence_stays_in_float32():
    layer = ADPTNet.paper(6, beta=1.0, state_size=8, dtype=torch.float32)
    x = torch.randn(2, 9, 6, dtype=torch.float32)
    plain, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, final = layer(x)
    assert final.state.dtype == torch.float32
    assert torch.equal(y, plain)


@every_layer
def test_copies_and_casts_keep_the_values(axes):
    layer, x = layer_and_input(axes)
    expected = layer(x)[0]
    close(copy.deepcopy(layer)(x)[0], expected)
    twin = layer.spec.build()
    twin.load_state_dict(layer.state_dict())
    close(twin(x)[0], expected)
    single = copy.deepcopy(layer).to(torch.float32)
    if axes.get("beta", 0.125) in (0, 0.125, 0.5):
        assert_close(single(x.float())[0].double(), expected, atol=1e-4, rtol=1e-3)
    assert single(x.float())[0].dtype == torch.float32


def test_the_state_dict_holds_no_state():
    layer, x = layer_and_input(legal[0])
    keys = set(layer.state_dict())
    layer(x)
    layer.step(x[:, 0])
    assert set(layer.state_dict()) == keys == {name for name, _ in layer.named_parameters()}


@pytest.mark.parametrize("adjoint", [adjoints.Unrolled(), adjoints.Checkpointed(), adjoints.Checkpointed(3)], ids=repr)
def test_adjoints_change_no_gradient(adjoint):
    layer, x = layer_and_input(legal[0])
    reset = torch.rand(3, 11) < 0.3
    parameters = list(layer.parameters())
    plain = torch.autograd.grad(layer(x, reset=reset)[0].square().sum(), parameters)
    found = torch.autograd.grad(layer(x, reset=reset, adjoint=adjoint)[0].square().sum(), parameters)
    for a, b in zip(found, plain, strict=True):
        close(a, b)


def test_a_solution_reports_its_solver():
    layer, x = layer_and_input(legal[0])
    solution = layer.solve(x, lengths=torch.tensor([11, 4, 6]))
    assert solution.result is solvers.Result.CONVERGED
    assert solution.iterations.tolist() == [1, 1, 1]
    assert solution.residual.tolist() == [0, 0, 0]
    assert solution.converged_steps.tolist() == [11, 4, 6]
    close(solution.final[1], solution.states[1, 3])
    assert repr(solution).startswith("Solution(CONVERGED, states (3, 11, 6), by Sequential()")


def test_a_non_finite_solution_is_reported_with_its_step():
    cell = cells.from_function(lambda state, drive: 1e200 * (state + drive), state_size=2)
    solution = solvers.Sequential()(cell, torch.ones(2, 5, 2) * torch.tensor([1.0, 0.0])[:, None, None])
    assert solution.result is solvers.Result.NON_FINITE
    assert solution.results.tolist() == [solvers.Result.NON_FINITE, solvers.Result.CONVERGED]
    assert solution.converged_steps.tolist() == [1, 5]
    assert solution.residual[0].isnan()


def test_vmap_over_a_batch_of_layers_inputs():
    layer, x = layer_and_input(legal[0])
    mapped = torch.func.vmap(lambda row: layer(row)[0])(x)
    close(mapped, layer(x)[0])


@pytest.mark.parametrize("kind", [torch.nn.GRUCell, torch.nn.RNNCell, torch.nn.LSTMCell])
def test_torch_cells_are_torch_layers(kind):
    layer = {torch.nn.GRUCell: torch.nn.GRU, torch.nn.RNNCell: torch.nn.RNN, torch.nn.LSTMCell: torch.nn.LSTM}[kind](
        4, 5, batch_first=True
    )
    cell = kind(4, 5)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
    x = torch.randn(3, 7, 4)
    solution = solvers.Sequential()(cells.from_torch(cell), x)
    close(solution.states[..., :5], layer(x)[0])
    expected = cells.from_torch(cell).jacobian(torch.randn(2, solution.states.shape[-1]), torch.randn(2, 4))
    assert expected.shape == (2, solution.states.shape[-1], solution.states.shape[-1])


def test_a_function_is_a_cell():
    weight = torch.randn(4, 4) / 3
    cell = cells.from_function(lambda state, drive: (state @ weight.T + drive).tanh(), state_size=4)
    x = torch.randn(2, 6, 4)
    state = torch.zeros(2, 4)
    for t in range(6):
        state = (state @ weight.T + x[:, t]).tanh()
    close(solvers.Sequential()(cell, x).final, state)
    jacobian = compute_jacobian(cell, state, x[:, 0])
    slope = 1 - (state @ weight.T + x[:, 0]).tanh().square()
    close(jacobian, slope.unsqueeze(-1) * weight)
    close(compute_jacobian_blocks(cell, state, x[:, 0]).real, slope * weight.diagonal())


def test_a_function_of_a_module_owns_its_parameters():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(6, 3)

        def forward(self, state, drive):
            return self.inner(torch.cat((state, drive), -1)).sigmoid()

    cell = cells.from_function(Gated(), state_size=3, input_size=3)
    assert [name for name, _ in cell.named_parameters()] == ["function.inner.weight", "function.inner.bias"]
    assert solvers.Sequential()(cell, torch.randn(2, 4, 3)).states.shape == (2, 4, 3)


def test_the_relu_rnn_is_torchs():
    layer = Recurrent(cells.ReLURNN(5))
    twin = torch.nn.RNN(5, 5, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        twin.weight_hh_l0.copy_(layer.cell.recurrent.weight)
        twin.weight_ih_l0.copy_(layer.cell.input_weight)
        twin.bias_ih_l0.copy_(layer.cell.bias)
        twin.bias_hh_l0.zero_()
    x = torch.randn(2, 9, 5)
    close(layer(x)[0], twin(x)[0])


def test_optimizer_marks_are_on_the_spectrum_and_beta():
    layer = ADPTNet.paper(6, beta=TrainableBeta(1.0))
    marked = {name for name, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"cell.spectrum.log_decay", "cell.spectrum.log_dt", "cell.beta.parameter"}
    copied = copy.deepcopy(layer).double()
    assert {name for name, p in copied.named_parameters() if getattr(p, "_no_weight_decay", False)} == marked
    groups = param_groups(layer, lr=1e-3, weight_decay=0.1)
    decay_of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decay_of) == len(list(layer.parameters()))
    for name, parameter in layer.named_parameters():
        spared = name in marked or ".directions." in name  # of K and V only the direction counts
        assert decay_of[id(parameter)] == (0.0 if spared else 0.1), name


@pytest.mark.parametrize("gain", [drive.EMA(), drive.LRU(tied=False), drive.ZOH()], ids=str)
def test_long_inputs_are_projected_and_scaled_by_one_product(gain, monkeypatch):
    layer = ADPTNet.paper(6, state_size=8, beta=1.0, spectrum=spectra.S4DInv(), gain=gain)
    x = torch.randn(3, 40, 6, requires_grad=True)

    def found():
        y = layer(x)[0]
        return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    assert layer.cell.drive.project_and_scale(x, layer.cell.spectrum) is not None
    at_once = found()
    monkeypatch.setattr(drive.Drive, "project_and_scale", lambda *arguments: None)
    for one, other in zip(at_once, found(), strict=True):
        close(one, other)


def test_hooks_and_parametrizations_of_the_projection_run_for_long_inputs_too():
    layer, x, seen = ADPTNet.paper(6, beta=1.0), torch.randn(3, 40, 6), []
    layer.cell.drive.input_projection.register_forward_hook(lambda *call: seen.append(1))
    layer(x)
    assert seen == [1]
    pruned = ADPTNet.paper(6, beta=1.0)
    prune.l1_unstructured(pruned.cell.drive.input_projection, "weight", 0.5)
    for _ in range(2):  # its hook recomputes the weight in every call
        pruned(x)[0].sum().backward()


def test_autocast_does_not_affect_the_drive():
    layer, x = ADPTNet.paper(6, beta=1.0, dtype=torch.float32), torch.randn(1, 80, 6, dtype=torch.float32)
    plain = analysis.lyapunov_exponents(layer, x).exponents
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = analysis.lyapunov_exponents(layer, x).exponents
    assert_close(found, plain, atol=0.02, rtol=0)
