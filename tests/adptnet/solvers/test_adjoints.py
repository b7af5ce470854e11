"""Gradients of every solver against back-propagation through time."""

import pytest
import torch
from torch.testing import assert_close

from adptnet import adjoints, cells, directions, errors, solvers, spectra
from support.members import (
    all_dampings,
    all_linearizations,
    build_cell,
    cell_name,
    covering_cells,
    covering_combinations,
)

STEPS = 9


class RaggedProblem:
    """A batch of ragged sequences with resets and an initial state, and the gradients of all its tensors."""

    def __init__(self, cell, *, ragged=True, resets=True, last=False):
        self.cell = cell
        self.inputs = torch.randn(3, STEPS, cell.input_size, requires_grad=True)
        start = cell.initial_state(3)
        self.state = (start + 0.5 * torch.randn_like(start)).requires_grad_()
        self.lengths = torch.tensor([STEPS, 4, STEPS - 3]) if ragged else None
        self.reset = torch.zeros(3, STEPS, dtype=torch.bool)
        self.reset[0, STEPS // 2] = self.reset[2, 0] = self.reset[2, STEPS // 2 + 1] = True
        self.reset = self.reset if resets else None
        self.last = last
        self.weights = torch.randn(3, STEPS, cell.state_size)
        self.leaves = {"inputs": self.inputs, "state": self.state, **dict(cell.named_parameters())}

    def loss(self, solver, adjoint=None, resets=True):
        solution = solver(
            self.cell,
            self.inputs,
            self.state,
            lengths=self.lengths,
            reset=self.reset if resets else None,
            adjoint=adjoint,
        )
        if self.last:
            return (solution.final.sin() * self.weights[:, 0]).sum()
        return (solution.states.sin() * self.weights).sum() + solution.final.square().sum()

    def gradients(self, solver, adjoint=None, resets=True):
        leaves = [leaf for leaf in self.leaves.values() if leaf.requires_grad]
        return torch.autograd.grad(self.loss(solver, adjoint, resets), leaves, materialize_grads=True)

    def assert_same(self, found, expected, name, tolerance=1e-8):
        names = [name for name, leaf in self.leaves.items() if leaf.requires_grad]
        for leaf, a, b in zip(names, found, expected, strict=True):
            allowed = tolerance * max(float(b.abs().max()), 1e-6)
            assert_close(a, b, atol=allowed, rtol=0, msg=lambda text, leaf=leaf: f"{name}: {leaf}\n{text}")


@pytest.mark.parametrize("axes", covering_cells[::2], ids=cell_name)
def test_gradients_do_not_depend_on_the_solver(axes):
    assert_same_gradients(axes)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("axes", covering_cells[1::2], ids=cell_name)
def test_gradients_do_not_depend_on_the_solver_for_more_cells(axes):
    assert_same_gradients(axes)


def assert_same_gradients(axes):
    problem = RaggedProblem(build_cell(axes))
    expected = {resets: problem.gradients(solvers.Sequential(), None, resets) for resets in (True, False)}
    combinations = list(covering_combinations(axes))
    for combination in combinations[:: 1 + len(combinations) // 12]:  # a sample, for the cell that has all dampings
        resets = combination.takes_resets
        problem.assert_same(problem.gradients(combination.solver(), None, resets), expected[resets], str(combination))


tested_cells = {
    "ADPT": {"width": 6, "beta": 1.0},
    "ADPT, pairs": {"width": 6, "beta": 1.0, "spectrum": spectra.S4DInv()},
    "GRU": "GRUCell",
    "LSTM": "LSTMCell",
    "mixing tanh": "TanhRNN",
}
all_adjoints = [
    adjoints.Implicit(),
    adjoints.Implicit(max_iterations=0),
    adjoints.Implicit(max_iterations=2),
    adjoints.Unrolled(),
    adjoints.Checkpointed(),
]


@pytest.mark.parametrize("adjoint", all_adjoints, ids=repr)
@pytest.mark.parametrize("name", tested_cells)
def test_gradients_do_not_depend_on_the_adjoint(name, adjoint):
    problem = RaggedProblem(build_cell(tested_cells[name]))
    expected = problem.gradients(solvers.Sequential())
    problem.assert_same(problem.gradients(solvers.Sequential(), adjoint), expected, "Sequential")
    for solver in (solvers.DEER(), solvers.Jacobi(), solvers.BlockWise(solvers.QuasiDEER(), block_length=5)):
        problem.assert_same(problem.gradients(solver, adjoint), expected, repr(solver))


@pytest.mark.parametrize("adjoint", [adjoints.Unrolled(), adjoints.Checkpointed()], ids=repr)
@pytest.mark.parametrize("damping", all_dampings)
def test_gradients_through_iterations_do_not_depend_on_the_damping(damping, adjoint):
    problem = RaggedProblem(build_cell({"width": 6, "beta": 1.0}))
    expected = problem.gradients(solvers.Sequential())
    solver = solvers.ForwardDEER(all_dampings[damping])
    problem.assert_same(problem.gradients(solver, adjoint), expected, repr(solver))


@pytest.mark.parametrize("linearization", all_linearizations)
def test_gradients_of_the_last_state_alone(linearization):
    problem = RaggedProblem(build_cell({"width": 6, "beta": 1.0}), resets=False, last=True)
    found = problem.gradients(all_linearizations[linearization]())
    problem.assert_same(found, problem.gradients(solvers.Sequential()), linearization)


@pytest.mark.parametrize("adjoint", all_adjoints, ids=repr)
def test_a_step_may_capture_a_tensor(adjoint):
    captured = torch.randn(4, 4).div(2).requires_grad_()
    cell = cells.from_function(lambda state, inputs: torch.tanh(state @ captured + inputs), 4, 4)
    problem = RaggedProblem(cell)
    problem.leaves["captured"] = captured
    expected = problem.gradients(solvers.Sequential())
    assert expected[-1].any()
    for make in (solvers.DEER, solvers.QuasiDEER, solvers.KoopmanDEER, solvers.Jacobi):
        problem.assert_same(problem.gradients(make(), adjoint), expected, make.__name__)


def test_second_derivatives_reject_a_captured_tensor():
    captured = torch.randn(4, 4).div(2).requires_grad_()
    problem = RaggedProblem(cells.from_function(lambda state, inputs: torch.tanh(state @ captured + inputs), 4, 4))
    with pytest.raises(errors.IncompatibleError, match=r"nn.Module.*Unrolled"):
        torch.autograd.grad(problem.loss(solvers.DEER()), problem.inputs, create_graph=True)


@pytest.mark.parametrize("name", tested_cells)
@pytest.mark.parametrize("solver", [solvers.DEER(), solvers.BlockWise(solvers.QuasiDEER(), 3)], ids=repr)
def test_second_derivatives_are_those_of_the_loop(name, solver):
    problem = RaggedProblem(build_cell(tested_cells[name]))
    leaves = list(problem.leaves.values())

    def twice(solver):
        first = torch.autograd.grad(problem.loss(solver), leaves, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), leaves, materialize_grads=True)

    problem.assert_same(twice(solver), twice(solvers.Sequential()), repr(solver))


@pytest.mark.parametrize(
    "solver", [solvers.DEER(), solvers.ConvDEER(), solvers.BlockWise(solvers.KoopmanDEER(), 2)], ids=repr
)
def test_transforms_of_torch_func_give_what_the_loop_gives(solver):
    cell = build_cell({"width": 4, "beta": 1.0})
    inputs, tangent = torch.randn(2, 2, 7, 4)
    state, push = torch.randn(2, 2, 4)

    def solved(solver):
        return lambda inputs, state: solver(cell, inputs, state).states

    exact = solved(solvers.Sequential())
    expected = torch.func.jvp(exact, (inputs, state), (tangent, push))
    for a, b in zip(torch.func.jvp(solved(solver), (inputs, state), (tangent, push)), expected, strict=True):
        assert_close(a, b, atol=1e-11, rtol=0)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs, tangent)
        start = torch.autograd.forward_ad.make_dual(state, push)
        found = torch.autograd.forward_ad.unpack_dual(solved(solver)(dual, start))
        assert_close(found.tangent, expected[1], atol=1e-11, rtol=0)
    every, states = torch.randn(3, 2, 7, 4), torch.randn(3, 2, 4)
    assert_close(
        torch.func.vmap(solved(solver))(every, states), torch.func.vmap(exact)(every, states), atol=1e-11, rtol=0
    )
    a, b = (torch.func.grad(lambda x, f=f: f(x, state).square().sum())(inputs) for f in (solved(solver), exact))
    assert_close(a, b, atol=1e-11, rtol=0)


def test_gradients_are_those_of_finite_differences():
    cell = build_cell({"width": 2, "beta": 1.0})
    inputs, state = torch.randn(1, 3, 2, requires_grad=True), torch.randn(1, 2, requires_grad=True)

    def states(inputs, state):
        return solvers.QuasiDEER(rtol=1e-14)(cell, inputs, state).states

    assert torch.autograd.gradcheck(states, (inputs, state))
    assert torch.autograd.gradgradcheck(states, (inputs, state))


@pytest.mark.parametrize("adjoint", all_adjoints, ids=repr)
@pytest.mark.parametrize("free", ["inputs", "state", "one parameter"])
def test_a_frozen_tensor_gets_no_gradient_and_changes_no_other(free, adjoint):
    problem = RaggedProblem(build_cell({"width": 6, "beta": 1.0, "start": True}))
    kept = {"inputs": "inputs", "state": "state"}.get(free, "directions.0.key_projection.weight")
    assert kept in problem.leaves
    for name, leaf in problem.leaves.items():
        leaf.requires_grad_(name == kept)
    expected = problem.gradients(solvers.Sequential())
    for make in (solvers.DEER, solvers.ConvDEER):
        problem.assert_same(problem.gradients(make(), adjoint), expected, make.__name__)


@pytest.mark.parametrize("adjoint", all_adjoints, ids=repr)
def test_there_is_no_graph_if_no_gradient_is_needed(adjoint):
    problem = RaggedProblem(build_cell({"width": 6, "beta": 1.0}))
    for leaf in problem.leaves.values():
        leaf.requires_grad_(False)
    assert not problem.loss(solvers.ConvDEER(), adjoint).requires_grad
    problem = RaggedProblem(build_cell({"width": 6, "beta": 1.0}))
    with torch.no_grad():
        assert not problem.loss(solvers.ConvDEER(), adjoint).requires_grad


def test_a_graph_can_be_used_twice_and_left_in_two_parts():
    problem = RaggedProblem(build_cell({"width": 6, "beta": 1.0}))
    solution = solvers.ConvDEER()(problem.cell, problem.inputs, problem.state)
    exact = solvers.Sequential()(problem.cell, problem.inputs, problem.state)
    for part in (slice(0, 5), slice(5, None), slice(0, 5)):
        (a,) = torch.autograd.grad(solution.states[:, part].square().sum(), problem.inputs, retain_graph=True)
        (b,) = torch.autograd.grad(exact.states[:, part].square().sum(), problem.inputs, retain_graph=True)
        assert_close(a, b, atol=1e-10, rtol=0)


def test_gradients_flow_from_one_call_into_the_one_before():
    problem = RaggedProblem(build_cell({"width": 6, "beta": 1.0}), ragged=False, resets=False)

    def total(solver):
        first = solver(problem.cell, problem.inputs[:, :5], problem.state)
        second = solver(problem.cell, problem.inputs[:, 5:], first.final)
        return torch.autograd.grad(second.states.sin().sum(), list(problem.leaves.values()))

    problem.assert_same(total(solvers.QuasiDEER()), total(solvers.Sequential()), "QuasiDEER")


def test_padding_makes_no_nan_in_gradients():
    cell, x = cells.from_function(lambda state, drive: 0.5 * state.sqrt() + drive, 2, 2), torch.rand(2, 12, 2) + 0.1
    for solver in (solvers.QuasiDEER(), solvers.BlockWise(solvers.QuasiDEER(), block_length=4)):
        leaf = x.clone().requires_grad_()
        found = solver(cell, leaf, torch.ones(2, 2), lengths=torch.tensor([12, 2]))
        found.states.sum().backward()
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.125, 1.0])
def test_in_single_precision_gradients_err_a_few_times_as_much_as_back_propagation(beta):
    inputs, errors_ = torch.randn(4, 200, 16), []
    exact = build_cell({"width": 16, "beta": beta})
    single = build_cell({"width": 16, "beta": beta}).float()
    single.load_state_dict(exact.state_dict())
    exact.load_state_dict(single.state_dict())  # the same numbers in both

    def gradients(cell, inputs, solver, adjoint):
        states = solver(cell, inputs, adjoint=adjoint).states
        return torch.autograd.grad(states.square().mean(), list(cell.parameters()))

    expected = gradients(exact, inputs.float().double(), solvers.Sequential(), adjoints.Unrolled())
    for solver, adjoint in ((solvers.Sequential(), adjoints.Unrolled()), (solvers.ConvDEER(), adjoints.Implicit())):
        found = gradients(single, inputs.float(), solver, adjoint)
        errors_.append(max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)))
    assert errors_[1] <= 12 * errors_[0], errors_


@pytest.mark.parametrize("adjoint", [adjoints.Unrolled(), adjoints.Checkpointed()], ids=repr)
@pytest.mark.parametrize(
    "axes",
    [
        {"width": 4, "beta": 0.0},  # the initial guess is exact before the first iteration, but its derivative is not
        {"width": 4, "beta": 1.0, "spectrum": spectra.LRURing(r_min=0.9, r_max=0.999)},
    ],
    ids=cell_name,
)
def test_through_damped_iterations_states_and_gradients_are_right(axes, adjoint):
    problem = RaggedProblem(build_cell(axes), resets=False)
    exact = solvers.Sequential()(problem.cell, problem.inputs, problem.state).states
    expected = problem.gradients(solvers.Sequential())
    for solver in (solvers.ConvDEER(solvers.Scale(0.9)), solvers.DEER(solvers.TrustRegion(0.1))):
        found = solver(problem.cell, problem.inputs, problem.state, adjoint=adjoint)
        assert_close(found.states, exact, atol=1e-10, rtol=0)
        problem.assert_same(problem.gradients(solver, adjoint), expected, repr(solver))
        warm = solver(problem.cell, problem.inputs, problem.state, adjoint=adjoint, guess=exact.detach())
        (a,), (b,) = (
            torch.autograd.grad(s.square().sum(), problem.inputs, retain_graph=True) for s in (warm.states, exact)
        )
        assert_close(a, b, atol=1e-8 * float(b.abs().max()), rtol=0)


def test_second_derivatives_through_iterations():
    problem = RaggedProblem(build_cell({"width": 3, "beta": 1.0, "direction": directions.FromInput()}), resets=False)

    def twice(solver, adjoint):
        (first,) = torch.autograd.grad(problem.loss(solver, adjoint, False), problem.inputs, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), list(problem.leaves.values()), materialize_grads=True)

    expected = twice(solvers.Sequential(), None)
    for adjoint in (adjoints.Implicit(), adjoints.Unrolled()):
        problem.assert_same(twice(solvers.DEER(), adjoint), expected, repr(adjoint))


def test_no_steps_have_a_gradient_too():
    cell = build_cell({"width": 4, "beta": 1.0})
    for solver in (solvers.Sequential(), solvers.ConvDEER(), solvers.BlockWise(solvers.DEER(), 2)):
        inputs = torch.zeros(2, 0, 4, requires_grad=True)
        solver(cell, inputs).states.sum().backward()
        assert inputs.grad.shape == (2, 0, 4)
