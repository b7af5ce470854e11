"""Wrapped cells of `torch.nn`: closed-form Jacobians and fused runs against the module itself."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

from adptnet import cells, solvers
from adptnet.cells.structure import differentiate
from support.kernels import run_python

KINDS = {
    "tanh": lambda *sizes, **options: nn.RNNCell(*sizes, **options),
    "relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}
kinds = pytest.mark.parametrize("kind", KINDS)
EXACT = {"rtol": 0, "atol": 1e-12}


def make(kind, inputs=5, size=7, **options):
    torch.manual_seed(0)
    return cells.from_torch(KINDS[kind](inputs, size, **{"dtype": torch.float64, **options}))


def loop(cell, x, state, reset=None, lengths=None):
    """Run a loop over the module, the reference for `scan`; states past the end are zero."""
    states, entering = [], state
    for t in range(x.shape[1]):
        before = entering if reset is None else torch.where(reset[:, t, None], 0.0, entering)
        entering = cell.step(before, x[:, t])
        states.append(entering)
    states = torch.stack(states, 1)
    return (
        states if lengths is None else torch.where((torch.arange(x.shape[1]) < lengths[:, None])[..., None], states, 0)
    )


# Jacobians


@kinds
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "size"), [(5, 7), (3, 1), (1, 13)])
def test_the_jacobian_is_that_of_autograd(kind, bias, inputs, size):
    cell = make(kind, inputs, size, bias=bias)
    state, x = torch.randn(2, 3, cell.state_size).double(), torch.randn(2, 3, inputs).double()
    expected = torch.func.vmap(torch.func.vmap(torch.func.jacrev(cell.step)))(state, x)
    assert_close(cell.jacobian(state, x), expected, **EXACT)
    assert_close(cell.jacobian_blocks(state, x).real, expected.diagonal(dim1=-2, dim2=-1), **EXACT)
    assert cell.jacobian_blocks(state, x).imag is None
    assert_close(cell.jacobian(state[0, 0], x[0, 0]), expected[0, 0], **EXACT)


@kinds
def test_gradients_of_the_jacobian_are_those_of_autograd(kind):
    cell = make(kind)
    state, x = torch.randn(4, cell.state_size).double().requires_grad_(), torch.randn(4, 5).double().requires_grad_()
    leaves = [state, x, *cell.parameters()]
    weight = torch.randn(4, cell.state_size, cell.state_size).double()
    slow = torch.func.vmap(torch.func.jacrev(cell.step))(state, x)
    for fast, reference in (
        (cell.jacobian(state, x), slow),
        (cell.jacobian_blocks(state, x).real, slow.diagonal(dim1=1, dim2=2)),
    ):
        some = weight if fast.dim() == 3 else weight[..., 0]
        found, expected = (
            torch.autograd.grad((y * some).sum(), leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
            for y in (fast, reference)
        )
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, **EXACT)


@kinds
def test_jacobians_are_computed_inside_transforms(kind):
    cell = make(kind)
    state, x = torch.randn(4, cell.state_size).double(), torch.randn(4, 5).double()
    assert_close(torch.func.vmap(cell.jacobian)(state, x), cell.jacobian(state, x), **EXACT)
    tangent = torch.randn_like(state)
    found = torch.func.jvp(lambda s: cell.jacobian(s, x), (state,), (tangent,))[1]
    generic = torch.func.jvp(lambda s: differentiate(cell.step, s, x), (state,), (tangent,))[1]
    assert_close(found, generic, **EXACT)


# Sequential runs


@kinds
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_fused_run_is_the_loop_over_the_module(kind, bias, resets, padded):
    cell = make(kind, bias=bias)
    x, state = torch.randn(4, 11, 5).double(), torch.randn(4, cell.state_size).double()
    x, state = x.requires_grad_(), state.requires_grad_()
    reset = torch.rand(4, 11) < 0.3 if resets else None
    if reset is not None:
        reset[0], reset[1, 0], reset[2] = False, True, True
    lengths = torch.tensor([11, 1, 7, 4]) if padded else None
    found, expected = cell.scan(x, state, reset=reset, lengths=lengths), loop(cell, x, state, reset, lengths)
    assert found is not None
    assert_close(found, expected, **EXACT)
    leaves, weight = [x, state, *cell.parameters()], torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * weight).sum(), leaves, create_graph=True) for y in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, **EXACT)
    seconds = [torch.autograd.grad(sum(g.square().sum() for g in each), leaves) for each in gradients]
    for a, b in zip(*seconds, strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-12)


@kinds
def test_a_fused_run_in_single_precision_is_the_loop_over_the_module(kind):
    cell = make(kind, 9, 17, dtype=torch.float32)
    x, state = (torch.randn(*shape).float().requires_grad_() for shape in ((3, 40, 9), (3, cell.state_size)))
    found, expected = cell.scan(x, state), loop(cell, x, state)
    assert_close(found, expected, rtol=0, atol=2e-6)
    leaves = [x, state, *cell.parameters()]
    gradients = [torch.autograd.grad(y.square().sum(), leaves, create_graph=True) for y in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4)
    seconds = [torch.autograd.grad(each[0].square().sum(), leaves) for each in gradients]
    for a, b in zip(*seconds, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    with torch.no_grad():
        assert_close(cell.scan(x, state), expected, rtol=0, atol=2e-6)


@kinds
def test_padding_affects_neither_states_nor_gradients(kind):
    cell = make(kind)
    x, lengths = torch.randn(3, 8, 5).double(), torch.tensor([8, 3, 5])
    x[1, 3:] = torch.nan
    solution = solvers.Sequential()(cell, x.requires_grad_(), lengths=lengths)
    assert (solution.states[1, 3:] == 0).all()
    assert_close(solution.states[1, :3], loop(cell, x[1:2, :3], cell.initial_state(1))[0], **EXACT)
    assert_close(solution.final[1], solution.states[1, 2], rtol=0, atol=0)
    gradients = torch.autograd.grad(solution.states.sum(), [x, *cell.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@kinds
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rules for its cells
def test_transforms_run_the_loop(kind):
    cell = make(kind)
    x, state = torch.randn(3, 6, 5).double(), torch.randn(3, cell.state_size).double()

    def run(x):
        return solvers.Sequential()(cell, x, state[: len(x)]).states

    expected = loop(cell, x, state)
    assert_close(run(x), expected, **EXACT)
    if kind != "lstm":  # torch has no batching rule for nn.LSTMCell
        mapped = torch.func.vmap(lambda row: solvers.Sequential()(cell, row).states)(x)
        assert_close(mapped, loop(cell, x, torch.zeros_like(state)), **EXACT)
    tangent = torch.randn_like(x)
    found = torch.func.jvp(run, (x,), (tangent,))[1]
    assert_close(found, torch.func.jvp(lambda x: loop(cell, x, state), (x,), (tangent,))[1], **EXACT)
    parameters = dict(cell.named_parameters())

    def with_weights(parameters):
        return torch.func.functional_call(cell, parameters, (x, state))

    cell.forward = lambda x, state: cell.scan(x, state) if cell.scan(x, state) is not None else loop(cell, x, state)
    gradient = torch.func.grad(lambda p: with_weights(p).sum())(parameters)
    for name, value in zip(parameters, torch.autograd.grad(expected.sum(), list(parameters.values())), strict=True):
        assert_close(gradient[name], value, **EXACT)


COMPILED = """
import torch
from torch import nn
from adptnet import Recurrent, cells, solvers
for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell):
    layer, x = Recurrent(cells.from_torch(kind(5, 7, dtype=torch.float64))), torch.randn(2, 6, 5, dtype=torch.float64)
    newton = solvers.DEER(fixed_iterations=6, on_failure=solvers.Return())
    for run in (lambda x: layer(x)[0], lambda x: newton(layer.cell, x).states):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), run(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x)[0], layer(x)[0], rtol=0, atol=1e-12)
print("equal")
"""


def test_compiled_programs_run_the_loop():
    assert run_python(COMPILED)[0] == "equal"  # in a subprocess, without the run-time type checker of these tests


@kinds
def test_checkpointed_gradients_are_those_of_the_loop(kind):
    cell = make(kind)
    x = torch.randn(2, 9, 5).double().requires_grad_()
    leaves = [x, *cell.parameters()]
    assert cell.scan(x, cell.initial_state(2), lean=True) is None
    states = solvers.Sequential()(cell, x, adjoint=solvers.adjoints.Checkpointed()).states
    found, expected = (torch.autograd.grad(y.sum(), leaves) for y in (states, loop(cell, x, cell.initial_state(2))))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, **EXACT)


# Modules that must be called


class Doubled(nn.GRUCell):
    def forward(self, input, hx=None):
        return 2 * super().forward(input, hx)


def hooked(kind):
    cell = nn.GRUCell(5, 7, dtype=torch.float64)
    if kind == "forward hook":
        cell.register_forward_hook(lambda module, arguments, output: 2 * output)
    elif kind == "pre-hook":
        cell.register_forward_pre_hook(lambda module, arguments: (2 * arguments[0], arguments[1]))
    elif kind == "weight norm":
        parametrizations.weight_norm(cell, "weight_hh")
    elif kind == "replaced forward":
        plain = cell.forward
        cell.forward = lambda *arguments: 2 * plain(*arguments)
    else:
        cell = Doubled(5, 7, dtype=torch.float64)
    return cell


@pytest.mark.parametrize("kind", ["forward hook", "pre-hook", "weight norm", "replaced forward", "subclass"])
def test_modified_modules_are_called(kind):
    torch.manual_seed(0)
    module = hooked(kind)
    cell = cells.from_torch(module)
    x, state = torch.randn(2, 6, 5).double(), torch.randn(2, 7).double()
    assert cell.scan(x, state) is None
    assert not cell.choose_scan("cpu").is_kernel
    expected = torch.func.vmap(torch.func.jacfwd(lambda h, x: module(x[None], h[None])[0]))(state, x[:, 0])
    assert_close(cell.jacobian(state, x[:, 0]), expected, **EXACT)
    assert_close(cell.jacobian_blocks(state, x[:, 0]).real, expected.diagonal(dim1=-2, dim2=-1), **EXACT)
    assert_close(solvers.Sequential()(cell, x, state).states, loop(cell, x, state), **EXACT)


def test_a_subclass_with_a_step_of_its_own_is_stepped():
    class Slower(cells.torch_cell.TorchCell):
        def step(self, state, drive):
            return state + 0.1 * (super().step(state, drive) - state)

    cell = Slower(nn.GRUCell(5, 7, dtype=torch.float64))
    x, state = torch.randn(2, 6, 5).double(), torch.randn(2, 7).double()
    assert cell.scan(x, state) is None
    expected = torch.func.vmap(torch.func.jacfwd(cell.step))(state, x[:, 0])
    assert_close(cell.jacobian(state, x[:, 0]), expected, **EXACT)
    assert_close(cell.jacobian_blocks(state, x[:, 0]).real, expected.diagonal(dim1=-2, dim2=-1), **EXACT)


def test_a_removed_parametrization_is_stock_again():
    module = parametrizations.weight_norm(nn.GRUCell(5, 7), "weight_hh")
    parametrize.remove_parametrizations(module, "weight_hh")
    assert cells.from_torch(module).choose_scan("cpu").is_kernel
    assert cells.from_torch(copy.deepcopy(module)).choose_scan("cpu").is_kernel


@kinds
def test_newton_solvers_find_the_states_of_the_loop(kind):
    cell = make(kind)
    x = torch.randn(3, 50, 5).double()
    expected = loop(cell, x, cell.initial_state(3))
    for solver in (solvers.DEER(), solvers.QuasiDEER()):
        assert_close(solver(cell, x).states, expected, rtol=0, atol=1e-10)


def test_empty_batches_and_sequences_run_the_loop():
    cell = make("gru")
    for batch, time in ((0, 4), (3, 0)):
        states = solvers.Sequential()(cell, torch.zeros(batch, time, 5).double()).states
        assert states.shape == (batch, time, 7)
