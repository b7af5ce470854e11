"""Layers, solvers and gradients on the GPU path: every decision is that for a CUDA tensor, kernels are interpreted."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import adptnet
from adptnet import directions, solvers, spectra
from adptnet.cells import SlowMemory
from adptnet.ops import _backends, _gpu
from adptnet.ops.adpt_scan import _autograd
from adptnet.recurrence.conjugates import Diagonal, Product, Taylor
from adptnet.recurrence.drive import InputPhase

LAYERS = {
    "plain": {},
    "complex, heads, Cayley": {
        "spectrum": spectra.LRURing(),
        "direction": directions.FromState(heads=2),
        "retraction": adptnet.retractions.Cayley(),
    },
    "ReLU, trainable beta per head": {
        "direction": directions.FromState(relu=True, heads=2),
        "beta": adptnet.TrainableBeta(0.5),
    },
    "LayerNorm and spikes": {"direction": directions.FromState(spike=0.1, layer_norm=True)},
    "from the input": {"direction": directions.FromInput()},
    "slow memory": {"memory": SlowMemory()},
    "beta per head": {"direction": directions.FromState(heads=2), "beta": (0.5, 0.25)},
    "fixed dot product, Taylor": {"direction": directions.FromState(dot=0.3), "conjugate": Taylor(2), "beta": 0.1},
    "diagonal": {"conjugate": Diagonal(), "beta": 0.0},
    "phase": {"phase": InputPhase(), "direction": directions.FromState(heads=2)},
    "negative": {"spectrum": spectra.Negative(spectra.S4DReal(), 0.5)},
}


def train_step(layer, x, **options):
    """Return outputs, final state and all gradients of one call."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y, state = layer(x, **options)
    (y.square().sum() + state[0].sum()).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "state": state[0].detach(), "x": x.grad, **gradients}


def compare(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = 1e-4 * max(1.0, float(value.abs().max()))
        torch.testing.assert_close(
            found[name], value, atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture
def on_both(monkeypatch, emulated_gpu):
    """Return a function that runs another one on the CPU path and on the GPU path, with the programs of the latter."""

    def run(function):
        monkeypatch.setattr(_gpu, "_emulated", False)
        expected = function()
        monkeypatch.setattr(_gpu, "_emulated", True)
        with _backends.record_runs() as runs:
            found = function()
        return found, expected, {run.backend.name for run in runs if run.phase == "forward"}

    return run


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_as_on_a_cpu(on_both, name):
    layer = adptnet.ADPTNet(4, dtype=torch.float32, solver=solvers.Sequential(), **LAYERS[name])
    x = torch.randn(2, 5, 4, dtype=torch.float32)
    found, expected, programs = on_both(lambda: train_step(layer, x))
    assert programs == {"linear_scan" if name == "diagonal" else "triton"}
    compare(found, expected)


def test_without_a_kernel_the_loop_runs_once_and_autograd_records_it(emulated_gpu, monkeypatch):
    """The operation would run the loop in the forward, and again in the backward."""

    def fail(*_):
        raise AssertionError("the operation was called")

    monkeypatch.setattr(_autograd, "scan", fail)
    layer = adptnet.ADPTNet(4, dtype=torch.float32, conjugate=Product(2), solver=solvers.Sequential())
    train_step(layer, torch.randn(1, 3, 4, dtype=torch.float32))


def test_lengths_resets_states_and_beta_of_a_call(on_both):
    layer = adptnet.ADPTNet(4, dtype=torch.float32)
    x = torch.randn(3, 5, 4, dtype=torch.float32)
    reset = torch.zeros(3, 5, dtype=torch.bool)
    reset[1, 2] = True
    with torch.no_grad():
        _, state = layer(x)
    calls = ({"lengths": torch.tensor([5, 3, 1])}, {"reset": reset}, {"state": state}, {"beta": torch.rand(3).float()})
    for options in calls:
        found, expected, programs = on_both(lambda options=options: train_step(layer, x, **options))
        assert programs == {"triton"}
        compare(found, expected)


@pytest.mark.parametrize(
    "solver", [solvers.ConvDEER(), solvers.ForwardDEER(), solvers.BlockWise(solvers.ConvDEER(), 2)]
)
def test_parallel_solvers_find_the_states_and_gradients_of_the_cpu(on_both, solver):
    layer = adptnet.ADPTNet(4, dtype=torch.float32, solver=solver)
    x = torch.randn(1, 4, 4, dtype=torch.float32)
    found, expected, _ = on_both(lambda: train_step(layer, x))
    compare(found, expected)


class Synchronizations(TorchDispatchMode):
    """Record the operations that would wait for the GPU or copy from the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.lift_fresh")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Record the operations that read all states."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.found = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and args[0].shape == self.shape:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_layer_computes_no_statistics_of_a_sequential_solve(emulated_gpu):
    layer = adptnet.ADPTNet(4, dtype=torch.float32, solver=solvers.Sequential())
    x = torch.randn(2, 5, 4, dtype=torch.float32)
    with torch.no_grad(), Launches(x.shape) as in_layer:
        y, _ = layer(x)
    with torch.no_grad(), Launches(x.shape) as in_solver:
        solution = solvers.Sequential()(layer.cell, x)
    statistics = {"aten.amax.default", "aten.amin.default"}
    assert statistics <= set(in_solver.found)
    assert not statistics & set(in_layer.found)
    torch.testing.assert_close(layer.cell.output(solution.states), y)


@pytest.mark.parametrize("name", ["plain", "from the input", "beta per head"])
def test_training_neither_synchronizes_nor_copies_from_the_host(emulated_gpu, name):
    layer = adptnet.ADPTNet(4, dtype=torch.float32, solver=solvers.Sequential(), **LAYERS[name])
    x = torch.randn(1, 2, 4, dtype=torch.float32)
    train_step(layer, x)  # fills caches
    with Synchronizations() as seen:
        train_step(layer, x)
    assert not seen.found
