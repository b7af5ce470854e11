"""What spiking cells share: the spikes are a function of the state, and are what the next layer sees."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..._typing import Device, DType, Vector
from ...errors import InputError, SpecError
from ...optim import NoDecay
from ...recurrence.spectra.base import compute_dtype
from ...spec import check_positive, check_size, nearest
from ..base import Cell, CellSpec
from .surrogate import Boxcar, Spike, check_spike

__all__ = ["Initial", "LeakySpec", "NeuronSpec", "Range", "Rates", "Reset", "SpikeReset", "SpikingCell"]

Initial = Literal["zero", "uniform"]
Reset = Literal["subtract", "decayed", "zero", "none"]
SpikeReset = Literal["none", "subtract", "zero"]
Range = tuple[float, float]

USUAL_DECAY: Range = (math.exp(-1 / 5), math.exp(-1 / 25))  # time constants of 5 to 25 steps
SLOW_DECAY: Range = (math.exp(-1 / 30), math.exp(-1 / 120))


@dataclasses.dataclass(frozen=True)
class NeuronSpec(CellSpec):
    """The description of a layer of neurons, one for each feature of the input, which is their current.

    Attributes:
        width: Number of neurons.
        threshold: Where the membrane fires.
        spike: The step and its surrogate derivative; a spec, or any callable.
        initial: Where a sequence starts: at "zero", or "uniform" in [0, 1) drawn at every call, also in evaluation.
    """

    width: int
    _: dataclasses.KW_ONLY
    threshold: float = 1.0
    spike: Spike = Boxcar()
    initial: Initial = "zero"

    def __post_init__(self) -> None:
        check_size(self, width=self.width)
        check_positive(self, threshold=self.threshold)
        check_spike(self, self.spike)
        check_choice(self, Initial, initial=self.initial)


@dataclasses.dataclass(frozen=True)
class LeakySpec(NeuronSpec):
    """The description of leaky neurons.

    Attributes:
        decay: The range that d is drawn from. It learns.
        reset: What a spike does to the membrane: "subtract" takes θ s[t-1] off a step later, as in snnTorch; "decayed"
            takes d θ s[t-1], as eq:fpt_matrix and SiLIF do; "zero" starts the membrane anew; "none" never resets.
    """

    _: dataclasses.KW_ONLY
    decay: Range = USUAL_DECAY
    reset: Reset = "subtract"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self, decay=self.decay)
        check_choice(self, Reset, reset=self.reset)


def check_choice(owner: object, choices: object, **values: str) -> None:
    """Raises unless every value is one of the literals."""
    for name, value in values.items():
        if value not in get_args(choices):
            raise SpecError(
                f"{type(owner).__name__}({name}={value!r}) is unknown.{nearest(str(value), get_args(choices))}"
            )


def check_range(owner: object, low: float, high: float, **values: Range) -> None:
    """Raises unless every value is a range (a, b) with low <= a <= b <= high."""
    for name, value in values.items():
        if not isinstance(value, tuple) or len(value) != 2 or not low <= value[0] <= value[1] <= high:
            raise SpecError(
                f"{type(owner).__name__}({name}={value!r}): must be a range (a, b) with {low:g} <= a <= b <= {high:g}."
            )


def check_decay(owner: object, **values: Range) -> None:
    """Raises unless every value is a range inside (0, 1)."""
    check_range(owner, 0.0, 1.0, **values)
    for name, value in values.items():
        if value[0] <= 0 or value[1] >= 1:
            raise SpecError(f"{type(owner).__name__}({name}={value!r}): a decay is above 0 and below 1.")


class SpikingCell(Cell):
    """A cell of `size` neurons with `variables` numbers of the state each; its output is spikes."""

    def __init__(self, size: int, variables: int, spike: Spike, initial: Initial):
        super().__init__()
        self.input_size: int | None = size
        self.state_size = variables * size
        self.output_size = size
        self.spike = spike
        self.initial = initial

    @abc.abstractmethod
    def membrane(self, state: Tensor) -> Tensor:
        """The membrane of each neuron, before its reset."""

    @abc.abstractmethod
    def above(self, state: Tensor) -> Tensor:
        """The membrane of each neuron minus its threshold."""

    def output(self, state: Tensor) -> Tensor:
        above = self.above(state)
        spikes = self.spike(above)
        if spikes.shape != above.shape:
            raise InputError(
                f"the spike function made shape {tuple(spikes.shape)} of {tuple(above.shape)}; needed is a spike for "
                "each neuron. Pass spike=cells.Boxcar(), or a function that is elementwise."
            )
        return spikes

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self.stepper()(state, drive)

    @abc.abstractmethod
    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]: ...

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        zero = super().initial_state(batch, device=device, dtype=dtype)
        return zero if self.initial == "zero" else zero.uniform_(0, 1)


class Rates(NoDecay):
    """A decay for each neuron, drawn from a range and learned as exp(-exp(log_rate)), so that it stays in (0, 1)."""

    def __init__(self, size: int, decay: Range, device: Device, dtype: DType):
        super().__init__()
        start = (decay[0] + (decay[1] - decay[0]) * torch.rand(size, dtype=torch.float64)).log().neg().log()
        self.log_rate = nn.Parameter(start.to(device, dtype or torch.get_default_dtype()))

    def forward(self) -> Tensor:
        return torch.exp(-full(self.log_rate).exp())


def drawn(size: int, low: float, high: float, device: Device, dtype: DType) -> nn.Parameter:
    """A number for each neuron, drawn evenly."""
    return nn.Parameter(torch.empty(size, device=device, dtype=dtype).uniform_(low, high))


def full(parameter: Tensor) -> Tensor:
    """In the dtype of the recurrence, which is never below float32."""
    return parameter.to(compute_dtype(parameter.dtype))


def carried(reset: Reset, decay: Tensor, membrane: Tensor, spikes: Tensor, threshold: Tensor | float) -> Tensor:
    """What is left of a membrane a step later, for each way of resetting it."""
    if reset == "none":
        return decay * membrane
    if reset == "subtract":
        return decay * membrane - threshold * spikes
    if reset == "decayed":
        return decay * (membrane - threshold * spikes)
    return decay * membrane * (1 - spikes)
