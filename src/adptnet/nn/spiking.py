"""Spiking layers and networks: currents, a batch norm, neurons and dropout, again and again, and a leaky read-out."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from .._typing import Device, DType
from ..cells import ADPTSpec, ADPTState, CellSpec, LeakyIntegrator, SiLIF, SlowMemory, SpikingADPT, SpikingCell
from ..cells.spiking import Boxcar, NeuronSpec, Spike, SpikeReset
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..recurrence.beta import BetaValue
from ..recurrence.directions import DirectionSpec, FromState
from ..recurrence.projections import Dense, Identity, LowParam, ProjectionSpec
from ..recurrence.projections.dense import DenseProjection
from ..recurrence.projections.factored import square_factors
from ..recurrence.spectra import LogUniformDecay
from ..solvers.problem import check_dtype, check_lengths, valid
from ..spec import ModuleSpec, check_fraction, check_kind, check_size, nearest, reset_from_spec, spec
from .block import Norm
from .layer import Recurrent
from .packing import check_padded
from .states import LayerStates, states_of

__all__ = [
    "SpikingADPTNet",
    "SpikingModel",
    "SpikingModelSpec",
    "Trace",
    "silif_for_speech",
    "spiking_adpt",
    "spiking_adpt_for_speech",
]

ReadoutName = Literal["softmax", "mean", "max", "last"]
OPTIONS = ("beta", "threshold", "spike", "spike_reset", "spike_adaptation", "spiking_directions", "dt")


def spiking_adpt(
    width: int,
    *,
    beta: BetaValue = 0.125,
    threshold: float = 1.0,
    spike: Spike = Boxcar(),
    spike_reset: SpikeReset = "none",
    spike_adaptation: bool = False,
    spiking_directions: bool = False,
    dt: float = 0.004,
    **axes: Any,
) -> SpikingADPT:
    """The cell of SpikingADPTNet: a slow memory with a negative feedback, timescales as SiLIF's, LowParam maps.

    `spiking_directions` takes K and V of the spikes instead of ReLU(x). `axes` are those of `cells.ADPTSpec`.
    """
    size = axes.get("state_size") or width
    few = LowParam(square_factors(size), rank=max(1, 3 * size // 32))
    direction: DirectionSpec = FromState(spike=threshold) if spiking_directions else FromState(relu=True)
    usual = {
        "spectrum": LogUniformDecay(dt=dt),
        "memory": SlowMemory(LogUniformDecay(2.5, 10.0, dt), feedback=(-1.0, 0.0)),
        "direction": direction,
        "projection": few,
        "input_projection": few if size == width else Dense(),
    }
    known = [field.name for field in dataclasses.fields(ADPTSpec) if field.name not in ("width", "beta")]
    for name in axes:
        if name not in known:
            raise SpecError(f"SpikingADPTNet({name}=...) is unknown.{nearest(name, (*known, *OPTIONS))}")
    cell = ADPTSpec(width, beta=beta, **{**usual, **axes})
    return SpikingADPT(cell, threshold=threshold, spike=spike, reset=spike_reset, adaptation=spike_adaptation)


def SpikingADPTNet(width: int, **options: Any) -> Recurrent:
    """A layer whose output is spikes (sec:spiking_ADPTNet): (batch, time, width) in and out, as `ADPTNet`.

    Args:
        width: Features in, neurons out. With another `state_size` the spikes go through a read-out.
        options: Those of `spiking_adpt`; and `solver`, `adjoint`, `batch_first`, `device`, `dtype`, `readout` as for
            `ADPTNet`.
    """
    names = ("solver", "adjoint", "batch_first", "device", "dtype", "readout")
    run = {name: options.pop(name) for name in names if name in options}
    return Recurrent(spiking_adpt(width, **options), **run)


@spec
class SpikingModelSpec(ModuleSpec):
    """A network of spiking layers with a leaky read-out, as idiap/sparch and SiLIF have it.

    Attributes:
        neuron: The neurons of every layer; their width is the layer's.
        input_size: Channels in.
        output_size: Classes.
        depth: Layers before the read-out.
        first: From the channels to the first layer.
        between: From spikes to the next layer.
        dropout: On the spikes of every layer.
        momentum: Of the batch norms, whose statistics are over batch and time.
        readout: What is made of the integrators u of the classes: "softmax", the sum over time of softmax(u); the
            "mean", "max" or "last" of u.
    """

    neuron: CellSpec
    input_size: int
    output_size: int
    depth: int = 2
    first: ProjectionSpec = Dense()
    between: ProjectionSpec = Dense()
    dropout: float = 0.0
    momentum: float = 0.05
    readout: ReadoutName = "softmax"

    def __post_init__(self) -> None:
        if not isinstance(self.neuron, (NeuronSpec, SpikingADPT)):
            of_layer = isinstance(getattr(self.neuron, "cell", None), (NeuronSpec, SpikingADPT))
            hint = "layer.spec.cell, not layer.spec" if of_layer else "cells.SiLIF(512), or layer.spec.cell of a layer"
            raise SpecError(
                f"SpikingModelSpec(neuron={type(self.neuron).__name__}): must be a spiking cell. Pass {hint}."
            )
        if isinstance(self.neuron, SpikingADPT) and self.neuron.cell.size != self.neuron.width:
            raise SpecError(
                f"SpikingModelSpec(neuron=...): its width is {self.neuron.width}, its state {self.neuron.cell.size}: "
                "the next layer would see a read-out, no spikes. Build the neuron without state_size."
            )
        check_size(self, input_size=self.input_size, output_size=self.output_size, depth=self.depth)
        check_kind(self, ProjectionSpec, "projections.Dense()", first=self.first, between=self.between)
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)
        check_fraction(self, below="at 1 only the last batch counts", momentum=self.momentum)
        if self.readout not in get_args(ReadoutName):
            known = nearest(str(self.readout), get_args(ReadoutName))
            raise SpecError(f"SpikingModelSpec(readout={self.readout!r}) is unknown.{known}")

    def build(self, *, device: Device = None, dtype: DType = None) -> "SpikingModel":
        return SpikingModel(self, device=device, dtype=dtype)


class Trace(NamedTuple):
    """What one layer did: `spikes` and `membrane`, (batch, time, neurons), and its input."""

    inputs: Tensor
    spikes: Tensor
    membrane: Tensor


class _Currents(nn.Module):
    """A projection, Xavier-uniform where it is dense, and a batch norm."""

    def __init__(
        self, projection: ProjectionSpec, inputs: int, outputs: int, momentum: float, device: Device, dtype: DType
    ):
        super().__init__()
        self.projection = projection.build(inputs, outputs, device=device, dtype=dtype)
        if isinstance(projection, Dense) and isinstance(self.projection, DenseProjection):
            nn.init.xavier_uniform_(self.projection.weight)
        self.norm = Norm("batch", outputs, device=device, dtype=dtype)
        assert isinstance(self.norm.norm, nn.BatchNorm1d)
        self.norm.norm.momentum = momentum

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        currents: Tensor = self.norm(self.projection(x), keep)
        return currents


class _Layer(nn.Module):
    """Currents, neurons, dropout on the spikes."""

    def __init__(self, spec: SpikingModelSpec, inputs: int, projection: ProjectionSpec, device: Device, dtype: DType):
        super().__init__()
        self.currents = _Currents(projection, inputs, spec.neuron.width, spec.momentum, device, dtype)
        self.neurons = Recurrent(spec.neuron, device=device, dtype=dtype)
        self.dropout = nn.Dropout(spec.dropout)


class SpikingModel(nn.Module):
    """Frames of events in, one score for each class out, with the state of every layer and of the read-out."""

    def __init__(self, spec: SpikingModelSpec, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        width = spec.neuron.width
        self.layers = nn.ModuleList(
            _Layer(spec, width if i else spec.input_size, spec.between if i else spec.first, device, dtype)
            for i in range(spec.depth)
        )
        self.decoder = _Currents(Dense(), width, spec.output_size, spec.momentum, device, dtype)
        self.integrators = Recurrent(LeakyIntegrator(spec.output_size), device=device, dtype=dtype)

    def forward(
        self, x: Tensor, state: tuple[Any, ...] | None = None, *, lengths: Tensor | None = None, **run: Any
    ) -> tuple[Tensor, LayerStates]:
        """Scores (batch, output_size) and the states.

        Args:
            x: (batch, time, input_size), in floating point.
            state: What an earlier call returned. The scores are of this call's steps.
            lengths: True lengths of right-padded sequences; what is past the end counts for nothing.
            run: `reset`, `solver`, `adjoint`, as `RecurrentLayer.forward` takes them.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths)
        lengths = self._checked(x, lengths)
        keep = None if lengths is None else valid(lengths, x.shape[1])
        *entering, before = states_of([*self.layers, self.integrators], state)
        leaving: list[ADPTState] = []
        for layer, start in zip(self.layers, entering, strict=True):
            assert isinstance(layer, _Layer)
            spikes, after = layer.neurons(layer.currents(x, keep), start, lengths=lengths, **run)
            x = layer.dropout(spikes if keep is None else torch.where(keep.unsqueeze(-1), spikes, 0.0))
            leaving.append(after)
        integrated, after = self.integrators(self.decoder(x, keep), before, lengths=lengths, **run)
        return self._read(integrated, lengths, keep), LayerStates([*leaving, after])

    def step(self, x: Tensor, state: tuple[Any, ...] | None = None) -> tuple[Tensor, LayerStates]:
        """One step, (batch, input_size): softmax(u) of this step, whose sum is the score, or u; in evaluation mode."""
        if self.training:
            raise InputError("a batch norm has no statistics of one step. Call model.eval() before model.step.")
        if x.dim() not in (1, 2) or x.shape[-1] != self.spec.input_size:
            raise InputError(
                f"step takes one frame of each sequence, (batch, {self.spec.input_size}); got shape {tuple(x.shape)}. "
                "For a whole sequence call the network itself."
            )
        check_dtype(x, self.integrators.cell)
        *entering, before = states_of([*self.layers, self.integrators], state)
        leaving = []
        for layer, start in zip(self.layers, entering, strict=True):
            assert isinstance(layer, _Layer)
            x, after = layer.neurons.step(layer.currents(x), start)
            leaving.append(after)
        integrated, after = self.integrators.step(self.decoder(x), before)
        return integrated.softmax(-1) if self.spec.readout == "softmax" else integrated, LayerStates([*leaving, after])

    @torch.no_grad()
    def trace(self, x: Tensor, *, lengths: Tensor | None = None) -> list[Trace]:
        """What each layer receives, its spikes and its membranes, without dropout; zero past the end."""
        lengths = self._checked(x, lengths)
        keep = None if lengths is None else valid(lengths, x.shape[1])
        traces = []
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            cell = layer.neurons.cell
            assert isinstance(cell, SpikingCell)
            states = layer.neurons.solve(layer.currents(x, keep), lengths=lengths).states
            parts = (x, cell.output(states), cell.membrane(states))
            traces.append(Trace(*(p if keep is None else torch.where(keep.unsqueeze(-1), p, 0.0) for p in parts)))
            x = traces[-1].spikes.to(x.dtype)
        return traces

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def _checked(self, x: Tensor, lengths: Tensor | None) -> Tensor | None:
        check_padded(x)
        if x.dim() != 3 or x.shape[-1] != self.spec.input_size or not x.is_floating_point():
            raise InputError(
                f"the network takes (batch, time, {self.spec.input_size}) in floating point; got {x.dtype} of shape "
                f"{tuple(x.shape)}. Pass frames.float(), and one sequence as frames.unsqueeze(0)."
            )
        if not x.shape[1]:
            raise InputError(f"a score needs at least one step; got shape {tuple(x.shape)}.")
        check_dtype(x, self.integrators.cell)
        return check_lengths(lengths, x.shape[0], x.shape[1], x.device)

    def _read(self, integrated: Tensor, lengths: Tensor | None, keep: Tensor | None) -> Tensor:
        kept = torch.ones_like(integrated[..., :1]) if keep is None else keep.unsqueeze(-1).to(integrated)
        if self.spec.readout == "softmax":
            return (integrated.softmax(-1) * kept).sum(1)
        if self.spec.readout == "mean":
            return (integrated * kept).sum(1) / kept.sum(1)
        if self.spec.readout == "max":
            return integrated.masked_fill(kept == 0, -torch.inf).amax(1)
        last = torch.full((integrated.shape[0],), integrated.shape[1], device=integrated.device)
        return integrated[
            torch.arange(integrated.shape[0], device=integrated.device), (last if lengths is None else lengths) - 1
        ]


def silif_for_speech(
    width: int = 512, *, input_size: int = 140, output_size: int = 35, dropout: float = 0.5, dt: float = 0.004
) -> SpikingModelSpec:
    """The SiLIF network of Spiking Speech Commands: 359,017 parameters at the defaults."""
    return SpikingModelSpec(SiLIF(width, dt=dt), input_size, output_size, dropout=dropout)


def spiking_adpt_for_speech(
    width: int = 512,
    *,
    beta: BetaValue = 0.0125,
    factors: tuple[int, int] | None = None,
    rank: int | None = None,
    input_size: int = 140,
    output_size: int = 35,
    dropout: float = 0.5,
    dt: float = 0.004,
    layer_norm: bool = True,
    **options: Any,
) -> SpikingModelSpec:
    """SpikingADPTNet in the place of SiLIF's neurons (table:ssc_results).

    At widths 512 and 2048 it has the paper's 355,689 and 1,069,481 parameters: LowParam maps with biases, ranks 48 and
    16, factors (32, 16) and (256, 8), a LayerNorm on key and value. `options` are those of `spiking_adpt`.
    """
    published = {512: ((32, 16), 48), 2048: ((256, 8), 16)}
    usual_factors, usual_rank = published.get(width, (square_factors(width), max(1, 3 * width // 32)))
    few = LowParam(factors or usual_factors, rank or usual_rank, bias=True)
    threshold = options.get("threshold", 1.0)
    source: dict[str, Any] = {"spike": threshold} if options.pop("spiking_directions", False) else {"relu": True}
    neuron = spiking_adpt(
        width,
        beta=beta,
        dt=dt,
        **{
            "projection": few,
            "input_projection": Identity(),
            "direction": FromState(**source, layer_norm=layer_norm),
            **options,
        },
    )
    return SpikingModelSpec(neuron, input_size, output_size, between=few, dropout=dropout)
