"""Trajectories and all gradients, compared with the brute-force implementation."""

import pytest
import torch
from torch.testing import assert_close

from adptnet import TrainableBeta, directions, drive, verify
from support import brute
from support.members import adpt_cell, all_retractions, all_spectra, build, legal, make_even, name_of

STEPS = 24


def compare(layer, batch=2):
    """Return values and gradients of the layer and of the brute-force implementation, and the latter's sensitivity.

    Some of these networks are chaotic (β = 4 with eigenvalues near ±1): they amplify the rounding errors of any
    implementation by up to 10⁷ in 24 steps. The sensitivity is the largest change of the brute-force states when the
    initial state changes by one part in 10¹⁵.
    """
    x = torch.randn(batch, STEPS, layer.width, requires_grad=True)
    state = layer.cell.initial_state(batch)
    state[:, : adpt_cell(layer).state_size] = torch.randn(batch, adpt_cell(layer).state_size)
    state.requires_grad_()
    weights = torch.randn(batch, STEPS, layer.width)
    named = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    leaves = [x, state, *named.values()]
    outputs, final = layer(x, layer.initial_state(batch)._replace(state=state))
    expected_states, expected = brute.trajectory(layer, x, state)
    perturbed = state.detach() * (1 + 1e-15 * torch.randn(batch, layer.state_size).sign())
    change = float((brute.trajectory(layer, x.detach(), perturbed)[0] - expected_states).detach().abs().max())
    ours = torch.autograd.grad((outputs * weights).sum(), leaves, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    gradients = {n: (a, b) for n, a, b in zip(["x", "state", *named], ours, theirs, strict=True)}
    return (outputs, expected), (final.state, expected_states[:, -1]), gradients, change


def assert_agree(layer):
    """Assert that a layer agrees with the brute-force implementation, within its sensitivity to rounding."""
    values, finals, gradients, change = compare(layer)
    allowed = max(1e-9, 10 * change)
    assert_close(*values, atol=allowed, rtol=0)
    assert_close(*finals, atol=allowed, rtol=0)
    for name, (found, expected) in gradients.items():
        if expected is None or found is None:
            assert all(gradient is None or not gradient.any() for gradient in (found, expected)), name
        else:
            # relative to the largest entry, because the gradients of a chaotic network are far above one
            assert_close(found, expected, atol=10 * allowed * max(1.0, float(expected.abs().max())), rtol=0, msg=name)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
@pytest.mark.parametrize("spectrum", all_spectra, ids=repr)
@pytest.mark.parametrize("beta", [0.0, 0.125, 1.0, 4.0])
def test_a_trajectory_is_the_brute_force_one(retraction, spectrum, beta):
    # Each size occurs with every spectrum, retraction and β, though not with every three of them.
    place = all_spectra.index(spectrum) + all_retractions.index(retraction) + [0.0, 0.125, 1.0, 4.0].index(beta)
    size = make_even((6, 13)[place % 2], spectrum)
    axes = {"width": size, "spectrum": spectrum, "retraction": retraction, "gate": drive.SoftplusGate()}
    assert_agree(build({**axes, "beta": TrainableBeta(beta), "gain": drive.LRU(tied=size == 6)}))


@pytest.mark.parametrize("axes", legal, ids=name_of)
def test_every_legal_layer_is_the_brute_force_one(axes):
    assert_agree(build(axes))


@pytest.mark.parametrize("axes", legal, ids=name_of)
def test_verify_finds_nothing_wrong_with_a_legal_layer(axes):
    layer = build(axes)
    report = verify(layer, torch.randn(2, 9, layer.width))
    assert report.ok, str(report)
    assert "agrees" in str(report)


def test_verify_finds_a_wrong_layer():
    layer = build({"width": 6, "beta": 1.0})
    layer.cell.stepper = lambda: lambda state, drive: 0.999 * state + drive
    report = verify(layer, torch.randn(2, 9, 6))
    assert not report.ok
    assert "DIFFERS" in str(report)


@pytest.mark.parametrize("retraction", all_retractions, ids=repr)
def test_one_step_at_beta_1000_is_the_brute_force_one(retraction):
    # one step only: at this β every rounding error is amplified by hundreds per step, in any implementation
    layer = build({"width": 13, "beta": 1000.0, "retraction": retraction})
    x, state = torch.zeros(4, 1, 13), torch.randn(4, 13)
    outputs, _ = layer(x, layer.initial_state(4)._replace(state=state))
    assert_close(outputs, brute.trajectory(layer, x, state)[1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("relu", [False, True])
def test_at_state_zero_values_and_gradients_are_finite(relu):
    layer = build({"width": 6, "beta": 4.0, "direction": directions.FromState(relu=relu)})
    x = torch.zeros(2, 5, 6, requires_grad=True)
    outputs, _ = layer(x)
    assert not outputs.any()
    gradients = torch.autograd.grad(outputs.sum(), [x, *layer.parameters()])
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e150])
def test_the_size_of_the_state_does_not_matter(scale):
    layer = build({"width": 6, "beta": 4.0})
    x = torch.randn(2, 7, 6)
    unscaled, _ = layer(x)
    scaled, _ = layer(scale * x)
    assert_close(scaled / scale, unscaled, atol=1e-12, rtol=1e-10)


def test_double_backward_and_forward_mode_work():
    layer = build({"width": 4, "beta": 1.0})
    x = torch.randn(1, 3, 4, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,))
    tangent = torch.randn_like(x)
    _, pushed = torch.func.jvp(lambda x: layer(x)[0], (x,), (tangent,))
    pulled = torch.func.vjp(lambda x: layer(x)[0], x)[1](torch.ones_like(x))[0]
    assert_close(pushed.sum(), (pulled * tangent).sum())
