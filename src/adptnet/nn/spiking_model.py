"""A feed-forward network of spiking layers with a leaky-integrator read-out."""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from .._typing import Device, DType
from .._validate import check_dtype, check_lengths, make_validity_mask
from ..cells import ADPTState, CellSpec, LeakyIntegrator, SpikingADPT, SpikingCell
from ..cells.spiking import NeuronSpec
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..recurrence.projections import Dense, ProjectionSpec
from ..recurrence.projections.dense import DenseProjection
from ..spec import ModuleSpec, check_fraction, check_kind, check_size, reset_from_spec, spec, suggest_name
from .adpt_layer import Recurrent
from .block import Norm
from .packing import check_padded
from .states import LayerStates, make_initial_states, split_states
from .streaming import Streamable

__all__ = ["SpikingModel", "SpikingModelSpec", "SpikingTrace"]

ReadoutName = Literal["softmax", "mean", "max", "last"]


@spec
class SpikingModelSpec(ModuleSpec):
    """A network of spiking layers with a leaky read-out, as in idiap/sparch and SiLIF.

    Attributes:
        neuron: The spiking cell of every layer; its width is the number of neurons.
        input_size: Number of input channels.
        output_size: Number of classes.
        depth: Number of layers before the read-out.
        first: Projection from the channels to the first layer.
        between: Projection from the spikes of a layer to the next one.
        dropout: Dropout probability on the spikes of every layer.
        momentum: Momentum of the batch norms, whose statistics are over batch and time.
        readout: Score from the leaky integrators u of the classes: "softmax", the sum over time of softmax(u); or the
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
                "the next layer would receive a read-out instead of spikes. Build the neuron without state_size."
            )
        check_size(self, input_size=self.input_size, output_size=self.output_size, depth=self.depth)
        check_kind(self, ProjectionSpec, "projections.Dense()", first=self.first, between=self.between)
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)
        check_fraction(self, below="at 1 only the last batch counts", momentum=self.momentum)
        if self.readout not in get_args(ReadoutName):
            known = suggest_name(str(self.readout), get_args(ReadoutName))
            raise SpecError(f"SpikingModelSpec(readout={self.readout!r}) is unknown.{known}")

    def build(self, *, device: Device = None, dtype: DType = None) -> "SpikingModel":
        return SpikingModel(self, device=device, dtype=dtype)


class SpikingTrace(NamedTuple):
    """Inputs, spikes and membrane potentials of one layer."""

    inputs: Tensor  # (batch, time, features)
    spikes: Tensor  # (batch, time, neurons)
    membrane: Tensor  # (batch, time, neurons)


class _Currents(nn.Module):
    """A projection, initialized Xavier-uniform if it is dense, and a batch norm."""

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
    """Input currents, neurons, and dropout on the spikes."""

    def __init__(self, spec: SpikingModelSpec, inputs: int, projection: ProjectionSpec, device: Device, dtype: DType):
        super().__init__()
        self.currents = _Currents(projection, inputs, spec.neuron.width, spec.momentum, device, dtype)
        self.neurons = Recurrent(spec.neuron, device=device, dtype=dtype)
        self.dropout = nn.Dropout(spec.dropout)


class SpikingModel(Streamable):
    """A network from event frames to one score per class, with the state of every layer and of the read-out.

    Args:
        spec: The description of the network.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

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
        """Return scores (batch, output_size) and the states.

        Args:
            x: (batch, time, input_size), in floating point.
            state: The states that an earlier call returned. The scores cover the steps of this call only.
            lengths: (batch,) true lengths of right-padded sequences; padding has no effect.
            run: Further keyword arguments of `RecurrentLayer.forward`: `reset`, `solver`, `adjoint`.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths)
        lengths = self._check_inputs(x, lengths)
        keep = None if lengths is None else make_validity_mask(lengths, x.shape[1])
        *entering, before = split_states([*self.layers, self.integrators], state)
        leaving: list[ADPTState] = []
        for layer, start in zip(self.layers, entering, strict=True):
            assert isinstance(layer, _Layer)
            spikes, after = layer.neurons(layer.currents(x, keep), start, lengths=lengths, **run)
            x = layer.dropout(spikes if keep is None else torch.where(keep.unsqueeze(-1), spikes, 0.0))
            leaving.append(after)
        integrated, after = self.integrators(self.decoder(x, keep), before, lengths=lengths, **run)
        return self._read_out(integrated, lengths, keep), LayerStates([*leaving, after])

    def step(self, x: Tensor, state: tuple[Any, ...] | None = None) -> tuple[Tensor, LayerStates]:
        """Run one step in evaluation mode.

        Args:
            x: (batch, input_size), or (input_size,) for one sequence.
            state: The states that an earlier call returned.

        Returns:
            softmax(u) of this step, whose sum over time is the score, for the "softmax" read-out; u for the others. And
            the states.

        Raises:
            InputError: The network is in training mode, or `x` has the wrong shape.
        """
        if self.training:
            raise InputError("a batch norm cannot train on one step. Call model.eval() before model.step.")
        if x.dim() not in (1, 2) or x.shape[-1] != self.spec.input_size:
            raise InputError(
                f"step takes one frame of each sequence, (batch, {self.spec.input_size}); got shape {tuple(x.shape)}. "
                "For a whole sequence call the network itself."
            )
        check_dtype(x, self.integrators.cell.dtype)
        *entering, before = split_states([*self.layers, self.integrators], state)
        leaving = []
        for layer, start in zip(self.layers, entering, strict=True):
            assert isinstance(layer, _Layer)
            x, after = layer.neurons.step(layer.currents(x), start)
            leaving.append(after)
        integrated, after = self.integrators.step(self.decoder(x), before)
        return integrated.softmax(-1) if self.spec.readout == "softmax" else integrated, LayerStates([*leaving, after])

    @torch.no_grad()
    def trace(self, x: Tensor, *, lengths: Tensor | None = None) -> list[SpikingTrace]:
        """Return inputs, spikes and membrane potentials of each layer, without dropout.

        Args:
            x: (batch, time, input_size).
            lengths: (batch,) true lengths of right-padded sequences. Values past the end are zero.
        """
        lengths = self._check_inputs(x, lengths)
        keep = None if lengths is None else make_validity_mask(lengths, x.shape[1])
        traces = []
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            cell = layer.neurons.cell
            assert isinstance(cell, SpikingCell)
            states = layer.neurons.solve(layer.currents(x, keep), lengths=lengths).states
            parts = (x, cell.output(states), cell.membrane(states))
            traces.append(
                SpikingTrace(*(p if keep is None else torch.where(keep.unsqueeze(-1), p, 0.0) for p in parts))
            )
            x = traces[-1].spikes.to(x.dtype)
        return traces

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> LayerStates:
        """Return the state before the first step.

        Args:
            batch: Number of sequences.
            device: Device of the state; that of the parameters by default.
            dtype: Dtype of the state; that of the recurrence by default.
        """
        layers = [*(layer.neurons for layer in self.layers), self.integrators]
        return make_initial_states(layers, batch, device, dtype)

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def _check_inputs(self, x: Tensor, lengths: Tensor | None) -> Tensor | None:
        check_padded(x)
        if x.dim() != 3 or x.shape[-1] != self.spec.input_size or not x.is_floating_point():
            raise InputError(
                f"the network takes (batch, time, {self.spec.input_size}) in floating point; got {x.dtype} of shape "
                f"{tuple(x.shape)}. Pass frames.float(), and one sequence as frames.unsqueeze(0)."
            )
        if not x.shape[1]:
            raise InputError(f"a score needs at least one step; got shape {tuple(x.shape)}.")
        check_dtype(x, self.integrators.cell.dtype)
        return check_lengths(lengths, x.shape[0], x.shape[1], x.device)

    def _read_out(self, integrated: Tensor, lengths: Tensor | None, keep: Tensor | None) -> Tensor:
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
