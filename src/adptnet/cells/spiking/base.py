"""Base classes of the spiking cells. Spikes are a function of the state, and the output of the cell."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..._dtype import compute_dtype
from ..._typing import Device, DType, Vector
from ...errors import InputError, SpecError
from ...ops._backends import REFERENCE, Backend
from ...optim import NoDecay
from ...spec import check_positive, check_size, suggest_name
from ..base import Cell, CellSpec
from ..structure import Structure
from .surrogate import Boxcar, Spike, check_spike

__all__ = ["RANDOM_RESET", "Initial", "LeakySpec", "NeuronSpec", "Range", "Rates", "Reset", "SpikeReset", "SpikingCell"]

RANDOM_RESET = Backend(
    REFERENCE, "a fused scan cannot draw a new initial state at each reset.", 'Use initial="zero" or drop reset=.'
)

Initial = Literal["zero", "uniform"]
Reset = Literal["subtract", "decayed", "zero", "none"]
SpikeReset = Literal["none", "subtract", "zero"]
Range = tuple[float, float]

USUAL_DECAY: Range = (math.exp(-1 / 5), math.exp(-1 / 25))  # time constants of 5 to 25 steps
SLOW_DECAY: Range = (math.exp(-1 / 30), math.exp(-1 / 120))


@dataclasses.dataclass(frozen=True)
class NeuronSpec(CellSpec):
    """Base class of the specs of a layer of neurons. Each feature of the input is the current of one neuron.

    Attributes:
        width: Number of neurons.
        threshold: Firing threshold of the membrane.
        spike: The spike function with its surrogate derivative; a spec, or any callable.
        initial: Initial state of a sequence: "zero", or "uniform" in [0, 1), drawn at every call, even in `eval` mode.
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
    """Base class of the specs of leaky neurons.

    Attributes:
        decay: Range from which the initial decay factor d of the membrane is drawn; d is trained.
        reset: Effect of a spike on the membrane: "subtract" subtracts θ s[t-1] one step later, as in snnTorch;
            "decayed" subtracts d θ s[t-1], as in eq:fpt_matrix and SiLIF; "zero" sets the membrane to zero; "none" does
            not reset.
    """

    _: dataclasses.KW_ONLY
    decay: Range = USUAL_DECAY
    reset: Reset = "subtract"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self, decay=self.decay)
        check_choice(self, Reset, reset=self.reset)


def check_choice(owner: object, choices: object, **values: str) -> None:
    """Raise `SpecError` if a value is not one of the literals.

    Args:
        owner: The spec that has the fields, for the message.
        choices: A `Literal` type.
        **values: The fields.
    """
    for name, value in values.items():
        if value not in get_args(choices):
            raise SpecError(
                f"{type(owner).__name__}({name}={value!r}) is unknown.{suggest_name(str(value), get_args(choices))}"
            )


def check_range(owner: object, low: float, high: float, **values: Range) -> None:
    """Raise `SpecError` if a value is not a range (a, b) with low <= a <= b <= high.

    Args:
        owner: The spec that has the fields, for the message.
        low: Smallest value allowed.
        high: Largest value allowed.
        **values: The fields.
    """
    for name, value in values.items():
        if not isinstance(value, tuple) or len(value) != 2 or not low <= value[0] <= value[1] <= high:
            raise SpecError(
                f"{type(owner).__name__}({name}={value!r}): must be a range (a, b) with {low:g} <= a <= b <= {high:g}."
            )


def check_decay(owner: object, **values: Range) -> None:
    """Raise `SpecError` if a value is not a range inside (0, 1).

    Args:
        owner: The spec that has the fields, for the message.
        **values: The fields.
    """
    check_range(owner, 0.0, 1.0, **values)
    for name, value in values.items():
        if value[0] <= 0 or value[1] >= 1:
            raise SpecError(f"{type(owner).__name__}({name}={value!r}): a decay factor must be above 0 and below 1.")


class SpikingCell(Cell):
    """Base class of the cells whose output is spikes.

    Args:
        size: Number of neurons.
        variables: State dimensions per neuron.
        spike: The spike function.
        initial: "zero" or "uniform", see `NeuronSpec`.
    """

    def __init__(self, size: int, variables: int, spike: Spike, initial: Initial):
        super().__init__()
        self.input_size: int | None = size
        self.state_size = variables * size
        self.output_size = size
        self.spike = spike
        self.initial = initial

    @abc.abstractmethod
    def membrane(self, state: Tensor) -> Tensor:
        """Return the membrane potential of each neuron before its reset.

        Args:
            state: (..., state_size).

        Returns:
            (..., size).
        """

    @abc.abstractmethod
    def above_threshold(self, state: Tensor) -> Tensor:
        """Return the membrane potential of each neuron minus its threshold.

        Args:
            state: (..., state_size).

        Returns:
            (..., size).
        """

    def output(self, state: Tensor) -> Tensor:
        above = self.above_threshold(state)
        spikes = self.spike(above)
        if spikes.shape != above.shape:
            raise InputError(
                f"the spike function returned shape {tuple(spikes.shape)} for {tuple(above.shape)}; it must return a "
                "spike for each neuron. Pass spike=cells.Boxcar(), or an elementwise function."
            )
        return spikes

    def step(self, state: Vector, drive: Tensor) -> Vector:
        return self.stepper()(state, drive)

    def structure(self) -> Structure:
        return Structure(stepper=self.stepper)

    @abc.abstractmethod
    def stepper(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the step as a function, with everything that is constant along a sequence evaluated once."""

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        zero = super().initial_state(batch, device=device, dtype=dtype)
        return zero if self.initial == "zero" else zero.uniform_(0, 1)


class Rates(NoDecay):
    """A decay factor for each neuron, parametrized as exp(-exp(log_rate)), so that it stays in (0, 1).

    Args:
        size: Number of neurons.
        decay: The range that the decay factors are drawn from.
        device: Device of the parameter.
        dtype: Dtype of the parameter.
    """

    def __init__(self, size: int, decay: Range, device: Device, dtype: DType):
        super().__init__()
        start = (decay[0] + (decay[1] - decay[0]) * torch.rand(size, dtype=torch.float64)).log().neg().log()
        self.log_rate = nn.Parameter(start.to(device, dtype or torch.get_default_dtype()))

    def forward(self) -> Tensor:
        """Return the decay factors, (size,)."""
        return torch.exp(-to_compute_dtype(self.log_rate).exp())


def draw_parameter(size: int, low: float, high: float, device: Device, dtype: DType) -> nn.Parameter:
    """Return a parameter with one value for each neuron, drawn uniformly from [low, high).

    Args:
        size: Number of neurons.
        low: Lower end of the interval.
        high: Upper end of the interval.
        device: Device of the parameter.
        dtype: Dtype of the parameter.
    """
    return nn.Parameter(torch.empty(size, device=device, dtype=dtype).uniform_(low, high))


def to_compute_dtype(parameter: Tensor) -> Tensor:
    """Return a parameter in the dtype of the recurrence, which is at least float32.

    Args:
        parameter: The parameter.
    """
    return parameter.to(compute_dtype(parameter.dtype))


def decay_membrane(reset: Reset, decay: Tensor, membrane: Tensor, spikes: Tensor, threshold: Tensor | float) -> Tensor:
    """Return the membrane potential after the decay and the reset of one step, before the input is added.

    Args:
        reset: The kind of reset, see `LeakySpec`.
        decay: d.
        membrane: u[t-1].
        spikes: s[t-1].
        threshold: θ.
    """
    if reset == "none":
        return decay * membrane
    if reset == "subtract":
        return decay * membrane - threshold * spikes
    if reset == "decayed":
        return decay * (membrane - threshold * spikes)
    return decay * membrane * (1 - spikes)
