"""Directions from the whole state: one plane per head, unit or soft vectors, and the bound that softness restores."""

import math

import pytest
import torch
from torch.testing import assert_close

from adptnet import ADPTNet, analysis, cells, conjugates, directions, drive, explain, projections, retractions, spectra
from adptnet.errors import IncompatibleError, SpecError
from adptnet.spec import Spec

WIDE = spectra.Negative(spectra.S4DReal(), 0.5)


def make_cell(softness, heads=3, **axes):
    direction = directions.FromWholeState(heads=heads, softness=softness)
    axes = {"beta": 1.0, "spectrum": WIDE, **axes}
    return ADPTNet.paper(6, direction=direction, **axes).cell


def deviations(cell, states):
    """Return ‖J - M‖ at states."""
    drives = cell.prepare(torch.randn(1, len(states), 6), torch.zeros(1, len(states), dtype=torch.int64))[0]
    difference = cell.jacobian(states, drives) - cell.conjugate(states, drives).dense()
    return torch.linalg.matrix_norm(difference, 2)


def find_null_states(cell, distance=1e-4):
    """Return states near the null space of each K_h and V_h."""
    module = cell.directions[0]
    rows = [
        p.dense().detach().unflatten(0, (cell.spec.heads, -1)) for p in (module.key_projection, module.value_projection)
    ]
    bases = [torch.linalg.svd(part).Vh[part.shape[0] :] for pair in rows for part in pair]
    return torch.cat([basis + distance * torch.randn_like(basis) for basis in bases])


@pytest.mark.parametrize("retraction", [retractions.Exponential(), retractions.Cayley()], ids=repr)
@pytest.mark.parametrize("softness", [0.02, 0.1, 0.5])
def test_the_bound_of_soft_directions_holds_also_near_null_spaces(softness, retraction):
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        cell = make_cell(softness, retraction=retraction, phase=drive.InputPhase(0.7))
        bound = analysis.certificate(cell)
        assert bound.holds
        assert "εI" in bound.bound
        states = torch.cat((torch.randn(40, 6), find_null_states(cell, softness), find_null_states(cell)))
        jacobians = cell.jacobian(states, cell.prepare(states[None], torch.zeros(1, len(states), dtype=torch.int64))[0])
        distances = deviations(cell, states)
        assert (distances <= bound.deviation).all()
        singular = torch.linalg.svdvals(jacobians)
        assert (singular <= bound.upper).all()
        assert (singular >= bound.lower).all()
        found.append(float(distances.detach().max()) / bound.deviation)
    assert max(found) > 0.01  # the test can fail: a bound a hundred times smaller would be violated


def test_without_softness_there_is_no_bound_and_the_reason_says_what_helps():
    cell = make_cell(0.0)
    found = analysis.certificate(cell)
    assert math.isinf(found.deviation)
    assert "softness=" in found.reasons[0]
    assert found.ball is not None
    assert cell.spec.outside_lemmas
    assert deviations(cell, find_null_states(cell, 1e-6)).max() > 1e3  # it is not the proof that is missing
    assert not make_cell(0.1).spec.outside_lemmas
    assert_close(analysis.certificate(make_cell(0.1, beta=0.0)).deviation, 0.0)


def test_the_bound_is_the_formula_and_softness_lowers_it():
    cell = make_cell(0.1, heads=2)
    module = cell.directions[0]
    heads = analysis.head_constants.compute_head_constants(cell)
    by_hand = []
    for h, head in enumerate(heads):
        norms = [
            torch.linalg.matrix_norm(p.dense().detach()[3 * h : 3 * h + 3], 2)
            for p in (module.key_projection, module.value_projection)
        ]
        rate = sum(float((1 + norm**2 / 0.1**2).sqrt()) for norm in norms)
        assert 2 <= head.rotation_rate <= rate * (1 + 1e-9)
        by_hand.append(2 * head.radius * head.beta * rate)
    assert analysis.certificate(cell).deviation <= max(by_hand) * (1 + 1e-9)
    state_dict = cell.state_dict()
    softer = make_cell(1.0, heads=2)
    softer.load_state_dict(state_dict)
    assert analysis.certificate(softer).deviation < analysis.certificate(cell).deviation


def test_one_head_without_softness_is_the_layer_from_the_state():
    whole = ADPTNet.paper(5, beta=1.0, direction=directions.FromWholeState())
    plain = ADPTNet.paper(5, beta=1.0)
    plain.load_state_dict(whole.state_dict())
    x = torch.randn(2, 7, 5)
    assert_close(whole(x)[0], plain(x)[0])
    assert_close(analysis.certificate(whole).deviation, analysis.certificate(plain).deviation)


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1.0, 1e150])
def test_soft_directions_do_not_depend_on_the_length_of_the_state(scale):
    module = make_cell(0.3).directions[0]
    x = torch.randn(4, 6)
    for found, expected in zip(module(scale * x), module(x), strict=True):
        assert_close(found, expected)
        assert (found.norm(dim=-1) < 1).all()


def test_at_state_zero_values_and_gradients_are_finite():
    layer = ADPTNet.paper(6, beta=2.0, direction=directions.FromWholeState(heads=3, softness=0.1))
    x = torch.zeros(2, 5, 6, requires_grad=True)
    y, _ = layer(x)
    gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert not y.any()
    assert all(g.isfinite().all() for g in gradients)


def test_a_soft_rotation_has_a_smaller_angle():
    hard, soft = make_cell(0.0), make_cell(1.0)
    soft.load_state_dict(hard.state_dict())
    x = torch.randn(1, 1, 6)
    angles = [analysis.key_value_statistics(cell, x, state=torch.ones(1, 6)).angle for cell in (hard, soft)]
    assert (angles[1] < angles[0]).all()


def test_chunks_steps_resets_and_lengths_are_those_of_whole_sequences():
    layer = ADPTNet.paper(6, beta=1.0, direction=directions.FromWholeState(heads=2, softness=0.1))
    x, reset = torch.randn(2, 7, 6), torch.zeros(2, 7, dtype=torch.bool)
    reset[0, 3] = True
    whole, final = layer(x, reset=reset)
    first, state = layer(x[:, :4], reset=reset[:, :4])
    second, last = layer(x[:, 4:], state)
    assert_close(torch.cat((first, second), 1), whole)
    assert_close(last.state, final.state)
    assert_close(layer(x[:1, 3:])[0], whole[:1, 3:])
    outputs, state = [], None
    for t in range(7):
        y, state = layer.step(x[:, t], state)
        outputs.append(y)
    assert_close(torch.stack(outputs, 1), layer(x)[0])
    assert_close(layer(x, lengths=torch.tensor([7, 1]))[0][1:, :1], layer(x[1:, :1])[0])


def test_the_loop_runs_without_a_rotation_and_says_why():
    direction = directions.FromWholeState(heads=2)
    assert ADPTNet.paper(6, beta=1.0, direction=direction).cell.choose_scan("cpu").is_kernel
    layer = ADPTNet.paper(6, beta=0.1, direction=direction, conjugate=conjugates.Taylor())
    program = layer.cell.choose_scan("cpu")
    assert not program.is_kernel
    assert "FromWholeState" in program.reason
    assert "FromWholeState" in str(explain(layer, torch.randn(1, 3, 6)))


def test_specs():
    spec = cells.ADPTSpec(6, direction=directions.FromWholeState(heads=3, softness=0.2), beta=(0.1, 1.0, 2.0))
    assert Spec.from_json(spec.to_json()) == spec
    assert cells.ADPTSpec(6, direction=spec.direction, projection=projections.Kronecker((3, 2))).build()
    with pytest.raises(IncompatibleError, match="6"):
        cells.ADPTSpec(6, direction=spec.direction, projection=projections.Kronecker((2, 1)))
    with pytest.raises(IncompatibleError, match="state_size=9"):
        cells.ADPTSpec(7, direction=spec.direction)
    with pytest.raises(SpecError, match="softness"):
        directions.FromWholeState(softness=-1.0)
    assert cells.ADPTSpec(6, direction=spec.direction, conjugate=conjugates.Taylor()).build()
    with pytest.raises(IncompatibleError, match="certificate"):
        analysis.deviation_bounds(ADPTNet.paper(6, direction=spec.direction), torch.randn(6))
