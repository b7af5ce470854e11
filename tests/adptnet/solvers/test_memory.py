"""Bytes of live tensors in parallel solves. The resident memory also depends on the fragmentation of the heap."""

import pytest
import torch
from torch.autograd.profiler import profile

from adptnet import ADPTNet, solvers
from adptnet.errors import NotConvergedWarning
from adptnet.ops import _buffers

pytestmark = pytest.mark.filterwarnings(f"ignore::{NotConvergedWarning.__module__}.NotConvergedWarning")


def peak_live_bytes(work):
    """Return the largest number of bytes that all tensors allocated in `work` had at a time."""
    with profile(profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def make_solver(name, iterations):
    return getattr(solvers, name)(fixed_iterations=iterations, on_failure=solvers.Return())


@pytest.mark.parametrize("name", ["ConvDEER", "ForwardDEER", "QuasiDEER", "DEER", "Jacobi"])
def test_the_memory_of_a_solve_does_not_grow_with_iterations(name, monkeypatch):
    monkeypatch.setattr(_buffers, "MIN_POOLED_BYTES", 1 << 62)  # the profiler does not see the pool
    batch, steps, width = 2, 64, 16
    layer, x = ADPTNet.paper(width, beta=0.0125, dtype=torch.float32), torch.randn(batch, steps, width).float()

    @torch.no_grad()
    def solve(iterations):
        return layer(x, solver=make_solver(name, iterations))

    solve(2)
    few, many = (peak_live_bytes(lambda count=count: solve(count)) for count in (5, 15))
    assert few > 4 * x.numel()
    # The history has 12 bytes per sequence and iteration. One float32 per step would be 256 bytes.
    assert abs(many - few) <= 64 * batch * 10, (few, many)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ConvDEER", "ForwardDEER"])
def test_the_memory_of_a_training_step_is_at_most_ten_trajectories(name, monkeypatch):
    monkeypatch.setattr(_buffers, "MIN_POOLED_BYTES", 1 << 62)
    layer, x = ADPTNet.paper(64, beta=0.0125, dtype=torch.float32), torch.randn(16, 2048, 64).float()

    def train(x, iterations):
        layer(x, solver=make_solver(name, iterations))[0].square().mean().backward()

    train(x[:1, :64], 2)
    assert peak_live_bytes(lambda: train(x, 5)) <= 10 * 4 * x.numel()
