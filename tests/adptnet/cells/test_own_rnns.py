"""RNNs that users have: whole modules of torch, modules with the signature of its cells, states of several tensors."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from adptnet import Recurrent, analysis, cells, solvers, verify
from adptnet.cells.structure import differentiate
from adptnet.errors import IncompatibleError, InputError, SpecError

INPUT, HIDDEN, STEPS, BATCH = 4, 5, 17, 3
WHOLE = {
    "tanh": nn.RNN,
    "relu, 2 layers": lambda *sizes, **options: nn.RNN(*sizes, 2, nonlinearity="relu", **options),
    "gru": nn.GRU,
    "gru, 3 layers, batch first": lambda *sizes, **options: nn.GRU(*sizes, 3, batch_first=True, **options),
    "gru, 2 layers, no bias": lambda *sizes, **options: nn.GRU(*sizes, 2, bias=False, **options),
    "lstm": nn.LSTM,
    "lstm, 3 layers": lambda *sizes, **options: nn.LSTM(*sizes, 3, **options),
}
SOLVERS = [solvers.Sequential(), solvers.DEER(), solvers.QuasiDEER()]
whole = pytest.mark.parametrize("name", WHOLE)


def make(name, dtype=torch.float64):
    torch.manual_seed(0)
    return WHOLE[name](INPUT, HIDDEN, dtype=dtype)


def make_hidden(module, dtype=torch.float64):
    parts = [torch.randn(module.num_layers, BATCH, HIDDEN, dtype=dtype, requires_grad=True) for _ in range(2)]
    return tuple(parts) if isinstance(module, nn.LSTM) else parts[0]


def as_tuple(hidden):
    return hidden if isinstance(hidden, tuple) else (hidden,)


@whole
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_states_and_gradients_are_those_of_torch(name, solver, dtype):
    module = make(name, dtype)
    hidden = make_hidden(module, dtype)
    x = torch.randn(BATCH, STEPS, INPUT, dtype=dtype, requires_grad=True)
    given = x if module.batch_first else x.transpose(0, 1)
    expected, expected_final = module(given, hidden)
    expected = expected if module.batch_first else expected.transpose(0, 1)
    solution = solver(module, given, hidden)
    assert int(solution.result) <= 1
    final = solution.cell.unravel(solution.final)
    close = {"rtol": 0, "atol": 1e-6 if dtype is torch.float32 else 1e-12}
    assert_close(solution.outputs, expected, **close)
    assert type(final) is type(expected_final)
    for own, its in zip(as_tuple(final), as_tuple(expected_final), strict=True):
        assert_close(own, its, **close)
    weights = torch.randn_like(expected), torch.randn_like(as_tuple(expected_final)[0])
    leaves = [x, *as_tuple(hidden), *module.parameters()]
    found, right = (
        torch.autograd.grad([output, as_tuple(h)[0]], leaves, weights)
        for output, h in ((solution.outputs, final), (expected, expected_final))
    )
    for own, its in zip(found, right, strict=True):
        assert_close(own, its, rtol=0, atol=(1e-5 if dtype is torch.float32 else 1e-8) * float(its.abs().max()))


@whole
def test_jacobians_of_whole_modules_are_those_of_autograd(name):
    cell = cells.from_torch(make(name))
    state, x = torch.randn(2, 3, cell.state_size).double(), torch.randn(2, 3, INPUT).double()
    expected = differentiate(cell.step, state, x)
    assert_close(cell.jacobian(state, x), expected, rtol=0, atol=1e-12)
    assert_close(cell.jacobian_blocks(state, x).real, expected.diagonal(dim1=-2, dim2=-1), rtol=0, atol=1e-12)


@whole
def test_a_layer_around_a_whole_module_shows_its_outputs(name):
    module = make(name)
    layer = Recurrent(module)
    x, hidden = torch.randn(BATCH, STEPS, INPUT).double(), make_hidden(module)
    x = x if module.batch_first else x.transpose(0, 1)
    expected, expected_final = module(x, hidden)
    y, state = layer(x, hidden)
    assert layer.readout is None
    assert_close(y, expected, rtol=0, atol=1e-12)
    for own, its in zip(as_tuple(layer.cell.unravel(state.state)), as_tuple(expected_final), strict=True):
        assert_close(own, its, rtol=0, atol=1e-12)
    time = 1 if module.batch_first else 0
    _, before = layer(x.narrow(time, 0, STEPS - 1), hidden)
    last, after = layer.step(x.select(time, STEPS - 1), before)
    assert_close(last, expected.select(time, STEPS - 1), rtol=0, atol=1e-12)
    assert_close(after.state, state.state, rtol=0, atol=1e-12)
    one, _ = layer(x.select(1 - time, 0), tuple(h[:, 0] for h in hidden) if isinstance(hidden, tuple) else hidden[:, 0])
    assert_close(one, expected.select(1 - time, 0), rtol=0, atol=1e-12)


def test_resets_and_lengths_cut_sequences_of_a_whole_module():
    module = make("lstm, 3 layers")
    layer = Recurrent(module, batch_first=True)
    x, reset = torch.randn(BATCH, STEPS, INPUT).double(), torch.zeros(BATCH, STEPS, dtype=torch.bool)
    reset[:, 6] = True
    y, _ = layer(x, reset=reset, lengths=torch.tensor([STEPS, 6, 9]))
    for part in (slice(0, 6), slice(6, STEPS)):
        assert_close(y[0, part], module(x[0, part])[0], rtol=0, atol=1e-12)
    assert not y[1, 6:].any()
    assert_close(y[2, 6:9], module(x[2, 6:9])[0], rtol=0, atol=1e-12)


def test_analyses_take_whole_modules():
    module = make("gru, 2 layers, no bias")
    x = torch.randn(60, 1, INPUT).double()
    found = analysis.lyapunov_exponents(module, x)
    expected = analysis.lyapunov_exponents(cells.from_torch(module), x.transpose(0, 1))
    assert_close(found.exponents, expected.exponents, rtol=0, atol=0)
    assert found.exponents.shape[-1] == 2 * HIDDEN
    assert verify(module, x[:8]).ok


def test_parametrized_weights_are_used():
    module = parametrizations.weight_norm(make("gru"), "weight_hh_l0")
    x = torch.randn(STEPS, BATCH, INPUT).double()
    expected = module(x)[0].transpose(0, 1)
    for solver in SOLVERS:
        solution = solver(module, x)
        assert_close(solution.outputs, expected, rtol=0, atol=1e-12)
    weight = module.parametrizations.weight_hh_l0.original0
    found, right = (torch.autograd.grad(y.square().sum(), weight)[0] for y in (solution.outputs, module(x)[0]))
    assert_close(found, right, rtol=0, atol=1e-10)


class Doubled(nn.GRU):
    def forward(self, input, hx=None):
        return 2 * super().forward(input, hx)[0], None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.GRU(4, 5, bidirectional=True), "x.flip"),
        (lambda: nn.LSTM(4, 5, proj_size=2), "Build it without proj_size="),
        (lambda: Doubled(4, 5), "subclass"),
        (lambda: nn.Linear(4, 5), "input_size"),
        (lambda: lambda x, h: h, "from_function"),
        (lambda: nn.GRU, "got type"),
    ],
)
def test_modules_without_a_step_get_an_error_with_what_to_pass(build, message):
    with pytest.raises(IncompatibleError, match=message):
        cells.from_torch(build())


def test_dropout_between_layers_is_rejected_in_training_only():
    module = nn.GRU(INPUT, HIDDEN, 2, dropout=0.5)
    x = torch.randn(STEPS, BATCH, INPUT)
    with pytest.raises(IncompatibleError, match=r"Call \.eval\(\)"):
        solvers.DEER()(module, x)
    module.eval()
    assert_close(solvers.DEER()(module, x).outputs, module(x)[0].transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "bad", [(0,), (1, BATCH, HIDDEN), (2, BATCH, HIDDEN + 1), (BATCH, HIDDEN), (2, 1, BATCH, HIDDEN)]
)
def test_a_hidden_state_of_another_shape_is_rejected(bad):
    with pytest.raises(InputError, match=r"nn.GRU takes \(2, batch, 5\), or the flat \(batch, 10\)"):
        Recurrent(nn.GRU(INPUT, HIDDEN, 2))(torch.randn(STEPS, BATCH, INPUT), torch.zeros(bad))
    with pytest.raises(InputError, match=r"nn.LSTM takes a pair of \(2, batch, 5\)"):
        Recurrent(nn.LSTM(INPUT, HIDDEN, 2))(torch.randn(STEPS, BATCH, INPUT), torch.zeros(bad))


# Modules with the signature of a cell of torch


class MinimalGate(nn.Module):
    """A cell that a user wrote like nn.GRUCell."""

    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.gate, self.new = (nn.Linear(input_size + hidden_size, hidden_size) for _ in range(2))

    def forward(self, x, h=None):
        h = x.new_zeros(len(x), self.hidden_size) if h is None else h
        f = torch.sigmoid(self.gate(torch.cat((x, h), -1)))
        return (1 - f) * h + f * torch.tanh(self.new(torch.cat((x, f * h), -1)))


class Peephole(nn.Module):
    """A cell with two states, of different sizes, and no default for them."""

    input_size = INPUT

    def __init__(self, needs_state):
        super().__init__()
        self.inner, self.outer, self.needs_state = nn.Linear(INPUT + 3, HIDDEN), nn.Linear(HIDDEN, 3), needs_state

    def forward(self, x, hidden=None):
        if hidden is None and not self.needs_state:
            hidden = x.new_zeros(len(x), 3), x.new_zeros(len(x), HIDDEN)
        h, c = hidden
        c = 0.8 * c + 0.2 * torch.tanh(self.inner(torch.cat((x, h), -1)))
        return torch.tanh(self.outer(c)), c


def run_loop(module, x, hidden=None):
    """Run a module of torch's signature step by step on (batch, time, features)."""
    states = []
    for t in range(x.shape[1]):
        hidden = module(x[:, t], hidden)
        states.append(as_tuple(hidden))
    return tuple(torch.stack(parts, 1) for parts in zip(*states, strict=True))


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda: (m := MinimalGate(INPUT, HIDDEN).double(), cells.from_torch(m)),
        lambda: (m := Peephole(False).double(), cells.from_torch(m)),
        lambda: (m := Peephole(True).double(), cells.from_torch(m, state=(3, HIDDEN))),
        lambda: (m := nn.LSTMCell(INPUT, HIDDEN).double(), cells.from_torch(m)),
    ],
    ids=["one tensor", "two tensors", "two tensors, sizes given", "LSTMCell"],
)
def test_any_module_with_the_signature_of_a_cell_runs(wrap, solver):
    torch.manual_seed(0)
    module, cell = wrap()
    x = torch.randn(BATCH, STEPS, INPUT).double().requires_grad_()
    sizes = [part.shape[-1] for part in as_tuple(cell.unravel(torch.zeros(1, cell.state_size)))]
    hidden = tuple(torch.randn(BATCH, size).double().requires_grad_() for size in sizes)
    given = hidden if len(hidden) > 1 else hidden[0]
    expected = run_loop(module, x, given)
    solution = solver(cell, x, given)
    states = as_tuple(cell.unravel(solution.states))
    for own, its in zip(states, expected, strict=True):
        assert_close(own, its, rtol=0, atol=1e-10)
    assert_close(Recurrent(cell)(x, given)[0], expected[0], rtol=0, atol=1e-12)  # shows h
    leaves = [x, *hidden, *module.parameters()]
    found, right = (torch.autograd.grad(sum(p.square().sum() for p in parts), leaves) for parts in (states, expected))
    for own, its in zip(found, right, strict=True):
        assert_close(own, its, rtol=0, atol=1e-8)
    assert {id(p) for p in cell.parameters()} == {id(p) for p in module.parameters()}


def test_modules_whose_state_cannot_be_found_are_explained():
    with pytest.raises(IncompatibleError, match=r"Pass the sizes of the hidden state, e\.g\. state=64"):
        cells.from_torch(Peephole(True))
    with pytest.raises(IncompatibleError, match="next hidden state"):
        cells.from_torch(Returning(), input_size=INPUT)


class Returning(nn.Module):
    """A module that returns no state."""

    def forward(self, x, h=None):
        return [1.0]


# Functions with several tensors as state


def leaky(state, x):
    """A step with a dictionary as state, one part of which is a matrix."""
    h = torch.tanh(state["h"] + 0.5 * state["m"].sum(-1) + x[:, :2])
    return {"h": 0.9 * h, "m": 0.7 * state["m"] + 0.1 * torch.einsum("bi,bj->bij", h, x[:, :3])}


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_a_dictionary_is_a_state_and_is_returned(solver):
    cell = cells.from_function(leaky, state={"h": torch.full((2,), 0.3), "m": torch.zeros(2, 3)}, input_size=INPUT)
    x = torch.randn(BATCH, STEPS, INPUT).double().requires_grad_()
    state, found = {"h": torch.full((BATCH, 2), 0.3).double(), "m": torch.zeros(BATCH, 2, 3).double()}, []
    for t in range(STEPS):
        state = leaky(state, x[:, t])
        found.append(state)
    solution = solver(cell, x)
    states, final = cell.unravel(solution.states), cell.unravel(solution.final)
    assert list(states) == ["h", "m"]
    expected = {name: torch.stack([s[name] for s in found], 1) for name in state}
    for name in states:
        assert_close(states[name], expected[name], rtol=0, atol=1e-10)
        assert_close(final[name], expected[name][:, -1], rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad(s["m"].square().sum() + s["h"].sum(), x)[0] for s in (states, expected)]
    assert_close(*gradients, rtol=0, atol=1e-8)
    layer = Recurrent(cell)
    half, middle = layer(x[:, :8])
    rest, _ = layer(x[:, 8:], cell.unravel(middle.state))
    assert_close(torch.cat((half, rest), 1), layer(x)[0], rtol=0, atol=1e-12)
    assert copy.deepcopy(layer)(x)[0].shape == (BATCH, STEPS, 8)


def test_sizes_describe_a_state_that_starts_at_zero():
    def step(state, x):
        return {"h": torch.tanh(state["c"] + x), "c": 0.5 * state["c"] + state["h"]}

    cell = cells.from_function(step, state={"h": 4, "c": 4}, input_size=4)
    states = cell.unravel(solvers.DEER()(cell, torch.ones(2, 6, 4)).states)
    assert {name: tuple(part.shape) for name, part in states.items()} == {"h": (2, 6, 4), "c": (2, 6, 4)}
    assert_close(states["h"][:, 0], torch.ones(2, 4).tanh())
    assert not states["c"][:, 0].any()


def test_parameters_that_depend_on_the_input_are_computed_for_all_steps_at_once():
    class Selective(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.decay, self.calls = nn.Linear(INPUT, 9), nn.Linear(INPUT, 3), 0

        def prepare(self, x):
            self.calls += 1
            return {"weight": self.weight(x).unflatten(-1, (3, 3)) / 3, "keep": self.decay(x).sigmoid()}

        def step(self, state, given):
            mixed = (given["weight"] @ state.unsqueeze(-1)).squeeze(-1)
            return given["keep"] * state + (1 - given["keep"]) * torch.tanh(mixed + 1)

    torch.manual_seed(0)
    module = Selective().double()
    cell = cells.from_function(module.step, 3, INPUT, prepare=module.prepare)
    module.calls = 0
    x = torch.randn(BATCH, STEPS, INPUT).double().requires_grad_()
    given, state, expected = module.prepare(x), torch.zeros(BATCH, 3).double(), []
    for t in range(STEPS):
        state = module.step(state, {name: part[:, t] for name, part in given.items()})
        expected.append(state)
    expected = torch.stack(expected, 1)
    for solver in SOLVERS:
        module.calls = 0
        states = solver(cell, x).states
        assert module.calls == 1
        assert_close(states, expected, rtol=0, atol=1e-10)
        leaves = [x, *module.parameters()]
        for own, its in zip(
            torch.autograd.grad(states.square().sum(), leaves),
            torch.autograd.grad(expected.square().sum(), leaves, retain_graph=True),
            strict=True,
        ):
            assert_close(own, its, rtol=0, atol=1e-8)


def moving_average(x):
    return (x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]) / 2


@pytest.mark.parametrize(
    "prepare",
    [
        moving_average,
        lambda x: {"u": x, "before": (moving_average(x), x)},
        lambda x: x.flip(1),
        lambda x: x - x.mean(0),
        lambda x: x + torch.arange(x.shape[1]).unsqueeze(-1),
        lambda x: torch.cat((x[..., :1].cumsum(1), 1e6 * x[..., 1:]), -1),
        lambda x: x.cumsum(1) > 0,
        lambda x: nn.functional.one_hot(x.long().cumsum(1).clamp(0, 9), 10),
    ],
    ids=["causal", "one of a pytree", "reversed", "batch", "index", "small channel", "bool", "integers"],
)
def test_prepare_must_treat_each_step_on_its_own(prepare):
    with pytest.raises(InputError, match="couples steps"):
        cells.from_function(leaky, 3, 3, prepare=prepare)


class NormalizedInput(nn.Module):
    """Training differs from evaluation: dropout, and a batch norm over sequences and steps."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout()

    def prepare(self, x):
        return self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2) if x.shape[1] > 1 or not self.training else x)

    def step(self, state, given):
        return 0.5 * state + given


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x @ torch.full((3, 3), 0.3),
        lambda x: x + torch.randn_like(x),
        lambda x: x / 0.0,
        lambda x: nn.functional.one_hot(x.long(), 2).flatten(2),
        lambda x: {"a": x.sin(), "b": (x > 0, x.sort(-1).values)},
        nn.LayerNorm(3),
    ],
    ids=["product", "random", "not finite", "indices", "pytree", "module"],
)
def test_functions_of_one_step_are_accepted_by_prepare(prepare):
    assert cells.from_function(leaky, 3, 3, prepare=prepare).input_size == 3


def test_the_test_of_prepare_leaves_modes_and_statistics_unchanged():
    module = NormalizedInput()
    module.drop.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    cells.from_function(module.step, 3, 3, prepare=module.prepare)
    assert module.norm.training
    assert not module.drop.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cells.from_function(leaky), "needs the size of the state"),
        (lambda: cells.from_function(leaky, 3, state=3), "needs the size of the state"),
        (lambda: cells.from_function(leaky, state={}), "holds no tensors"),
        (lambda: cells.from_function(leaky, state={"h": 0}), "must be an integer"),
        (lambda: cells.from_function(leaky, 3, prepare=lambda x: x), "Pass input_size="),
        (lambda: cells.from_function(leaky, 3, 4, prepare=lambda x: 3.0), "prepare must return tensors"),
        (lambda: cells.from_function(nn.GRU(3, 3), 3), "from_torch"),
        (lambda: solvers.DEER()(cells.from_function(leaky, state={"a": 3}), torch.ones(1, 2, 4), [1]), "this cell has"),
        (lambda: solvers.DEER()(nn.Linear(3, 3), torch.ones(1, 2, 3)), "from_function"),
    ],
)
def test_wrong_arguments_are_explained(call, message):
    with pytest.raises((IncompatibleError, InputError, SpecError), match=message):
        call()


def test_a_step_that_returns_another_structure_is_explained():
    cell = cells.from_function(lambda s, x: {"h": s["h"]}, state={"h": 2, "c": 2}, input_size=2)
    with pytest.raises(InputError, match=r"the state is \{'h': ·\}; this cell has \{'h': ·, 'c': ·\}"):
        solvers.Sequential()(cell, torch.ones(1, 3, 2))
