"""Subclasses that define another model: what runs is the model they define, never the kernel of their base class."""

import pytest
import torch
from torch.testing import assert_close

from adptnet import ADPTNet, conjugates, directions, projections, retractions, solvers
from adptnet.cells import ADPTCell, ADPTSpec, CoupledCell, SlowMemory
from adptnet.cells.structure import compute_jacobian, make_jacobian_chunks
from adptnet.nn import Recurrent
from adptnet.recurrence.projections.base import Biased
from adptnet.recurrence.projections.dense import DenseProjection
from adptnet.recurrence.projections.factored import KroneckerProjection, LowRankProjection
from adptnet.recurrence.projections.heads import Heads
from adptnet.spec import spec

WIDTH = 12


@spec
class HalvedExact(conjugates.Exact):
    """M at half of β."""

    def operator(self, eigen, planes, beta, retraction):
        return super().operator(eigen, planes, beta / 2, retraction)


@spec
class HalvedTaylor(conjugates.Taylor):
    """The Taylor form at half of β."""

    def operator(self, eigen, planes, beta, retraction):
        return super().operator(eigen, planes, beta / 2, retraction)


@spec
class HalvedExponential(retractions.Exponential):
    """A rotation by other coefficients."""

    def coefficients(self, angle_squared):
        linear, quadratic = super().coefficients(angle_squared)
        return linear / 2, quadratic / 4


@spec
class FromNeighbors(directions.FromState):
    """K and V of a state whose entries are rolled, which no derivative of single entries describes."""

    def source(self, x):
        return x.roll(1, -1) * x


class DoubledBind(DenseProjection):
    """A projection whose function is not the product with its matrix."""

    def bind(self, dtype):
        project = super().bind(dtype)
        return lambda x: project(x) + x.roll(1, -1)


class RolledLowRank(LowRankProjection):
    """A low-rank projection that consistently defines another matrix than that of its factors."""

    def dense(self):
        return super().dense().roll(1, 0)

    def bind(self, dtype):
        project = super().bind(dtype)
        return lambda x: project(x).roll(1, -1)


class MatrixOnly(KroneckerProjection):
    """A projection with another matrix, whose inherited function does not use it."""

    def dense(self):
        return super().dense().mT


class TwiceBiased(Biased):
    """A bias that is added twice."""

    def dense(self):
        return self.projection.dense()

    def bind(self, dtype):
        project = super().bind(dtype)
        return lambda x: project(x) + self.bias


class SwappedHeads(Heads):
    """Heads whose results are exchanged."""

    def dense(self):
        return super().dense().roll(WIDTH // 2, 0)

    def bind(self, dtype):
        project = super().bind(dtype)
        return lambda x: project(x).roll(WIDTH // 2, -1)


class HalvedCell(ADPTCell):
    """A cell that evaluates another β."""

    def evaluate(self, **options):
        return super().evaluate(**options)._replace(beta=0.25)


class HalvedMemory(CoupledCell):
    """A cell whose slow memory follows half of the state."""

    def evaluate(self, **options):
        parameters = super().evaluate(**options)
        memory = parameters.memory
        return parameters._replace(memory=memory._replace(charge=memory.charge / 2))


def with_projection(make, **axes):
    layer = ADPTNet.paper(WIDTH, beta=1.0, **axes)
    module = layer.cell.directions[0]
    module.key_projection, module.value_projection = make(), make()
    return layer


def biased():
    projection = TwiceBiased(DenseProjection(torch.nn.Parameter(torch.randn(WIDTH, WIDTH))))
    torch.nn.init.normal_(projection.bias)
    return projection


def heads():
    size = WIDTH // 2
    return SwappedHeads([DenseProjection(torch.nn.Parameter(torch.randn(size, size))) for _ in range(2)])


LAYERS = {
    "conjugate": lambda: ADPTNet.paper(WIDTH, beta=1.0, conjugate=HalvedExact()),
    "Taylor": lambda: ADPTNet.paper(WIDTH, beta=0.3, conjugate=HalvedTaylor(2)),
    "retraction": lambda: ADPTNet.paper(WIDTH, beta=1.0, retraction=HalvedExponential()),
    "direction": lambda: ADPTNet.paper(WIDTH, beta=1.0, direction=FromNeighbors()),
    "bind of K": lambda: with_projection(lambda: DoubledBind(torch.nn.Parameter(torch.randn(WIDTH, WIDTH)))),
    "factors of K": lambda: with_projection(lambda: RolledLowRank(torch.randn(WIDTH, 1), torch.randn(WIDTH, 1))),
    "matrix of K": lambda: with_projection(lambda: MatrixOnly(torch.randn(4, 4), torch.randn(3, 3))),
    "bias of K": lambda: with_projection(biased),
    "heads of K": lambda: with_projection(heads, direction=directions.FromState(heads=2)),
    "cell": lambda: Recurrent(HalvedCell(ADPTSpec(WIDTH, beta=1.0))),
    "slow memory": lambda: Recurrent(HalvedMemory(ADPTSpec(WIDTH, beta=1.0, memory=SlowMemory(feedback=0.5)))),
}


def run_steps(cell, x):
    """Return the states by one call of `step` after another."""
    drive = cell.prepare(x, torch.arange(x.shape[1]).expand(x.shape[:2]))
    states = [cell.initial_state(len(x))]
    for t in range(x.shape[1]):
        states.append(cell.step(states[-1], drive[:, t]))
    return torch.stack(states[1:], 1)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("steps", [3, 40], ids=["short", "long"])
@pytest.mark.parametrize("recorded", [False, True], ids=["inference", "training"])
def test_a_subclass_runs_the_step_that_it_defines(name, steps, recorded):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(2, steps, WIDTH)
    with torch.set_grad_enabled(recorded):
        expected = run_steps(layer.cell, x)
        found = layer.solve(x).states
        shown = layer(x)[0]
    assert_close(found, expected, atol=1e-12, rtol=0)
    with torch.no_grad():
        outputs = layer.cell.output(expected)
        assert_close(shown, outputs if layer.readout is None else layer.readout(outputs), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_jacobians_are_those_of_the_step_that_a_subclass_defines(name):
    torch.manual_seed(0)
    cell = LAYERS[name]().cell
    state, drive = torch.randn(3, 1, cell.state_size), torch.randn(3, 1, WIDTH)
    with torch.no_grad():
        found, chunks = compute_jacobian(cell, state, drive), make_jacobian_chunks(cell, state, drive)(0, 1)
    expected = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda x, u=u: cell.step(x, u), x)
            for x, u in zip(state[:, 0], drive[:, 0], strict=True)
        ]
    ).unsqueeze(1)
    assert_close(found, expected, atol=1e-9, rtol=0)
    assert_close(chunks, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("solver", [solvers.ConvDEER(), solvers.ForwardDEER()], ids=repr)
@pytest.mark.parametrize("name", ["conjugate", "retraction", "direction", "factors of K"])
def test_parallel_solvers_solve_the_step_that_a_subclass_defines(name, solver):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = 0.3 * torch.randn(2, 30, WIDTH)
    with torch.no_grad():
        found, expected = layer.solve(x, solver=solver), run_steps(layer.cell, x)
    assert found.result == solvers.Result.CONVERGED
    assert_close(found.states, expected, atol=1e-7, rtol=0)


def test_parametrized_projections_keep_their_kernel():
    layer = ADPTNet.paper(WIDTH, beta=1.0, projection=projections.LowRank(1))
    torch.nn.utils.parametrizations.weight_norm(layer.cell.directions[0].key_projection, "left")
    assert layer.cell.choose_scan("cpu").is_kernel
    x = torch.randn(2, 40, WIDTH)
    assert_close(layer.solve(x).states, run_steps(layer.cell, x), atol=1e-12, rtol=0)
