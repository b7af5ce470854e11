"""Recurrent layers built from a `LayerSpec`: `ADPTNet`, and `Recurrent` around any other cell."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .._typing import Device, DType
from ..cells import ADPTSpec, Cell, CellSpec, from_torch
from ..cells.spec import axes as adpt_axes
from ..errors import InputError, SpecError
from ..recurrence.beta import BetaValue
from ..recurrence.drive import EMA, LRU, SoftplusGate
from ..recurrence.projections import Dense, ProjectionSpec
from ..recurrence.spectra import SpectrumSpec, Timescales
from ..solvers import Solver
from ..solvers.adjoints import Adjoint
from ..spec import ModuleSpec, check_kind, reject_unknown, spec
from .layer import RecurrentLayer

__all__ = ["ADPTNet", "LayerSpec", "Recurrent", "choose_spectrum"]

SHORTEST = 0.5  # steps: the shortest timescale of a layer made for sequences of a given length
LONGEST_PER_STEP = 2.0  # its longest timescale, in units of that length


@spec
class LayerSpec(ModuleSpec):
    """A recurrent layer: a cell and its read-out.

    Attributes:
        cell: The cell, which defines one step.
        readout: Map from the output of the cell to that of the layer. If not given: none where the cell's output is as
            wide as the layer, a dense map otherwise.
        batch_first: True for (batch, time, width), False for (time, batch, width).
    """

    cell: CellSpec
    readout: ProjectionSpec | None = None
    batch_first: bool = True

    def __post_init__(self) -> None:
        check_kind(self, CellSpec, "cells.ADPTSpec(width=64)", cell=self.cell)
        if self.readout is not None:
            check_kind(self, ProjectionSpec, "projections.Dense()", readout=self.readout)

    @property
    def width(self) -> int:
        """Features in and out."""
        return self.cell.width

    def build(self, *, device: Device = None, dtype: DType = None) -> "RecurrentLayer":
        """Build the layer: an `ADPTNet` for an ADPT cell, a `Recurrent` layer otherwise."""
        kind = ADPTNet if isinstance(self.cell, ADPTSpec) else Recurrent
        layer = kind.__new__(kind)
        cell = self.cell.build(device=device, dtype=dtype)
        RecurrentLayer.__init__(layer, cell, self.width, self.readout, spec=self, batch_first=self.batch_first)
        return layer


class ADPTNet(RecurrentLayer):
    """A recurrent layer with prescribed timescales and adjustable non-linearity: (batch, time, width) in and out.

    The default suits inputs of unit scale and sequences of ten to a few thousand steps: timescales from half a step to
    200 steps, the gain `LRU`, an input gate, and β = 1. `ADPTNet.paper` has the defaults of the paper.

    Args:
        width: Features in and out, the only positional argument.
        more: Not used: raises `SpecError` with the call to type.
        timescales: The shortest and the longest timescale of the state, in steps; (0.5, 200) if not given.
        length: Number of steps of your sequences, in place of `timescales`: half a step to twice the length.
        beta: Strength of the non-linearity: 0 for a linear model, about 1 or more for state tracking. A number, or
            `TrainableBeta(...)`.
        state_size: State dimension; `width` if not given.
        spectrum: The eigenvalues of the recurrence, in place of `timescales`, for every other choice. This and every
            other component may be given by name, such as spectrum="linspace" or gain="ema", for its default settings.
        solver: Default solver of a call, or its name, such as "deer"; sequential if not given.
        adjoint: Default method of differentiation.
        batch_first: True for `x` of shape (batch, time, width), False for (time, batch, width).
        device: Device of the parameters.
        dtype: Dtype of the parameters. The recurrence runs in at least float32.
        axes: Other components of the model: `retraction`, `conjugate`, `direction`, `projection`, `input_projection`,
            `gain`, `gate`, `rope`, `rotation_aware`, `start`, `memory` (see `cells.ADPTSpec`) and `readout` (see
            `nn.LayerSpec`). If not given, `gain` is `drive.LRU()` (`drive.EMA()` with a slow `memory`, which is
            unstable with `LRU`) and `gate` is `drive.SoftplusGate()`; the others are those of `cells.ADPTSpec`.

    Raises:
        SpecError: More than one of `timescales`, `length` and `spectrum` is given, or a value is invalid.
    """

    def __init__(
        self,
        width: int | None = None,
        *more: Any,
        timescales: tuple[float, float] | None = None,
        length: int | None = None,
        beta: BetaValue = 1.0,
        state_size: int | None = None,
        spectrum: SpectrumSpec | None = None,
        solver: Solver | str | None = None,
        adjoint: Adjoint | str | None = None,
        batch_first: bool = True,
        device: Device = None,
        dtype: DType = None,
        **axes: Any,
    ):
        width = _check_width(width, more, axes)
        gain = LRU() if axes.get("memory") is None else EMA()
        axes = {"gain": gain, "gate": SoftplusGate(), **axes}
        chosen = choose_spectrum(timescales, length, spectrum)
        layer = _make_spec(width, batch_first, state_size=state_size, beta=beta, spectrum=chosen, **axes)
        self._setup(layer, solver, adjoint, device, dtype)

    @classmethod
    def paper(
        cls,
        width: int | None = None,
        *more: Any,
        solver: Solver | str | None = None,
        adjoint: Adjoint | str | None = None,
        batch_first: bool = True,
        device: Device = None,
        dtype: DType = None,
        **axes: Any,
    ) -> "ADPTNet":
        """Return a layer with the defaults of the paper: β = 0.125, `Linspace()`, the gain `EMA`, no gate.

        Its timescales are 20 to 2000 steps, so it passes on little of its input within a hundred steps.

        Args:
            width: Features in and out.
            more: As for `ADPTNet`.
            solver: As for `ADPTNet`.
            adjoint: As for `ADPTNet`.
            batch_first: As for `ADPTNet`.
            device: As for `ADPTNet`.
            dtype: As for `ADPTNet`.
            axes: `state_size`, `beta`, `spectrum` and the other components, whose defaults are those of
                `cells.ADPTSpec`.
        """
        layer, width = cls.__new__(cls), _check_width(width, more, axes)
        layer._setup(_make_spec(width, batch_first, **axes), solver, adjoint, device, dtype)
        return layer

    def _setup(
        self, spec: LayerSpec, solver: Solver | str | None, adjoint: Adjoint | str | None, device: Device, dtype: DType
    ) -> None:
        RecurrentLayer.__init__(
            self,
            spec.cell.build(device=device, dtype=dtype),
            spec.width,
            spec.readout,
            spec=spec,
            solver=solver,
            adjoint=adjoint,
            batch_first=spec.batch_first,
        )


def _check_width(width: int | None, more: tuple[Any, ...], axes: Iterable[str]) -> int:
    """Return `width`. Raise `SpecError` if it is missing, has another name, or is not the only positional argument."""
    gru = "adptnet.nn.ADPTRNN(input_size, hidden_size) has the arguments of nn.GRU"
    if more:
        call = f"({', '.join(map(str, (width, *more)))})"
        raise SpecError(
            f"ADPTNet{call}: ADPTNet has one positional argument, its width, the features in and out. Pass "
            f"ADPTNet({width}, state_size={more[0]}) for a state of another size, or adptnet.nn.ADPTRNN{call}: {gru}."
        )
    for name in axes:
        if name in ("d_model", "dim", "embed_dim", "features", "hidden_size", "input_size"):
            raise SpecError(f"ADPTNet has no argument {name!r}. Pass width=, the features in and out; {gru}.")
    if width is None:
        raise SpecError(f"ADPTNet needs its width, the features in and out. Pass ADPTNet(64); {gru}.")
    return width


def _make_spec(width: int, batch_first: bool, **axes: Any) -> LayerSpec:
    """Return the spec of an ADPT layer; `readout` is a component of the layer, all others are those of the cell."""
    readout = axes.pop("readout", None)
    own = ("readout", "timescales", "length")
    reject_unknown("ADPTNet", [name for name in axes if name not in adpt_axes()], (*adpt_axes(), *own))
    return LayerSpec(ADPTSpec(width, **axes), readout, batch_first)


def choose_spectrum(
    timescales: tuple[float, float] | None = None, length: int | None = None, spectrum: SpectrumSpec | str | None = None
) -> Any:
    """Return the spectrum that one of three arguments describes, or the default if none is given; text as it is.

    Args:
        timescales: The shortest and the longest timescale, in steps.
        length: The number of steps of a sequence.
        spectrum: The spectrum itself, or its name.

    Raises:
        SpecError: More than one of them is given, or a value is invalid.
    """
    given = {"timescales": timescales, "length": length, "spectrum": spectrum}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise SpecError(f"{' and '.join(f'{name}=' for name in names)} all set the timescales. Pass one of them.")
    if spectrum is not None:
        return spectrum
    if length is not None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise SpecError(f"length={length!r}: must be a number of steps, an integer >= 1, e.g. length=196.")
        return Timescales(SHORTEST, max(1.0, LONGEST_PER_STEP * length))
    if timescales is None:
        return Timescales()
    if not isinstance(timescales, (tuple, list)) or len(timescales) != 2:
        raise SpecError(
            f"timescales={timescales!r}: must be the shortest and the longest in steps, e.g. timescales=(0.5, 200)."
        )
    return Timescales(*timescales)


class Recurrent(RecurrentLayer):
    """A recurrent layer around any other cell, with the interface of `ADPTNet`: `Recurrent(cells.ReLURNN(width=64))`.

    Around the spec of a cell, the output has the features of the input, by a read-out if needed. Around a cell
    itself or a module of `torch.nn`, the output is the hidden state as it is, such as 32 features of
    `nn.GRUCell(16, 32)`, unless `readout` is given. Such a layer has no spec; save its state dict.

    Args:
        cell: The spec of a cell; a cell, such as `cells.from_function(step, state_size=64, input_size=16)`; or an
            `nn.GRUCell`, a whole `nn.GRU` or another recurrent module of `torch.nn`.
        readout: Map from the output of the cell to as many features as the input has; see `LayerSpec`.
        batch_first: True for (batch, time, width), False for (time, batch, width). If not given, that of a whole
            `nn.GRU`, and True otherwise.
        solver, adjoint, device, dtype: See `ADPTNet`.
    """

    def __init__(
        self,
        cell: CellSpec | nn.Module,
        *,
        readout: ProjectionSpec | None = None,
        solver: Solver | str | None = None,
        adjoint: Adjoint | str | None = None,
        batch_first: bool | None = None,
        device: Device = None,
        dtype: DType = None,
    ):
        if batch_first is None:
            batch_first = bool(getattr(cell, "batch_first", True))
        if isinstance(cell, nn.RNNCellBase | nn.RNNBase):
            cell = from_torch(cell)
        if isinstance(cell, nn.Module) and not isinstance(cell, Cell):
            raise InputError(
                f"Recurrent takes the spec of a cell or a cell; got {type(cell).__name__}. Pass "
                "cells.from_torch(module) for a module with the signature of nn.GRUCell, or "
                "cells.from_function(step, state_size=n) for a function."
            )
        spec = None if isinstance(cell, Cell) else LayerSpec(cell, readout, batch_first)
        if isinstance(cell, Cell):
            built = cell if device is None and dtype is None else cell.to(device=device, dtype=dtype)
        else:
            built = cell.build(device=device, dtype=dtype)
        if built.input_size is None:
            raise InputError("a layer needs to know its width. Pass input_size= to cells.from_function.")
        super().__init__(
            built, built.input_size, readout, spec=spec, solver=solver, adjoint=adjoint, batch_first=batch_first
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # Layers around a cell once had a dense read-out where the sizes differ: their state dicts still load.
        weight = state_dict.get(f"{prefix}readout.weight")
        if self.spec is None and self.readout is None and isinstance(weight, Tensor):
            sizes = self.cell.output_size or self.cell.state_size, self.width
            self._readout = Dense()
            self.readout = self._readout.build(*sizes, device=weight.device, dtype=weight.dtype)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
