"""Recurrent layers: `ADPTNet`, and `Recurrent` around any other cell."""

import abc
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._typing import Device, DType
from .._validate import check_dtype, check_finite, check_lengths, make_validity_mask
from ..cells import ADPTSpec, ADPTState, Cell, CellSpec, from_torch
from ..cells.spec import axes as adpt_axes
from ..errors import IncompatibleError, InputError, NotConvergedWarning, SpecError
from ..ops._backends import Backend, note_run
from ..ops._fx import Proxy, record_call
from ..ops._torch_state import without_autocast
from ..recurrence.beta import BetaValue
from ..recurrence.drive import EMA, LRU, SoftplusGate
from ..recurrence.projections import Dense, Projection, ProjectionSpec
from ..recurrence.projections.base import apply_map
from ..recurrence.spectra import SpectrumSpec, Timescales
from ..solvers import Result, Return, Sequential, Solution, Solver
from ..solvers.adjoints import Adjoint, Unrolled
from ..solvers.named import as_adjoint, as_solver
from ..solvers.parallel import Parallel
from ..spec import ModuleSpec, check_kind, reject_unknown, reset_from_spec, spec
from .packing import check_padded, run_packed, run_ragged
from .short_calls import run_short_call
from .streaming import Streamable

__all__ = ["ADPTNet", "LayerSpec", "Recurrent", "RecurrentLayer", "choose_spectrum"]

SHORTEST = 0.5  # steps: the shortest timescale of a layer made for sequences of a given length
LONGEST_PER_STEP = 2.0  # its longest timescale, in units of that length

_SHORT_CALL = Backend("adpt_layer", "the call is short, and the kernel supports this layer.")


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


class RecurrentLayer(Streamable, abc.ABC):
    """Base class of layers that run a cell along a sequence: (batch, time, width) in and out.

    A call returns outputs and the hidden state. Nothing is kept in the module between calls. `solver` and `adjoint`
    choose how a call is computed and are not part of the model; the constructor only sets their defaults.

    Args:
        cell: The cell.
        width: Features of the inputs; and of the outputs, if there is a read-out.
        readout: The map from the cell's output to `width`. If None: a dense map if there is a spec and the sizes
            differ, otherwise none.
        spec: The spec of the layer; None if it was made from a cell.
        solver: The default solver; `Sequential()` if None.
        adjoint: The default adjoint; that of the solver if None.
        batch_first: Whether inputs are (batch, time, width) rather than (time, batch, width).
    """

    spec: LayerSpec | None  # None if the layer was made from a cell rather than from its spec

    def __init__(
        self,
        cell: Cell,
        width: int,
        readout: ProjectionSpec | None,
        *,
        spec: LayerSpec | None,
        solver: Solver | str | None = None,
        adjoint: Adjoint | str | None = None,
        batch_first: bool = True,
    ):
        super().__init__()
        self.spec = spec
        self.width = width
        self.cell = cell
        self.readout: Projection | None = None
        self._readout = readout
        shown = cell.output_size or cell.state_size
        if readout is not None or (spec is not None and shown != width):
            like = next(cell.parameters(), torch.empty(0))
            self.readout = (readout or Dense()).build(shown, width, device=like.device, dtype=like.dtype)
        self.solver: Solver = Sequential() if solver is None else as_solver(solver)
        self.adjoint = as_adjoint(adjoint)
        self.batch_first = batch_first

    @property
    def state_size(self) -> int:
        """State dimension."""
        return self.cell.state_size

    @property
    def output_size(self) -> int:
        """Features of the output: `width`, or those of the cell if it is shown without a read-out."""
        return self.width if self.readout is not None else self.cell.output_size or self.cell.state_size

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: Any = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        dt: Tensor | None = None,
        beta: Tensor | None = None,
        solver: Solver | str | None = None,
        adjoint: Adjoint | str | None = None,
    ) -> tuple[Any, ADPTState]:
        """Run the layer along a sequence.

        Args:
            x: (batch, time, width); (time, batch, width) if not `batch_first`; (time, width) for one sequence; or a
                `PackedSequence`, for which the output is packed too.
            state: The state that an earlier call returned; the initial state by default. Gradients flow through it. A
                tensor (batch, state_size) is a state at position 0, and so is the hidden state of a wrapped module or
                function in its own structure, such as (h, c).
            lengths: (batch,) true lengths of right-padded sequences. Outputs past the end are zero, the returned state
                is that of the last valid step, and values in the padding have no effect.
            reset: bool, shaped as `x` without features. True at t means that a new sequence begins at t.
            cu_seqlens: (sequences + 1,) cumulative lengths of sequences concatenated in one row: `x` is
                (1, total, width). The state in and out has one row per sequence.
            dt: Length of each step relative to the usual one, shaped as `reset`: for irregular sampling.
            beta: (batch,) a β for each sequence, in place of the layer's own.
            solver: The solver for the states, or its name, such as "deer"; the layer's own by default.
            adjoint: The method of differentiation, or its name; the layer's own by default.

        Returns:
            The outputs, with shape and dtype of `x`, and the state after the last step.

        Raises:
            InputError: An argument has the wrong type, shape, dtype or device.
        """
        if isinstance(x, Proxy):
            run = {"lengths": lengths, "reset": reset, "cu_seqlens": cu_seqlens, "dt": dt, "beta": beta}
            return record_call(self, x, state, run, solver=solver, adjoint=adjoint)
        plain = lengths is None and reset is None and cu_seqlens is None and dt is None and beta is None
        if plain and solver is None and adjoint is None and isinstance(x, Tensor) and self._is_plain_sequence(x):
            done = run_short_call(self, x, state)
            if done is not None:
                note_run("forward", _SHORT_CALL)
                return done
        if isinstance(x, PackedSequence):
            _check_exclusive("a PackedSequence", lengths=lengths, reset=reset, cu_seqlens=cu_seqlens)
            _check_no_dt(dt)
            cell = self.cell.with_arguments(beta=beta)
            return run_packed(x, lambda y, n: self._run(cell, y, state, n, None, solver, adjoint))
        if cu_seqlens is not None:
            _check_exclusive("cu_seqlens", lengths=lengths, reset=reset)
            _check_no_dt(dt)
            cell = self.cell.with_arguments(beta=beta)
            return run_ragged(x, cu_seqlens, lambda y, n: self._run(cell, y, state, n, None, solver, adjoint))
        self._check_shape(x)
        is_time_first = x.dim() == 3 and not self.batch_first
        if is_time_first:
            x, reset, dt = x.transpose(0, 1), _to_batch_first(reset), _to_batch_first(dt)
        outputs, final = self._run(
            self.cell.with_arguments(dt=dt, beta=beta), x, state, lengths, reset, solver, adjoint
        )
        return outputs.transpose(0, 1) if is_time_first else outputs, final

    def step(
        self, x: Tensor, state: Any = None, *, dt: Tensor | None = None, beta: Tensor | None = None
    ) -> tuple[Tensor, ADPTState]:
        """Run one step, with the same result as `forward`. The cost does not depend on the position.

        Args:
            x: (batch, width), or (width,) for one sequence.
            state: As in `forward`.
            dt: (batch,) length of the step, as in `forward`.
            beta: (batch,) a β for each sequence, as in `forward`.

        Returns:
            The outputs, shaped as `x`, and the state after the step.
        """
        if x.dim() not in (1, 2) or x.shape[-1] != self.width:
            raise InputError(
                f"step takes one time step, (batch, {self.width}) or ({self.width},); got {tuple(x.shape)}. "
                "For a whole sequence call the layer itself."
            )
        if dt is None and beta is None and x.dim() == 2:
            done = run_short_call(self, x, state)
            if done is not None:
                return done
        if torch.compiler.is_exporting() and dt is None and beta is None and x.dim() == 2:
            return self._step_in_torch(x, state)
        cell = self.cell.with_arguments(dt=None if dt is None else torch.as_tensor(dt).unsqueeze(-1), beta=beta)
        outputs, final = self._run(cell, x.unsqueeze(-2), state, None, None, Sequential(), None)
        return outputs.squeeze(-2), final

    def solve(
        self,
        x: Tensor,
        state: Any = None,
        *,
        solver: Solver | str | None = None,
        guess: Tensor | None = None,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        dt: Tensor | None = None,
        beta: Tensor | None = None,
        adjoint: Adjoint | str | None = None,
    ) -> Solution:
        """Run the layer and return the states themselves with information about the solver.

        Args:
            x: As in `forward`, padded.
            state: The state that an earlier call returned.
            solver: The solver for the states; the layer's own by default.
            guess: Initial guess of the states for a parallel solver, (batch, time, state_size).
            lengths: As in `forward`.
            reset: As in `forward`.
            dt: As in `forward`.
            beta: As in `forward`.
            adjoint: The method of differentiation; the layer's own by default.

        Returns:
            The solution. Its states are batch first.

        Raises:
            NonFiniteError: `x` holds NaN or infinity.
        """
        self._check_shape(x)
        if x.dim() == 3 and not self.batch_first:
            x, reset, dt = x.transpose(0, 1), _to_batch_first(reset), _to_batch_first(dt)
        self._check_finite(x, lengths)
        return (self.solver if solver is None else as_solver(solver))(
            self.cell.with_arguments(dt=dt, beta=beta),
            x,
            self._as_state(state),
            guess=guess,
            lengths=lengths,
            reset=reset,
            adjoint=as_adjoint(adjoint) or self.adjoint,
        )

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> ADPTState:
        """Return the state before the first step.

        Args:
            batch: Number of sequences.
            device: Device of the state; that of the parameters by default.
            dtype: Dtype of the state; that of the recurrence by default.
        """
        state = self.cell.initial_state(batch, device=device, dtype=dtype)
        return ADPTState(state, torch.zeros(batch, dtype=torch.int64, device=state.device))

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        if self.spec is not None:
            reset_from_spec(self, self.spec)
            return
        owners: list[Any] = [module for module in self.cell.modules() if hasattr(module, "reset_parameters")]
        owned = {id(p) for module in owners for p in module.parameters()}
        for name, parameter in self.cell.named_parameters():
            if id(parameter) not in owned:
                raise IncompatibleError(
                    f"reset_parameters: {name} belongs to no module that has reset_parameters(). Give your module one."
                )
        for module in owners:
            module.reset_parameters()
        if self.readout is not None:
            sizes = self.cell.output_size or self.cell.state_size, self.width
            for weight in list(self.readout.parameters())[:1]:  # none in a read-out without parameters
                fresh = (self._readout or Dense()).build(*sizes, device=weight.device, dtype=weight.dtype)
                self.readout.load_state_dict(fresh.state_dict())

    def check(self, x: Tensor) -> None:
        """Raise `InputError` if `x` has the wrong shape or dtype, or is not finite. `forward` does not look for NaN.

        Args:
            x: Inputs as for `forward`, padded.
        """
        self._check_shape(x)
        self._check_finite(x.transpose(0, 1) if x.dim() == 3 and not self.batch_first else x, None)

    def _run(
        self,
        cell: Cell,
        x: Tensor,
        state: Any,
        lengths: Tensor | None,
        reset: Tensor | None,
        solver: Solver | str | None,
        adjoint: Adjoint | str | None,
    ) -> tuple[Tensor, ADPTState]:
        solver = self.solver if solver is None else as_solver(solver)
        adjoint = as_adjoint(adjoint) or self.adjoint
        if x.is_meta:  # only shapes are computed, and all solvers return the same ones
            solver, adjoint = Sequential(), Unrolled()
        solution = solver(cell, x, self._as_state(state), lengths=lengths, reset=reset, adjoint=adjoint)
        _warn_unless_converged(solution)
        with without_autocast(x.device):
            shown = self.cell.output(solution.states)
            outputs = shown if self.readout is None else apply_map(self.readout, shown)
        return outputs.to(x.dtype), ADPTState(solution.final, solution.position)

    def _as_state(self, state: Any) -> ADPTState | None:
        """Return a state that a user passed as an `ADPTState`, at position 0 if it has none."""
        if state is None or isinstance(state, ADPTState):
            return state
        if isinstance(state, tuple) and len(state) == 2 and getattr(state[1], "dtype", None) == torch.int64:
            return ADPTState(*state)  # a state that passed through a generic pytree
        flat = self.cell.ravel(state)
        return ADPTState(flat, torch.zeros(flat.shape[:-1], dtype=torch.int64, device=flat.device))

    def _step_in_torch(self, x: Tensor, state: Any) -> tuple[Tensor, ADPTState]:
        """Run one step in operations of torch alone, which programs without adptnet have too."""
        before = self._as_state(state) or self.initial_state(x.shape[0])
        inputs = x.to(before.state.dtype).unsqueeze(-2)
        drive = self.cell.prepare(inputs, before.position.unsqueeze(-1)).squeeze(-2)
        after = self.cell.step(before.state, drive)
        shown = self.cell.output(after)
        outputs = shown if self.readout is None else apply_map(self.readout, shown)
        return outputs.to(x.dtype), ADPTState(after, before.position + 1)

    def _is_plain_sequence(self, x: Tensor) -> bool:
        """Return whether `x` is a padded batch, batch first, that the default solver runs step by step."""
        is_batch = not x.is_nested and x.dim() == 3 and self.batch_first
        return is_batch and type(self.solver) is Sequential and self.adjoint is None

    def _check_shape(self, x: Tensor) -> None:
        check_padded(x)
        if x.dim() not in (2, 3) or x.shape[-1] != self.width:
            layout = "batch, time" if self.batch_first else "time, batch"
            if x.dim() in (2, 3):
                given = x.shape[-1]
                fix = f"Build the layer with width={given}, or put nn.Linear({given}, {self.width}) before it."
            else:
                fix = "x must have 2 or 3 dimensions."
            raise InputError(
                f"the layer takes ({layout}, {self.width}), or (time, {self.width}) for one sequence; got shape "
                f"{tuple(x.shape)}. {fix}"
            )
        check_dtype(x, self.cell.dtype)

    def _check_finite(self, x: Tensor, lengths: Tensor | None) -> None:
        finite = x.isfinite().all(-1)
        if lengths is not None:
            rows = finite.reshape(-1, finite.shape[-1])
            known = check_lengths(torch.as_tensor(lengths).reshape(-1), rows.shape[0], rows.shape[1], x.device)
            assert known is not None
            finite = (rows | ~make_validity_mask(known, rows.shape[1])).reshape(finite.shape)
        check_finite(finite, "x is", "Locate them with ~x.isfinite(); adptnet never replaces them.")


def _warn_unless_converged(solution: Solution) -> None:
    solver = solution.solver
    if torch.compiler.is_compiling() or not isinstance(solver, Parallel) or not isinstance(solver.on_failure, Return):
        return  # every other policy handles failure itself
    if solution.result != Result.CONVERGED:
        warnings.warn(
            f"{solver} did not converge ({solution.result.name}, residual {float(solution.residual.max()):.1e}), and "
            "its policy Return() returns the states as they are. Pass on_failure=solvers.Finish() to complete them "
            "sequentially.",
            NotConvergedWarning,
            stacklevel=4,
        )


def _to_batch_first(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    values = torch.as_tensor(values)
    if values.dim() != 2:
        raise InputError(f"reset and dt must be (time, batch), as x; got shape {tuple(values.shape)}.")
    return values.transpose(0, 1)


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


def _check_no_dt(dt: Tensor | None) -> None:
    if dt is not None:
        raise InputError("dt= needs padded sequences. Pass lengths= instead of packing them.")


def _check_exclusive(what: str, **others: Tensor | None) -> None:
    for name, value in others.items():
        if value is not None:
            raise InputError(f"{what} already defines where sequences begin and end. Drop {name}=.")


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
