"""The input-driven phase: what it changes of a layer, and what it leaves as it is."""

import pytest
import torch
from torch.testing import assert_close

from adptnet import ADPTNet, analysis, cells, conjugates, directions, drive, explain, projections, solvers, spectra
from adptnet.cells.structure import compute_jacobian, compute_jacobian_blocks, make_jacobian_chunks
from adptnet.errors import IncompatibleError
from adptnet.ops.adpt_scan import Form, diagonal, explain_unsupported_gpu
from adptnet.ops.lti_convolution import lti_convolution
from adptnet.recurrence.conjugates import nearest_blocks
from adptnet.spec import Spec
from support import brute
from support.members import build, name_of, phased_layers

PHASE = drive.InputPhase(0.7)


def tie_pairs(layer):
    """Give the two eigenvalues of each pair the same value."""
    with torch.no_grad():
        for parameter in layer.cell.spectrum.parameters():
            parameter.copy_(parameter[::2].repeat_interleave(2))
    return layer


def states_and_drive(cell, count=5):
    inputs = torch.randn(1, count, cell.input_size)
    return torch.randn(1, count, cell.state_size), cell.prepare(inputs, torch.arange(count)[None])


def test_without_angles_the_layer_is_the_one_without_a_phase():
    phased = ADPTNet.paper(6, beta=1.0, phase=drive.InputPhase(std=0.0))
    plain = ADPTNet.paper(6, beta=1.0)
    plain.load_state_dict({k: v for k, v in phased.state_dict().items() if "phase" not in k})
    x = torch.randn(2, 9, 6)
    assert_close(phased(x)[0], plain(x)[0])


def test_a_constant_phase_on_tied_pairs_is_a_complex_spectrum():
    cell = tie_pairs(ADPTNet.paper(6, beta=0.0, phase=drive.InputPhase(0.0), spectrum=spectra.S4DReal())).cell
    angles = torch.tensor([0.3, -1.2, 2.0])
    with torch.no_grad():
        cell.phase.bias.copy_(angles)
    states, drives = states_and_drive(cell)
    eigenvalues = torch.polar(cell.spectrum().real[::2], angles)
    moved = torch.view_as_real(eigenvalues * torch.view_as_complex(states.unflatten(-1, (-1, 2)))).flatten(-2)
    assert_close(cell.step(states, drives), moved + drives[..., :6])


@pytest.mark.parametrize("axes", phased_layers, ids=name_of)
def test_jacobians_are_those_of_autograd(axes):
    cell = build({"width": 6, "phase": PHASE, **axes}).cell
    states, drives = states_and_drive(cell)
    expected = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda x, d=d: cell.step(x, d), x)
            for x, d in zip(states[0], drives[0], strict=True)
        ]
    )
    assert_close(compute_jacobian(cell, states, drives)[0], expected, atol=1e-10, rtol=1e-9)
    assert_close(make_jacobian_chunks(cell, states, drives)(1, 4)[0], expected[1:4], atol=1e-10, rtol=1e-9)
    if cell.output_size is None:  # without a slow memory
        blocks = compute_jacobian_blocks(cell, states, drives)
        assert_close(blocks.dense()[0], nearest_blocks(expected, pairs=True).dense(), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("size", [2, 6, 14])
def test_chunks_steps_resets_and_lengths_are_those_of_whole_sequences(size):
    layer = ADPTNet.paper(size, beta=1.0, phase=PHASE)
    x, reset = torch.randn(3, 7, size), torch.zeros(3, 7, dtype=torch.bool)
    reset[0, 3] = reset[1, 0] = True
    whole, final = layer(x, reset=reset)
    first, state = layer(x[:, :4], reset=reset[:, :4])
    second, last = layer(x[:, 4:], state, reset=reset[:, 4:])
    assert_close(torch.cat((first, second), 1), whole)
    assert_close(last.state, final.state)
    assert_close(layer(x[:1, 3:])[0], whole[:1, 3:])
    outputs, state = [], None
    for t in range(7):
        y, state = layer.step(x[:, t], state)
        outputs.append(y)
    assert_close(torch.stack(outputs, 1), layer(x)[0])
    ragged, ended = layer(x, lengths=torch.tensor([7, 1, 4]))
    assert_close(ragged[2, :4], layer(x[2:, :4])[0][0])
    assert_close(ended.state[1:2], layer(x[1:2, :1])[1].state)


def test_the_length_of_a_step_multiplies_the_angle():
    layer = ADPTNet.paper(6, beta=1.0, phase=PHASE)
    x, dt = torch.randn(2, 5, 6), torch.rand(2, 5) * 3
    dt[:, 2] = 0
    state = torch.randn(2, 6)
    outputs, _ = layer(x, layer.initial_state(2)._replace(state=state), dt=dt)
    assert_close(outputs, brute.trajectory(layer, x, state, dt)[1], atol=1e-9, rtol=0)
    assert_close(outputs[:, 2], outputs[:, 1])  # a step of length zero changes nothing


@pytest.mark.parametrize("axes", phased_layers, ids=name_of)
def test_a_kernel_or_its_absence_with_the_reason(axes):
    layer = build({"width": 6, "phase": PHASE, **axes})
    program = layer.cell.choose_scan("cpu")
    if "start" in axes or "Product" in str(axes):
        assert "start" in program.reason or "Product" in program.reason
    else:
        assert program.is_kernel or "compil" in program.reason or "ADPTNET_BACKEND" in program.reason
    assert explain(layer, torch.randn(1, 3, 6))


def test_gpus_run_the_loop_and_say_why():
    form = Form(phased=True)
    reason = explain_unsupported_gpu(form, 8, paired=False, slow=False, dtype=torch.float32, device="cuda")
    assert reason is not None
    assert not diagonal.is_diagonal(form._replace(rotates=False), slow=False)


@pytest.mark.parametrize("spectrum", [spectra.S4DInv(), spectra.Timescales()], ids=["pairs", "real"])
def test_the_linear_part_is_exact_so_that_beta_zero_takes_one_iteration(spectrum):
    layer = ADPTNet.paper(6, beta=0.0, phase=PHASE, spectrum=spectrum)
    x = torch.randn(2, 40, 6)
    expected = layer.solve(x, solver=solvers.Sequential()).states
    for solver in (solvers.ConvDEER(), solvers.ForwardDEER()):
        solution = layer.solve(x, solver=solver)
        assert_close(solution.states, expected, atol=1e-6, rtol=0)
        assert solution.iterations.max() == 1


def test_bounds_are_those_of_the_layer_without_a_phase():
    axes = {"beta": 1.0, "projection": projections.Orthogonal(), "spectrum": spectra.Negative(spectra.S4DReal(), 0.5)}
    phased = ADPTNet.paper(6, phase=PHASE, **axes)
    plain = ADPTNet.paper(6, **axes)
    plain.load_state_dict({k: v for k, v in phased.state_dict().items() if "phase" not in k})
    found, expected = analysis.certificate(phased), analysis.certificate(plain)
    assert found.holds
    assert found.deviation == expected.deviation < float("inf")
    assert found.lipschitz == expected.lipschitz
    assert_close(found.upper_sums, expected.upper_sums)
    cell = phased.cell
    states, drives = states_and_drive(cell, 300)
    jacobians, conjugates_ = cell.jacobian(states, drives), cell.conjugate(states, drives).dense()
    distances = torch.linalg.matrix_norm(jacobians - conjugates_, 2)
    assert 0.1 * found.deviation < distances.max() <= found.deviation
    assert torch.linalg.svdvals(jacobians).max() <= found.lipschitz
    x = torch.randn(1, 60, 6)
    exponents = analysis.lyapunov_exponents(phased, x).exponents.flatten()
    assert (exponents.cumsum(0) <= found.upper_sums + 1e-9).all()


def test_exponents_of_tied_pairs_are_prescribed():
    layer = tie_pairs(ADPTNet.paper(4, beta=0.0, phase=PHASE, spectrum=spectra.S4DReal(dt_min=0.1, dt_max=1.0)))
    exponents = analysis.lyapunov_exponents(layer, torch.randn(1, 200, 4)).exponents.flatten()
    prescribed = layer.cell.spectrum.log_modulus().sort(descending=True).values
    assert_close(exponents.sort(descending=True).values, prescribed, atol=0.02, rtol=0)


def test_local_errors_are_those_of_the_solvers():
    layer = ADPTNet.paper(6, beta=1.0, phase=PHASE)
    x = torch.randn(1, 5, 6)
    errors = analysis.local_errors(layer, x)
    cell = layer.cell
    states = layer.solve(x).states
    entering = torch.cat((torch.zeros(1, 1, 6), states[:, :-1]), 1)
    drives = cell.prepare(x, torch.arange(5)[None])
    structure = cell.structure()
    full = cell.jacobian(entering, drives) @ entering.unsqueeze(-1)
    for name, transition in (
        ("conv_to_deer", structure.linear(drives)),
        ("forward_to_deer", structure.forward(entering, drives)),
    ):
        expected = (transition.mv(entering) - full.squeeze(-1)).norm(dim=-1)
        assert_close(getattr(errors, name), expected, atol=1e-10, rtol=0)


def test_specs_of_before_load_and_what_does_not_fit_is_rejected():
    spec = cells.ADPTSpec(6, phase=PHASE)
    assert Spec.from_json(spec.to_json()) == spec
    old = cells.ADPTSpec(6).to_json()
    assert '"phase": null' in old
    assert Spec.from_json(old.replace('"phase": null, ', "").replace(', "phase": null', "")) == cells.ADPTSpec(6)
    with pytest.raises(IncompatibleError, match="state_size=8"):
        cells.ADPTSpec(7, phase=PHASE)
    with pytest.raises(IncompatibleError, match="state_size=8"):
        cells.ADPTSpec(6, phase=PHASE, direction=directions.FromState(heads=2))
    with pytest.raises(IncompatibleError, match="phase"):
        cells.ADPTSpec(6, phase=PHASE, conjugate=conjugates.Stateful())
    layer, mean = ADPTNet.paper(6, phase=PHASE), solvers.linearizations.MeanRotation
    with pytest.raises(IncompatibleError, match="KoopmanDEER"):
        layer.solve(torch.randn(1, 5, 6), solver=solvers.KoopmanDEER(mean=mean))
    with pytest.raises(IncompatibleError, match="ConvDEER"):
        layer.solve(torch.randn(1, 5, 6), solver=solvers.ConvDEER(by=lti_convolution))
