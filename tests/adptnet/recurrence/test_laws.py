"""Laws of the recurrence, each tested on all layers for which it holds."""

import pytest
import torch
from torch.testing import assert_close

from adptnet import ADPTNet, conjugates, spectra
from adptnet.analysis.definition import define_conjugate
from support.members import all_retractions, build, laws_of, legal, name_of

RANDOM_STATES = 5


def parametrize_law(law: str):
    """Parametrize a test with the layers that obey a law."""
    members = [axes for axes in legal if law in laws_of(axes)]
    assert members
    return pytest.mark.parametrize("axes", members, ids=name_of)


def cell_and_states(axes):
    """Return a cell, random states, and drives that are zero except for directions from the input, which are random."""
    cell = build(axes).cell
    drive = cell.prepare(
        torch.randn(RANDOM_STATES, 1, cell.input_size), torch.zeros(RANDOM_STATES, 1, dtype=torch.int64)
    )
    drive[..., : cell.state_size] = 0
    return cell, torch.randn(RANDOM_STATES, cell.state_size), drive.detach().squeeze(1)


@parametrize_law("homogeneous")
@pytest.mark.parametrize("factor", [1e-3, 7.0])
def test_the_step_is_homogeneous_of_degree_one(axes, factor):
    cell, states, silent = cell_and_states(axes)
    assert_close(cell.step(factor * states, silent), factor * cell.step(states, silent), rtol=1e-9, atol=1e-12)


@parametrize_law("odd")
def test_the_step_is_odd(axes):
    cell, states, silent = cell_and_states(axes)
    assert_close(cell.step(-states, silent), -cell.step(states, silent))


@parametrize_law("euler")
def test_the_jacobian_and_the_conjugate_agree_along_the_state(axes):
    cell, states, silent = cell_and_states(axes)
    along = (cell.jacobian(states, silent) @ states.unsqueeze(-1)).squeeze(-1)
    assert_close(along, cell.conjugate(states, silent).mv(states), atol=1e-9, rtol=1e-9)


@parametrize_law("isospectral")
def test_the_singular_values_of_the_conjugate_are_the_moduli(axes):
    cell, states, silent = cell_and_states(axes)
    found = torch.linalg.svdvals(cell.conjugate(states, silent).dense())
    moduli = cell.spectrum().modulus().sort(descending=True).values
    assert_close(found, moduli.expand_as(found), atol=1e-10, rtol=0)


@parametrize_law("conjugate")
def test_the_conjugate_is_one_operator_in_three_forms(axes):
    cell, states, silent = cell_and_states(axes)
    conjugate = cell.conjugate(states, silent)
    dense = conjugate.dense().expand(*states.shape, cell.state_size)
    assert_close(dense, define_conjugate(cell, states, silent), atol=1e-10, rtol=0)
    assert_close(conjugate.diagonal().expand_as(states), dense.diagonal(dim1=-2, dim2=-1).expand_as(states))
    assert_close(conjugate.mv(states), (dense @ states.unsqueeze(-1)).squeeze(-1), atol=1e-10, rtol=1e-10)


@parametrize_law("ball")
def test_the_state_never_leaves_its_ball(axes):
    layer = build(axes)
    x = torch.randn(3, 40, layer.width)
    solution = layer.solve(x)
    drive = layer.cell.prepare(x, torch.arange(40).expand(3, 40))[..., : layer.state_size].norm(dim=-1)
    largest = layer.cell.spectrum().modulus().max()
    bound = torch.zeros(3)
    for t in range(40):
        bound = largest * bound + drive[:, t]
        assert (solution.states[:, t].norm(dim=-1) <= bound * (1 + 1e-12)).all()


@parametrize_law("diagonal")
def test_at_beta_zero_it_is_a_diagonal_state_space_model(axes):
    layer = build(axes)
    x = torch.randn(2, 11, layer.width)
    drive = layer.cell.prepare(x, torch.zeros(2, 11, dtype=torch.int64))
    eigenvalues = layer.cell.eigenvalues().eigenvalues()
    if layer.spec.cell.spectrum.is_complex:
        drive = torch.view_as_complex(drive.unflatten(-1, (-1, 2)).contiguous())
    state, states = torch.zeros_like(drive[:, 0]), []
    for t in range(11):
        state = eigenvalues * state + drive[:, t]
        states.append(state)
    expected = torch.stack(states, 1)
    expected = torch.view_as_real(expected).flatten(-2) if expected.is_complex() else expected
    assert_close(layer.solve(x).states, expected)


@pytest.mark.parametrize(
    "spectrum", [spectra.Linspace(), spectra.S4DInv(), spectra.Negative(spectra.S4DInv())], ids=repr
)
def test_beta_zero_and_the_diagonal_conjugate_are_the_same_model(spectrum):
    exact = ADPTNet.paper(6, beta=0, spectrum=spectrum)
    static = ADPTNet.paper(6, beta=0, spectrum=spectrum, conjugate=conjugates.Diagonal())
    static.load_state_dict({k: v for k, v in exact.state_dict().items() if "directions" not in k})
    x = torch.randn(2, 11, 6)
    assert_close(exact(x)[0], static(x)[0])


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("beta", [0.125, 4.0, 1000.0])
def test_a_real_constant_spectrum_is_linear_whatever_beta(retraction, beta):
    layer = ADPTNet.paper(7, beta=beta, spectrum=spectra.Linspace(dt_min=0.1, dt_max=0.1), retraction=retraction)
    a, b = torch.randn(2, 3, 9, 7)
    assert_close(layer(a + 2 * b)[0], layer(a)[0] + 2 * layer(b)[0], atol=1e-10, rtol=1e-9)


def test_a_complex_constant_spectrum_is_not_linear():
    layer = ADPTNet.paper(2, beta=1.0, spectrum=spectra.S4DInv(dt_min=0.1, dt_max=0.1), state_size=4)
    with torch.no_grad():
        layer.cell.spectrum.log_frequency.fill_(1.0)
    a, b = torch.randn(2, 3, 9, 2)
    assert (layer(a + b)[0] - layer(a)[0] - layer(b)[0]).abs().max() > 1e-3
