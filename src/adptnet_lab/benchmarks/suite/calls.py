"""Short calls, step by step or a few steps at a time, against the cells and layers of torch."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from adptnet import cells
from adptnet.nn import ADPTNet, LayerSpec, RecurrentLayer

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side

__all__ = ["CALLS"]

LAYERS: dict[str, Callable[[int], RecurrentLayer]] = {
    "default": ADPTNet,  # with an input gate
    "without gate": lambda n: LayerSpec(cells.ADPTSpec(n)).build(),
}
BATCHES, STEPS = (1, 4, 16, 64), (1, 2, 4, 8, 16)
LARGEST = 64  # state dimension up to which calls of several steps, and training, have goals


def _make_case(size: Size, fast: bool) -> Case:
    torch.manual_seed(0)
    n = size.state
    x, upstream = torch.randn(size), torch.randn(size)
    leaf = x.clone().requires_grad_()  # like the input of every layer but the first
    gru, cell = nn.GRU(n, n, batch_first=True), nn.GRUCell(n, n)
    sides = [*_make_sides("nn.GRU", gru, x, leaf, upstream)]
    goals = []
    if size.steps == 1:
        hidden = torch.zeros(size.batch, n)
        sides.append(Side("nn.GRUCell, step", _without_gradients(lambda: cell(x[:, 0], hidden))))
    for name, make in LAYERS.items():
        layer = make(n)
        sides += _make_sides(name, layer, x, leaf, upstream)
        if n <= LARGEST:
            goals += [_make_goal(name, kind, "nn.GRU", kind, 1.5) for kind in ("forward", "training")]
        if size.steps == 1:
            stream, state = layer.streaming(size.batch), layer.initial_state(size.batch)
            sides += [
                Side(f"{name}, step", _without_gradients(partial(layer.step, x[:, 0], state))),
                Side(f"{name}, stream", _without_gradients(partial(stream, x[:, 0]))),
            ]
            goals += [_make_goal(name, "stream", "nn.GRUCell", "step", 1.5)]
            goals += [_make_goal(name, "step", "nn.GRUCell", "step", 4.0)]
    return Case(sides, goals)


def _make_sides(name: str, model: nn.Module, x: Tensor, leaf: Tensor, upstream: Tensor) -> list[Side]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        Side(f"{name}, forward", _without_gradients(lambda: model(x))),
        Side(f"{name}, training", lambda: torch.autograd.grad(model(leaf)[0], [leaf, *parameters], upstream)),
    ]


def _without_gradients(run: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            run()

    return call


def _make_goal(ours: str, kind: str, other: str, other_kind: str, at_most: float) -> Goal:
    return Goal(
        f"{ours}, {kind} / {other}",
        lambda f: f.cpu(f"{ours}, {kind}") / f.cpu(f"{other}, {other_kind}"),
        at_most=at_most,
    )


CALLS = Benchmark(
    "Short calls of a layer, the default one and one without an input gate, against nn.GRUCell and nn.GRU.",
    (*(Size(batch, steps, 64) for steps in STEPS for batch in BATCHES), Size(1, 1, 256)),
    (Size(1, 1, 16),),
    ("adpt_scan",),
    _make_case,
    threads=(1,),
)
