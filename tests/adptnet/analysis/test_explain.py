"""`explain` names the program of each part of a call; counters inside the programs record what really runs."""

import contextlib

import pytest
import torch

import adptnet
from adptnet import (
    ADPTNet,
    Recurrent,
    adjoints,
    cells,
    conjugates,
    directions,
    drive,
    explain,
    retractions,
    solvers,
    spectra,
)
from adptnet.cells import torch_cell
from adptnet.cells.spiking import lif
from adptnet.errors import InputError
from adptnet.ops import adpt_step
from adptnet.ops.adpt_layer import LayerCall
from adptnet.ops.adpt_scan import cpu
from adptnet.recurrence import step
from adptnet.solvers.adjoints import Implicit
from adptnet.solvers.iterates import EvaluatedIterate
from adptnet.spec import spec

pytestmark = pytest.mark.skipif(not cpu.has_kernel(torch.float64), reason="no compiler, or ADPTNET_BACKEND=reference")

WIDTH = 6


@spec
class OtherExact(conjugates.Exact):
    """A subclass, which no kernel is written for."""


@spec
class OtherExponential(retractions.Exponential):
    """A subclass, which no kernel is written for."""


@pytest.fixture
def ran(monkeypatch):
    """The names of the programs that have run."""
    names = set()

    def count(name, owner, attribute):
        original = getattr(owner, attribute)

        def counted(*arguments, **options):
            names.add(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, attribute, counted)

    count("forward: cpu", cpu, "forward")
    count("backward: cpu", cpu, "backward")
    count("forward: adpt_layer", LayerCall, "run")
    count("forward: reference", adjoints.Unrolled, "run")
    count("forward: reference", adjoints.Checkpointed, "run")
    count("forward: torch", torch_cell, "run_layer")
    count("forward: linear_scan", lif, "linear_scan")
    count("iteration: cpu", adpt_step, "newton_pass")
    count("iteration: reference", EvaluatedIterate, "__init__")
    count("jacobian: cpu", adpt_step, "Jacobians")
    count("jacobian: closed form", step, "step_jacobian")
    count("jacobian: reference", torch.func, "jacfwd")
    count("backward: implicit", Implicit, "attach")
    return names


def run_call(layer, x, call, ran):
    """Return the programs of the forward pass and those of the backward pass."""
    ran.clear()
    outputs = layer(x, **call)[0]
    forward = set(ran)
    ran.clear()
    if outputs.requires_grad:
        outputs.sum().backward()
        layer.zero_grad()
    # `attach` runs in the forward pass and defines the backward pass.
    implicit = {"backward: implicit"} & forward if outputs.requires_grad else set()
    return forward - {"backward: implicit"}, ({"backward: cpu"} & ran) | implicit


def assert_agrees(explanation, forward, backward):
    """Assert that the programs that an explanation names are those that ran."""
    named = {f"{part}: {program.name}" for part, program in explanation.programs.items()}
    assert {name for name in named if not name.startswith("backward")} - {"forward: parallel"} == forward
    assert {name for name in named if name.startswith("backward")} - {"backward: autograd"} == backward


def hooked():
    layer = ADPTNet.paper(WIDTH)
    layer.cell.directions[0].key_projection.register_forward_hook(lambda *_: None)
    return layer


def gru():
    return Recurrent(cells.from_torch(torch.nn.GRUCell(WIDTH, WIDTH)))


# Layer, arguments of the call, the programs of its parts, and a word of the reason for the first
CASES = {
    "default": (lambda: ADPTNet.paper(WIDTH), {}, {"forward": "cpu", "backward": "cpu"}, "supports"),
    "zero beta": (lambda: ADPTNet.paper(WIDTH, beta=0.0), {}, {"forward": "cpu", "backward": "cpu"}, "supports"),
    "diagonal": (
        lambda: ADPTNet.paper(WIDTH, beta=0.0, conjugate=conjugates.Diagonal()),
        {},
        {"forward": "cpu", "backward": "cpu"},
        "supports",
    ),
    "slow memory": (
        lambda: adptnet.CoupledADPTNet(WIDTH),
        {},
        {"forward": "cpu", "backward": "cpu"},
        "supports",
    ),
    "Checkpointed": (
        lambda: ADPTNet.paper(WIDTH),
        {"adjoint": adjoints.Checkpointed()},
        {"forward": "cpu", "backward": "cpu"},
        "supports",
    ),
    "Implicit": (
        lambda: ADPTNet.paper(WIDTH),
        {"adjoint": adjoints.Implicit()},
        {"forward": "cpu", "backward": "implicit"},
        "supports",
    ),
    "two planes": (
        lambda: ADPTNet.paper(WIDTH, conjugate=conjugates.Product(2)),
        {},
        {"forward": "cpu", "backward": "cpu"},
        "supports",
    ),
    "LayerNorm over heads": (
        lambda: ADPTNet.paper(WIDTH, direction=directions.FromState(heads=2, layer_norm=True)),
        {},
        {"forward": "reference", "backward": "autograd"},
        "LayerNorm",
    ),
    "subclassed conjugate": (
        lambda: ADPTNet.paper(WIDTH, conjugate=OtherExact()),
        {},
        {"forward": "reference", "backward": "autograd"},
        "OtherExact",
    ),
    "subclassed retraction": (
        lambda: ADPTNet.paper(WIDTH, retraction=OtherExponential()),
        {},
        {"forward": "reference", "backward": "autograd"},
        "OtherExponential",
    ),
    "hooked K": (hooked, {}, {"forward": "reference", "backward": "autograd"}, "hooks"),
    "dt": (
        lambda: ADPTNet.paper(WIDTH),
        {"dt": torch.ones(2, 70)},
        {"forward": "reference", "backward": "autograd"},
        "dt=",
    ),
    "beta of each sequence": (
        lambda: ADPTNet.paper(WIDTH),
        {"beta": torch.ones(2)},
        {"forward": "cpu", "backward": "cpu"},
        "supports",
    ),
    "stateful": (
        lambda: ADPTNet.paper(WIDTH, conjugate=conjugates.Stateful()),
        {},
        {"forward": "reference", "backward": "autograd"},
        "StatefulCell has no fused operation",
    ),
    "GRU of torch": (gru, {}, {"forward": "torch", "backward": "autograd"}, "torch.nn"),
    "checkpointed GRU": (
        gru,
        {"adjoint": adjoints.Checkpointed()},
        {"forward": "reference", "backward": "autograd"},
        "Checkpointed",
    ),
    "leaky integrator": (
        lambda: Recurrent(cells.LeakyIntegrator(WIDTH)),
        {},
        {"forward": "linear_scan", "backward": "autograd"},
        "linear",
    ),
    "spikes with reset": (
        lambda: Recurrent(cells.SpikingADPT(cells.ADPTSpec(WIDTH), reset="subtract")),
        {},
        {"forward": "reference", "backward": "autograd"},
        "spikes",
    ),
    "Auto": (
        lambda: ADPTNet.paper(WIDTH),
        {"solver": solvers.Auto()},
        {"forward": "cpu", "backward": "cpu"},
        "supports",
    ),
    "Auto without a kernel": (
        lambda: ADPTNet.paper(WIDTH, direction=directions.FromState(heads=2, layer_norm=True)),
        {"solver": solvers.Auto()},
        {"forward": "parallel", "iteration": "reference", "backward": "implicit"},
        "Auto chose it",
    ),
}
PARALLEL = {
    solvers.ConvDEER(): {"iteration": "cpu"},
    solvers.ForwardDEER(): {"iteration": "cpu"},
    solvers.ConvDEER(tiles=16): {"iteration": "cpu"},
    solvers.ConvDEER(solvers.Scale(0.99)): {"iteration": "reference"},
    solvers.BlockWise(solvers.ConvDEER(), num_blocks=3): {"iteration": "cpu"},
    solvers.DEER(): {"iteration": "reference", "jacobian": "cpu"},
    solvers.QuasiDEER(): {"iteration": "reference", "jacobian": "closed form"},
    solvers.KoopmanDEER(): {"iteration": "reference"},
    solvers.Jacobi(): {"iteration": "reference"},
    solvers.Picard(): {"iteration": "reference"},
}


@pytest.mark.parametrize("name", CASES)
def test_explain_names_the_programs_that_run(name, ran):
    make, call, programs, word = CASES[name]
    layer, x = make(), torch.randn(2, 70, WIDTH)
    explanation = explain(layer, x, **call)
    assert {part: program.name for part, program in explanation.programs.items()} == programs
    assert word in explanation.programs["forward"].reason
    assert_agrees(explanation, *run_call(layer, x, call, ran))


@pytest.mark.parametrize("solver", PARALLEL, ids=repr)
def test_explain_names_the_programs_of_an_iteration(solver, ran):
    layer, x = ADPTNet.paper(WIDTH), 0.3 * torch.randn(2, 70, WIDTH)
    explanation = explain(layer, x, solver=solver)
    names = {part: program.name for part, program in explanation.programs.items()}
    assert names == {"forward": "parallel", **PARALLEL[solver], "backward": "implicit"}
    assert repr(solver) in explanation.programs["forward"].description
    assert "solvers.Sequential()" in explanation.advice[0]
    assert_agrees(explanation, *run_call(layer, x, {"solver": solver}, ran))


@pytest.mark.parametrize(
    ("axes", "word"),
    [
        ({"spectrum": spectra.S4DInv()}, "real spectrum"),
        ({"start": True}, "start"),
        ({"conjugate": OtherExact()}, "Other"),
    ],
    ids=repr,
)
def test_explain_says_why_an_iteration_has_no_kernel(axes, word, ran):
    layer, x = ADPTNet.paper(WIDTH, **axes), 0.3 * torch.randn(2, 70, WIDTH)
    explanation = explain(layer, x, solver=solvers.ConvDEER())
    assert explanation.programs["iteration"].name == "reference"
    assert word in explanation.programs["iteration"].reason
    assert_agrees(explanation, *run_call(layer, x, {"solver": solvers.ConvDEER()}, ran))


def test_jacobians_without_a_closed_form_are_differentiated(ran):
    layer, x = ADPTNet.paper(WIDTH, direction=directions.FromState(heads=2)), 0.3 * torch.randn(1, 20, WIDTH)
    explanation = explain(layer, x, solver=solvers.DEER())
    assert explanation.programs["jacobian"].name == "reference"
    assert "torch.func" in explanation.programs["jacobian"].reason
    assert "one head" in explanation.programs["jacobian"].reason  # why the kernel did not run
    assert_agrees(explanation, *run_call(layer, x, {"solver": solvers.DEER()}, ran))


@pytest.mark.parametrize("steps", [8, 70])
def test_without_gradients_only_the_forward_pass_runs(steps, ran):
    layer, x = ADPTNet.paper(WIDTH), torch.randn(2, steps, WIDTH)
    with torch.no_grad():
        explanation = explain(layer, x)
        assert_agrees(explanation, *run_call(layer, x, {}, ran))
    assert {part: program.name for part, program in explanation.programs.items()} == {
        "forward": "adpt_layer" if steps == 8 else "cpu"
    }
    assert not explanation.advice
    assert "No faster way is known" in str(explanation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_runs_the_kernel_in_single_precision(dtype, ran):
    layer, x = ADPTNet.paper(WIDTH, dtype=dtype), torch.randn(2, 70, WIDTH).to(dtype)
    explanation = explain(layer, x)
    assert explanation.programs["forward"].name == explanation.programs["backward"].name == "cpu"
    assert ("recurrence in torch.float32" in explanation.call) == (dtype.itemsize == 2)
    assert_agrees(explanation, *run_call(layer, x, {}, ran))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("solver", [solvers.Sequential(), solvers.ConvDEER()], ids=repr)
def test_the_environment_variable_is_the_reason(monkeypatch, solver, grad, ran):
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    layer, x = ADPTNet.paper(WIDTH), 0.3 * torch.randn(2, 8, WIDTH)
    with contextlib.nullcontext() if grad else torch.no_grad():
        explanation = explain(layer, x, solver=solver)
        assert_agrees(explanation, *run_call(layer, x, {"solver": solver}, ran))
    part = "iteration" if isinstance(solver, solvers.Newton) else "forward"
    assert explanation.programs[part].name == "reference"
    assert explanation.programs[part].reason == "ADPTNET_BACKEND=reference."
    assert "Unset ADPTNET_BACKEND." in explanation.advice


def test_auto_is_advised_where_it_would_not_loop():
    direction = directions.FromState(heads=2, layer_norm=True)
    layer, x = ADPTNet.paper(WIDTH, direction=direction), torch.randn(1, 200, WIDTH)
    explanation = explain(layer, x)
    assert any("solvers.Auto()" in advice and "ConvDEER" in advice for advice in explanation.advice)
    assert not any("Auto" in advice for advice in explain(layer, x[:, :20]).advice)  # it would loop, too


@pytest.mark.parametrize("steps", [8, 70])
def test_why_a_short_call_is_not_prepared_is_named(steps):
    with torch.no_grad():
        advice = explain(ADPTNet.paper(WIDTH, rope=drive.RoPE()), torch.randn(2, steps, WIDTH)).advice
    assert any("rope=" in sentence for sentence in advice) == (steps == 8)


def test_a_short_call_with_gradients_is_explained_by_the_programs_that_run(ran):
    layer, x = ADPTNet(WIDTH), torch.randn(2, 8, WIDTH)
    explanation = explain(layer, x)
    assert {part: program.name for part, program in explanation.programs.items()} == {
        "forward": "cpu",
        "backward": "cpu",
    }
    assert "short" in explanation.programs["forward"].reason
    assert_agrees(explanation, *run_call(layer, x, {}, ran))


def test_solvers_that_a_cell_gains_nothing_from_are_not_advised():
    advice = explain(gru(), 0.3 * torch.randn(2, 20, WIDTH), solver=solvers.DEER()).advice
    assert not any("ConvDEER" in sentence for sentence in advice)


def test_explain_leaves_no_trace():
    layer, x = ADPTNet.paper(WIDTH), torch.randn(2, 70, WIDTH, requires_grad=True)
    before = torch.get_rng_state()
    explain(layer, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert x.grad is None
    assert all(p.grad is None for p in layer.parameters())


def test_the_text_is_in_words():
    text = str(explain(hooked(), torch.randn(2, 70, WIDTH)))
    for words in (
        "forward",
        "a loop over time in eager PyTorch",
        "because K or V has hooks",
        "faster",
        "Remove the hooks",
    ):
        assert words in text


def test_explain_takes_one_layer_and_a_tensor():
    with pytest.raises(InputError, match="one recurrent layer"):
        explain(adptnet.Stack(ADPTNet.paper(WIDTH).spec, num_layers=2), torch.randn(2, 7, WIDTH))
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3, WIDTH)])
    with pytest.raises(InputError, match="padded tensor"):
        explain(ADPTNet.paper(WIDTH), packed)
