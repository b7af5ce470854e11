"""The structure of a cell: what solvers may use beyond the step, and what they derive where it is missing."""

import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from adptnet import ADPTNet, cells, errors, solvers
from adptnet.analysis import trajectory
from adptnet.cells import ADPTCell, ADPTSpec, Cell, Structure
from adptnet.cells.structure import choose_scan, compute_jacobian, compute_jacobian_blocks, make_step
from adptnet.recurrence.spectra import BlockDiagonal

assert trajectory.MapCell  # every module that defines a cell must be imported


def list_subclasses(kind):
    return [kind, *(c for each in kind.__subclasses__() if "adptnet" in each.__module__ for c in list_subclasses(each))]


@pytest.mark.parametrize("kind", list_subclasses(Cell)[1:], ids=lambda kind: kind.__name__)
def test_a_function_of_a_structure_that_a_cell_defines_is_part_of_its_structure(kind):
    owners = [c for c in kind.__mro__ if "structure" in c.__dict__]
    source = "".join(inspect.getsource(owner.structure) for owner in owners)
    functions = set(Structure._fields) - {"forward", "linear"}  # nn.Module has a method `forward`
    defined = [name for name in functions if callable(getattr(kind, name, None))]
    assert [name for name in defined if f"self.{name}" not in source] == []


class Tripled(ADPTCell):
    """A cell that overrides its step alone."""

    def step(self, state, drive):
        return 3 * super().step(state, drive) - 2 * drive


@pytest.mark.parametrize("recorded", [False, True])
def test_a_cell_that_overrides_step_alone_is_run_by_its_step(recorded):
    cell, x = Tripled(ADPTSpec(4, beta=1.0)), 0.1 * torch.randn(2, 5, 4)
    drive = cell.prepare(x, torch.arange(5).expand(2, 5))
    state, states = cell.initial_state(2), []
    for t in range(5):
        state = cell.step(state, drive[:, t])
        states.append(state)
    with torch.set_grad_enabled(recorded):
        for solver in (solvers.Sequential(), solvers.DEER()):
            assert_close(solver(cell, x).states, torch.stack(states, 1))
    assert "replaces step()" in choose_scan(cell, "cpu").reason
    matrices = compute_jacobian(cell, state, drive[:, 0])
    assert_close(matrices, torch.func.vmap(torch.func.jacfwd(cell.step))(state, drive[:, 0]))


class Decay(Cell):
    """A cell that needs nothing but a step; its structure is given."""

    input_size = state_size = 3

    def __init__(self, known=None):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.5, 0.7, 0.9]))
        self.known = known or Structure()

    def step(self, state, drive):
        return self.rate * state.tanh() + drive

    def structure(self):
        return self.known


def test_what_a_structure_lacks_is_derived_from_the_step():
    cell, state, drive = Decay(), torch.randn(4, 3), torch.randn(4, 3)
    expected = torch.diag_embed(cell.rate * (1 - state.tanh().square()))
    assert_close(compute_jacobian(cell, state, drive), expected)
    assert_close(compute_jacobian_blocks(cell, state, drive).real, expected.diagonal(dim1=-2, dim2=-1))
    assert make_step(cell) == cell.step
    assert not choose_scan(cell, "cpu").is_kernel
    with pytest.raises(errors.IncompatibleError, match="constant eigenvalues"):
        solvers.ConvDEER()(cell, torch.randn(1, 5, 3))


def test_solvers_use_what_a_structure_has():
    cell, x = Decay(), torch.randn(2, 30, 3)
    expected = solvers.Sequential()(cell, x).states
    calls = []

    def scan(drive, state, **options):
        calls.append(options)

    cell.known = Structure(scan=scan, eigenvalues=lambda: BlockDiagonal(cell.rate))
    assert_close(solvers.ConvDEER()(cell, x).states, expected)
    assert_close(solvers.Sequential()(cell, x).states, expected)  # the scan returned None
    assert calls
    assert choose_scan(cell, "cpu").is_kernel


def test_a_spiking_cell_without_feedback_has_the_structure_of_its_recurrence():
    plain = cells.SpikingADPT(ADPTSpec(4, beta=1.0)).build().structure()
    assert plain.newton_pass is not None
    assert plain.conjugate is not None
    fed_back = cells.SpikingADPT(ADPTSpec(4, beta=1.0), reset="subtract").build().structure()
    assert fed_back.linear is not None
    assert [fed_back.scan, fed_back.jacobian, fed_back.conjugate, fed_back.newton_pass, fed_back.radius] == [None] * 5
    assert ADPTNet(4).cell.structure().scan is not None
