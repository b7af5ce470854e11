"""Times of layers, solvers and training on a device, against other recurrent layers.

Each number is the median of several runs, each between two synchronizations of the device, after runs that compile and
warm up. A loop of many launches is timed over its first steps and scaled.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adptnet import directions, solvers
from adptnet.nn import ADPTNet
from adptnet.ops.adpt_scan import Constants, Form
from adptnet.ops.adpt_scan import reference as scan_reference

__all__ = ["SIZES", "Time", "time_device"]

# batch, steps, state dimension
SIZES: tuple[tuple[int, int, int], ...] = (
    (16, 1024, 64),
    (64, 1024, 128),
    (16, 1024, 256),
    (16, 1024, 512),
    (1, 16384, 64),
)
LOOP_STEPS = 32  # timed steps of the eager loop
REPEATS = 5


class Time(NamedTuple):
    """The time of one side at one size, in milliseconds; or why it was not measured."""

    side: str
    size: tuple[int, int, int]
    forward: float | None
    training: float | None
    skipped: str = ""


def time_device(device: torch.device, until: float, sizes: Sequence[tuple[int, int, int]] = SIZES) -> Iterator[Time]:
    """Time every side at every size.

    Args:
        device: The device.
        until: No measurement starts after this time of `time.monotonic`.
        sizes: The sizes.
    """
    for size in sizes:
        for side, make in SIDES.items():
            if time.monotonic() > until:
                yield Time(side, size, None, None, "the time was over: pass a larger --minutes")
                continue
            try:
                torch.manual_seed(0)
                run, scale = make(size, device)
                x = torch.randn(size, dtype=torch.float32, device=device, requires_grad=True)
                forward = scale * _time(functools.partial(_forward, run, x), device)
                training = scale * _time(functools.partial(_train, run, x), device)
                yield Time(side, size, forward, training)
            except ImportError as error:
                yield Time(side, size, None, None, f"not installed: {error}")
            except Exception as error:
                yield Time(side, size, None, None, f"{type(error).__name__}: {error}"[:300])


def _forward(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        run(x)


def _train(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x.grad = None
    run(x).sum().backward()


def _time(function: Callable[[], None], device: torch.device) -> float:
    """Return the median time of a function in milliseconds."""
    found = []
    for repeat in range(REPEATS + 2):
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        if repeat > 1:
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Size = tuple[int, int, int]
Made = tuple[Callable[[Tensor], Tensor], float]  # the function, and the factor on its time


def _adptnet(solver: solvers.Solver, **axes: Any) -> Callable[[Size, torch.device], Made]:
    def make(size: Size, device: torch.device) -> Made:
        layer = ADPTNet(size[2], dtype=torch.float32, solver=solver, **axes).to(device)
        return lambda x: layer(x)[0], 1.0

    return make


def _torch_layer(kind: Callable[..., nn.Module]) -> Callable[[Size, torch.device], Made]:
    def make(size: Size, device: torch.device) -> Made:
        layer = kind(size[2], size[2], batch_first=True, dtype=torch.float32).to(device)
        return lambda x: layer(x)[0], 1.0

    return make


def _eager_loop(size: Size, device: torch.device) -> Made:
    batch, steps, n = size
    few = min(steps, LOOP_STEPS)
    like: dict[str, Any] = {"dtype": torch.float32, "device": device}
    weight = torch.randn(1, 2, n, n, **like) / n**0.5
    constants = Constants(torch.rand(n, **like), None, weight.requires_grad_(), None, torch.full((1,), 0.125, **like))
    state = torch.zeros(batch, n, **like)
    return lambda x: scan_reference.adpt_scan(x[:, :few], state, constants, Form()), steps / few


def _gated_delta_net(size: Size, device: torch.device) -> Made:
    from fla.layers import GatedDeltaNet

    head = min(64, size[2])
    layer = GatedDeltaNet(hidden_size=size[2], head_dim=head, num_heads=size[2] // head, expand_v=1)
    layer = layer.to(device, torch.bfloat16)
    return lambda x: layer(x.to(torch.bfloat16))[0].float(), 1.0


def _pararnn(size: Size, device: torch.device) -> Made:
    from pararnn import NewtonConfig, newton_apply

    from ..peers.pararnn_torch import Cell

    cell = Cell(nn.GRUCell(size[2], size[2], dtype=torch.float32)).to(device)
    config = NewtonConfig(max_iters=size[1], residual_atol=1e-6, residual_fail=None)

    def run(x: Tensor) -> Tensor:
        states: Tensor = newton_apply(cell, x, config)
        return states

    return run, 1.0


SIDES: dict[str, Callable[[Size, torch.device], Made]] = {
    "ADPTNet": _adptnet(solvers.Sequential()),
    "ADPTNet, 4 heads": _adptnet(solvers.Sequential(), direction=directions.FromState(heads=4)),
    "ADPTNet, directions from the input": _adptnet(solvers.Sequential(), direction=directions.FromInput()),
    "ADPTNet, Conv-DEER": _adptnet(solvers.ConvDEER()),
    "ADPTNet, Forward-DEER": _adptnet(solvers.ForwardDEER()),
    "nn.GRU": _torch_layer(nn.GRU),
    "nn.LSTM": _torch_layer(nn.LSTM),
    "eager loop": _eager_loop,
    "flash-linear-attention, GatedDeltaNet in bfloat16": _gated_delta_net,
    "pararnn-torch, GRU": _pararnn,
}
