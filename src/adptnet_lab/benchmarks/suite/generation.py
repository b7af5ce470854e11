"""Tokens per second of `SequenceModel.generate`, against the same model with `nn.GRU` in place of its layers."""

from functools import partial

import torch
from torch import Tensor, nn

from adptnet.cells import ADPTState
from adptnet.nn import ADPTNet, SequenceModel

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side

__all__ = ["GENERATION"]

DEPTH, VOCABULARY, PROMPT = 2, 96, 8


class _GRULayer(nn.Module):
    """`nn.GRU` with the calls of a recurrent layer that a model makes.

    Args:
        width: Features in and out.
    """

    def __init__(self, width: int):
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(
        self, x: Tensor, state: ADPTState | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, ADPTState]:
        outputs, final = self.gru(x, None if state is None else state.state.unsqueeze(0))
        position = torch.full((x.shape[0],), x.shape[1]) if state is None else state.position + x.shape[1]
        return outputs, ADPTState(final[0], position)

    def step(self, x: Tensor, state: ADPTState | None = None) -> tuple[Tensor, ADPTState]:
        """Run one step.

        Args:
            x: (batch, width).
            state: The state that an earlier call returned.
        """
        outputs, after = self(x.unsqueeze(1), state)
        return outputs.squeeze(1), after


def _make_case(size: Size, fast: bool) -> Case:
    torch.manual_seed(0)
    prompt = torch.randint(VOCABULARY, (size.batch, PROMPT))
    layer = ADPTNet(size.state).spec
    assert layer is not None
    models = {name: SequenceModel(layer, depth=DEPTH, vocabulary=VOCABULARY).eval() for name in ("ADPTNet", "nn.GRU")}
    for block in models["nn.GRU"].blocks:
        block.layer = _GRULayer(size.state)
    sides = [Side(name, partial(model.generate, prompt, size.steps)) for name, model in models.items()]
    goal = Goal("tokens per second / those with nn.GRU", lambda f: f.cpu("nn.GRU") / f.cpu("ADPTNet"), at_least=1.0)
    return Case(sides, [goal])


GENERATION = Benchmark(
    "Tokens per second of a model of two blocks, against the same model with nn.GRU.",
    (Size(1, 64, 64), Size(16, 64, 64)),
    (Size(1, 8, 16),),
    ("adpt_scan",),
    _make_case,
    threads=(1,),
)
