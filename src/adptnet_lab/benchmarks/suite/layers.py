"""A whole layer with its input projection against the recurrent layers of torch, at the same width."""

from collections.abc import Callable

import torch
from torch import nn

from adptnet import conjugates
from adptnet.nn import ADPTNet

from ..benchmark import STANDARD_SIZES, Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side

__all__ = ["LAYERS"]

OURS = "ADPTNet"
MODELS: dict[str, Callable[[int], nn.Module]] = {
    OURS: ADPTNet.paper,  # K, V and B dense, EMA gain, no gate, no RoPE
    "Product(2)": lambda n: ADPTNet.paper(n, conjugate=conjugates.Product(2)),
    "diagonal SSM": lambda n: ADPTNet.paper(n, conjugate=conjugates.Diagonal(), beta=0.0),
    "nn.GRU": lambda n: nn.GRU(n, n, batch_first=True),
    "nn.LSTM": lambda n: nn.LSTM(n, n, batch_first=True),
    "nn.RNN(relu)": lambda n: nn.RNN(n, n, batch_first=True, nonlinearity="relu"),
}
TRAINING = {"nn.GRU": 0.5, "nn.LSTM": 0.5, "nn.RNN(relu)": 1.5}


def _make_case(size: Size, fast: bool) -> Case:
    torch.manual_seed(0)
    x, upstream = (torch.randn(size) for _ in range(2))
    x.requires_grad_()  # like the input of every layer but the first
    sides = []
    for name, make in MODELS.items():
        model = make(size.state)
        parameters = [p for p in model.parameters() if p.requires_grad]

        def forward(model: nn.Module = model) -> None:
            with torch.no_grad():
                model(x)

        def training(model: nn.Module = model, parameters: list[nn.Parameter] = parameters) -> None:
            torch.autograd.grad(model(x)[0], [x, *parameters], upstream)

        sides += [Side(f"{name}, forward", forward), Side(f"{name}, training", training)]
    goals = [_make_goal(name, "training", at_most) for name, at_most in TRAINING.items()]
    # "a total computational cost comparable to GRUs and LSTMs": up to twice the time counts as comparable
    goals += [_make_goal(name, "forward", 2.0, claim="section Discussion") for name in ("nn.GRU", "nn.LSTM")]
    return Case(sides, goals)


def _make_goal(name: str, kind: str, at_most: float, claim: str | None = None) -> Goal:
    """Return the goal that the time of our layer over that of another is `at_most`."""
    return Goal(
        f"{kind} / {name}", lambda f: f.cpu(f"{OURS}, {kind}") / f.cpu(f"{name}, {kind}"), at_most=at_most, claim=claim
    )


LAYERS = Benchmark(
    "A layer with its input projection against torch's recurrent layers, a diagonal SSM and two planes.",
    STANDARD_SIZES,
    (Size(1, 512, 64), Size(8, 128, 128)),
    ("adpt_scan",),
    _make_case,
)
