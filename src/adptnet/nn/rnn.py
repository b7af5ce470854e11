"""`ADPTRNN`: ADPT cells behind the arguments, shapes and results of `torch.nn.GRU`."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from .._dtype import compute_dtype
from .._typing import Device, DType
from .._validate import check_dtype
from ..cells import ADPTSpec
from ..errors import IncompatibleError, InputError
from ..ops._fx import Proxy, record_call
from ..ops._torch_state import without_autocast
from ..recurrence.beta import BetaValue
from ..recurrence.projections import Dense
from ..solvers import Sequential
from ..spec import ModuleSpec, check_fraction, check_kind, check_size, reject_unknown, reset_from_spec, spec
from .bidirectional import Flip
from .packing import check_padded, run_packed

__all__ = ["ADPTRNN", "RNNSpec"]

_AXES = tuple(field.name for field in dataclasses.fields(ADPTSpec) if field.name not in ("width", "state_size", "rope"))


@spec
class RNNSpec(ModuleSpec):
    """A stack of ADPT cells with the interface of `nn.GRU`.

    Attributes:
        cell: The cell of the first layer. Its `width` is the input size and its `state_size` the hidden size. The cells
            of further layers differ in their width only.
        num_layers: Number of layers.
        dropout: Dropout probability between layers.
        bidirectional: Whether each layer also has a cell that runs backward in time.
        batch_first: True for (batch, time, features), False for (time, batch, features).
    """

    cell: ADPTSpec
    num_layers: int = 1
    dropout: float = 0.0
    bidirectional: bool = False
    batch_first: bool = False

    def __post_init__(self) -> None:
        check_kind(self, ADPTSpec, "cells.ADPTSpec(width=16, state_size=32)", cell=self.cell)
        check_size(self, num_layers=self.num_layers)
        check_fraction(self, below="at 1 nothing would pass", dropout=self.dropout)
        if self.cell.rope is not None:
            raise IncompatibleError(
                "RNNSpec(cell=ADPTSpec(rope=...)): rotary positions need the position of the state, which h_n does not "
                "hold. Drop rope=, or use ADPTNet."
            )

    def build(self, *, device: Device = None, dtype: DType = None) -> "ADPTRNN":
        rnn = ADPTRNN.__new__(ADPTRNN)
        rnn._build(self, device, dtype)
        return rnn


class ADPTRNN(nn.Module):
    """A drop-in replacement of `nn.GRU`: the same arguments and shapes, and `output, h_n` as result.

    `output` holds the hidden states of the last layer, without a read-out, and `h_n` the last state of every layer and
    direction, as for `nn.GRU`. An `nn.GRU` has three times the input weights; this layer has the projections K and V
    instead of recurrent weights. `ADPTNet` has more options for a call: `lengths`, `reset`, solvers, `step`.

    Args:
        input_size: Features of the input.
        hidden_size: State dimension of each cell, and features of the output per direction.
        num_layers: Number of layers.
        bias: Whether the input projection has a bias. An `input_projection` of your own has its own.
        batch_first: True for (batch, time, features), False for (time, batch, features). As for `nn.GRU`, `hx` and
            `h_n` are never batch first.
        dropout: Dropout probability between layers.
        bidirectional: Whether each layer also has a cell that runs backward in time. The output has twice the features.
        beta: Strength of the non-linearity; see `ADPTNet`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        axes: Other components of the model: see `cells.ADPTSpec`, without `rope`.

    Raises:
        SpecError: An argument is unknown or out of range.
        IncompatibleError: Components do not fit together.
    """

    spec: RNNSpec

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        beta: BetaValue = 0.125,
        device: Device = None,
        dtype: DType = None,
        **axes: Any,
    ):
        names = {"width": "input_size", "d_model": "hidden_size", "state_size": "hidden_size", "depth": "num_layers"}
        reject_unknown("ADPTRNN", [name for name in axes if name not in _AXES], _AXES, **names)
        check_size(self, input_size=input_size, hidden_size=hidden_size)
        projection = axes.setdefault("input_projection", Dense(bias=bias))
        if not bias and getattr(projection, "bias", False):
            raise IncompatibleError(
                f"ADPTRNN(bias=False, input_projection={projection}): the projection has a bias. Drop bias=False."
            )
        if isinstance(dropout, (int, float)) and dropout > 0 and num_layers == 1:
            warnings.warn(
                f"ADPTRNN(dropout={dropout}, num_layers=1): dropout is applied between layers, and there is only one.",
                stacklevel=2,
            )
        cell = ADPTSpec(input_size, state_size=hidden_size, beta=beta, **axes)
        self._build(RNNSpec(cell, num_layers, dropout, bidirectional, batch_first), device, dtype)

    def _build(self, spec: RNNSpec, device: Device, dtype: DType) -> None:
        super().__init__()
        self.spec = spec
        self.input_size, self.hidden_size = spec.cell.width, spec.cell.size
        self.num_layers, self.dropout = spec.num_layers, spec.dropout
        self.bidirectional, self.batch_first = spec.bidirectional, spec.batch_first
        self.bias: bool = getattr(spec.cell.input_projection, "bias", False)
        self.num_directions = 2 if spec.bidirectional else 1
        wide = dataclasses.replace(spec.cell, width=self.num_directions * self.hidden_size)
        per_layer = [spec.cell] + [wide] * (spec.num_layers - 1)
        # Layer by layer, the forward direction first, as the rows of h_n
        self.cells = nn.ModuleList(
            cell.build(device=device, dtype=dtype) for cell in per_layer for _ in range(self.num_directions)
        )

    @property
    def state_size(self) -> int:
        """Features of `hx` and `h_n`: `hidden_size`, or more for cells with a slow memory or a stateful rotation."""
        cell: Any = self.cells[0]
        size: int = cell.state_size
        return size

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        """Run all layers along a sequence.

        Args:
            input: (time, batch, input_size); (batch, time, input_size) if `batch_first`; (time, input_size) for one
                sequence; or a `PackedSequence`.
            hx: (num_layers * directions, batch, state_size), the state of each layer and direction before the first
                step; without batch for one sequence; zero if not given. For a `PackedSequence`, in the order of the
                sequences before packing.

        Returns:
            `output`, shaped as `input` with directions * hidden_size features, and packed if the input is; and `h_n`,
            shaped as `hx`, in at least float32.

        Raises:
            InputError: An argument has the wrong type, shape, dtype or device.
        """
        if isinstance(input, Proxy):
            return record_call(self, input, hx, {})
        if isinstance(input, PackedSequence):
            self._check(input.data, 2)
            return run_packed(input, lambda padded, lengths: self._run(padded, hx, lengths))
        check_padded(input)
        self._check(input, input.dim())
        if input.dim() == 2:
            if isinstance(hx, Tensor) and hx.dim() != 2:
                raise InputError(
                    f"hx must be ({len(self.cells)}, {self.state_size}) for one sequence, (time, {self.input_size}); "
                    f"got {tuple(hx.shape)}. Pass hx.squeeze(1)."
                )
            output, final = self._run(input.unsqueeze(0), hx.unsqueeze(1) if isinstance(hx, Tensor) else hx, None)
            return output.squeeze(0), final.squeeze(1)
        output, final = self._run(input if self.batch_first else input.transpose(0, 1), hx, None)
        return output if self.batch_first else output.transpose(0, 1), final

    def flatten_parameters(self) -> None:
        """Do nothing: `nn.GRU` compacts its weights for cuDNN here."""

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}", f"num_layers={self.num_layers}", f"bias={self.bias}"]
        parts += [f"batch_first={self.batch_first}", f"dropout={self.dropout}", f"bidirectional={self.bidirectional}"]
        return ", ".join([*parts, f"beta={self.spec.cell.beta}"])

    def _check(self, x: Tensor, dim: int) -> None:
        layout = "batch, time" if self.batch_first else "time, batch"
        if dim not in (2, 3) or x.shape[-1] != self.input_size:
            fix = f"Build it with input_size={x.shape[-1]}." if dim in (2, 3) else "It must have 2 or 3 dimensions."
            raise InputError(
                f"input must be ({layout}, {self.input_size}), or (time, {self.input_size}) for one sequence; got "
                f"{tuple(x.shape)}. {fix}"
            )
        cell: Any = self.cells[0]
        check_dtype(x, cell.dtype)

    def _run(self, x: Tensor, hx: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run all layers on (batch, time, input_size); return the outputs and h_n."""
        expected = (len(self.cells), x.shape[0], self.state_size)
        if hx is not None and (not isinstance(hx, Tensor) or tuple(hx.shape) != expected):
            given = tuple(hx.shape) if isinstance(hx, Tensor) else type(hx).__name__
            raise InputError(
                f"hx must be a tensor of shape {expected}: (layers * directions, batch, state); got {given}."
            )
        entering = [None] * len(self.cells) if hx is None else hx.to(compute_dtype(hx.dtype)).unbind()
        cells, states, finals, dtype = iter(self.cells), iter(entering), [], x.dtype
        for layer in range(self.num_layers):
            x = functional.dropout(x, self.dropout, self.training) if layer else x
            orders: list[Callable[[Tensor], Tensor]] = [_keep, Flip(x, lengths)] if self.bidirectional else [_keep]
            outputs = []
            for order in orders:  # Flip is its own inverse
                output, final = _run_cell(next(cells), order(x), next(states), lengths)
                outputs.append(order(output))
                finals.append(final)
            x = torch.cat(outputs, -1).to(dtype)
        return x, torch.stack(finals)


def _keep(values: Tensor) -> Tensor:
    return values


def _run_cell(cell: Any, x: Tensor, state: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run one cell on (batch, time, features); return its outputs at all steps and its last state."""
    solution = Sequential().run(cell, x, state, lengths=lengths)
    with without_autocast(x.device):
        return cell.output(solution.states), solution.final
