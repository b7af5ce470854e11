"""The layer: (batch, time, width) in and out, around any cell."""

import abc
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._typing import Device, DType
from ..cells import ADPTSpec, ADPTState, Cell, CellSpec
from ..cells.spec import axes as adpt_axes
from ..errors import IncompatibleError, InputError, NonFiniteError, NotConvergedWarning
from ..ops._fx import Proxy, record_call
from ..ops._torch_state import without_autocast
from ..recurrence.beta import BetaValue
from ..recurrence.projections import Dense, Projection, ProjectionSpec
from ..recurrence.projections.base import apply_map
from ..recurrence.spectra import Linspace, SpectrumSpec
from ..solvers import Result, Return, Sequential, Solution, Solver
from ..solvers.adjoints import Adjoint, Unrolled
from ..solvers.parallel import Parallel
from ..solvers.problem import check_dtype, check_lengths, valid
from ..spec import ModuleSpec, check_kind, reject_unknown, reset_from_spec, spec
from .packing import check_padded, packed_sequence, ragged

__all__ = ["ADPTNet", "LayerSpec", "Recurrent", "RecurrentLayer"]


@spec
class LayerSpec(ModuleSpec):
    """A layer: a cell and its read-out.

    Attributes:
        cell: What one step is.
        readout: From the state to the output. If not given: the state itself where it is as wide as the layer, a
            dense map otherwise.
        batch_first: Whether the layer takes (batch, time, width) or (time, batch, width).
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
        """Makes the layer: an `ADPTNet` if the cell is one, a `Recurrent` layer otherwise."""
        kind = ADPTNet if isinstance(self.cell, ADPTSpec) else Recurrent
        layer = kind.__new__(kind)
        cell = self.cell.build(device=device, dtype=dtype)
        RecurrentLayer.__init__(layer, cell, self.width, self.readout, spec=self, batch_first=self.batch_first)
        return layer


class RecurrentLayer(nn.Module, abc.ABC):
    """A cell run along a sequence, (batch, time, width) in and out; always returns outputs and state.

    The state is explicit: nothing is kept in the module between calls. `solver` and `adjoint` choose how a call runs
    and are no part of the model; the constructor only sets their defaults.
    """

    spec: LayerSpec | None  # None around a cell that was given as it is

    def __init__(
        self,
        cell: Cell,
        width: int,
        readout: ProjectionSpec | None,
        *,
        spec: LayerSpec | None,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        batch_first: bool = True,
    ):
        super().__init__()
        self.spec = spec
        self.width = width
        self.cell = cell
        self.readout: Projection | None = None
        self._readout = readout
        shown = cell.output_size or cell.state_size
        if readout is not None or shown != width:
            like = next(cell.parameters(), torch.empty(0))
            self.readout = (readout or Dense()).build(shown, width, device=like.device, dtype=like.dtype)
        self.solver: Solver = _solver(solver, Sequential())
        self.adjoint = adjoint
        self.batch_first = batch_first

    @property
    def state_size(self) -> int:
        return self.cell.state_size

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: ADPTState | None = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        dt: Tensor | None = None,
        beta: Tensor | None = None,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
    ) -> tuple[Any, ADPTState]:
        """Runs the layer along a sequence.

        Args:
            x: (batch, time, width); (time, batch, width) if not `batch_first`; (time, width) for one sequence; or a
                `PackedSequence`, which comes back packed.
            state: What an earlier call returned; the initial state if not given. Gradients flow through it.
            lengths: (batch,) true lengths of right-padded sequences. Outputs past the end are zero, the returned
                state is the one at the true end, and what is in the padding does not matter.
            reset: bool, laid out as `x` without its features. True at t: a new sequence begins at t.
            cu_seqlens: (sequences + 1,) where each sequence begins and the last one ends, in one packed row: `x` is
                (1, total, width). State in and out has one row for each sequence.
            dt: The length of each step in units of the usual one, laid out as `reset`: for irregular sampling.
            beta: (batch,) a β for each sequence, in place of the layer's own.
            solver: How to find the states; the layer's own by default.
            adjoint: How to differentiate; the layer's own by default.

        Returns:
            The outputs, of the shape and dtype of `x`, and the state after the last step.
        """
        if isinstance(x, Proxy):
            run = {"lengths": lengths, "reset": reset, "cu_seqlens": cu_seqlens, "dt": dt, "beta": beta}
            return record_call(self, x, state, run, solver=solver, adjoint=adjoint)
        if isinstance(x, PackedSequence):
            _alone("a PackedSequence", lengths=lengths, reset=reset, cu_seqlens=cu_seqlens)
            _padded_only(dt)
            cell = self.cell.given(beta=beta)
            return packed_sequence(x, lambda y, n: self._run(cell, y, state, n, None, solver, adjoint))
        if cu_seqlens is not None:
            _alone("cu_seqlens", lengths=lengths, reset=reset)
            _padded_only(dt)
            cell = self.cell.given(beta=beta)
            return ragged(x, cu_seqlens, lambda y, n: self._run(cell, y, state, n, None, solver, adjoint))
        self._check_shape(x)
        turned = x.dim() == 3 and not self.batch_first
        if turned:
            x, reset, dt = x.transpose(0, 1), _turned(reset), _turned(dt)
        outputs, final = self._run(self.cell.given(dt=dt, beta=beta), x, state, lengths, reset, solver, adjoint)
        return outputs.transpose(0, 1) if turned else outputs, final

    def step(
        self, x: Tensor, state: ADPTState | None = None, *, dt: Tensor | None = None, beta: Tensor | None = None
    ) -> tuple[Tensor, ADPTState]:
        """One step: (batch, width), or (width,) for one sequence. The same numbers as `forward`, O(1) each.

        `dt` and `beta` are (batch,), as in `forward`.
        """
        if x.dim() not in (1, 2) or x.shape[-1] != self.width:
            raise InputError(
                f"step takes one time step, (batch, {self.width}) or ({self.width},); got {tuple(x.shape)}. "
                "For a whole sequence call the layer itself."
            )
        cell = self.cell.given(dt=None if dt is None else torch.as_tensor(dt).unsqueeze(-1), beta=beta)
        outputs, final = self._run(cell, x.unsqueeze(-2), state, None, None, Sequential(), None)
        return outputs.squeeze(-2), final

    def solve(
        self,
        x: Tensor,
        state: ADPTState | None = None,
        *,
        solver: Solver | None = None,
        guess: Tensor | None = None,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        dt: Tensor | None = None,
        beta: Tensor | None = None,
        adjoint: Adjoint | None = None,
    ) -> Solution:
        """The states themselves, batch first, with how they were found. Refuses input that is not finite."""
        self._check_shape(x)
        if x.dim() == 3 and not self.batch_first:
            x, reset, dt = x.transpose(0, 1), _turned(reset), _turned(dt)
        self._check_finite(x, lengths)
        return _solver(solver, self.solver)(
            self.cell.given(dt=dt, beta=beta),
            x,
            _as_state(state),
            guess=guess,
            lengths=lengths,
            reset=reset,
            adjoint=adjoint or self.adjoint,
        )

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> ADPTState:
        """The state of `batch` sequences that have not begun."""
        state = self.cell.initial_state(batch, device=device, dtype=dtype)
        return ADPTState(state, torch.zeros(batch, dtype=torch.int64, device=state.device))

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as the constructor does."""
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
            for weight in list(self.readout.parameters())[:1]:  # a read-out without parameters has nothing to draw
                fresh = (self._readout or Dense()).build(*sizes, device=weight.device, dtype=weight.dtype)
                self.readout.load_state_dict(fresh.state_dict())

    def check(self, x: Tensor) -> None:
        """Raises if `x` has the wrong shape or is not finite. `forward` itself does not look for NaN."""
        self._check_shape(x)
        self._check_finite(x.transpose(0, 1) if x.dim() == 3 and not self.batch_first else x, None)

    def _run(
        self,
        cell: Cell,
        x: Tensor,
        state: ADPTState | None,
        lengths: Tensor | None,
        reset: Tensor | None,
        solver: Solver | None,
        adjoint: Adjoint | None,
    ) -> tuple[Tensor, ADPTState]:
        solver = _solver(solver, self.solver)
        if x.is_meta:  # only shapes are computed, and all solvers return the same ones
            solver, adjoint = Sequential(), Unrolled()
        solution = solver(cell, x, _as_state(state), lengths=lengths, reset=reset, adjoint=adjoint or self.adjoint)
        _warn_unless_solved(solution)
        with without_autocast(x.device):
            shown = self.cell.output(solution.states)
            outputs = shown if self.readout is None else apply_map(self.readout, shown)
        return outputs.to(x.dtype), ADPTState(solution.final, solution.position)

    def _check_shape(self, x: Tensor) -> None:
        check_padded(x)
        if x.dim() not in (2, 3) or x.shape[-1] != self.width:
            layout = "(batch, time, {w})" if self.batch_first else "(time, batch, {w})"
            raise InputError(
                f"the layer takes {layout.format(w=self.width)}, or (time, {self.width}) for one sequence; got shape "
                f"{tuple(x.shape)}. Build it with width={x.shape[-1] if x.dim() else 1}, or reshape x."
            )
        check_dtype(x, self.cell)

    def _check_finite(self, x: Tensor, lengths: Tensor | None) -> None:
        finite = x.isfinite().all(-1)
        if lengths is not None:
            rows = finite.reshape(-1, finite.shape[-1])
            known = check_lengths(torch.as_tensor(lengths).reshape(-1), rows.shape[0], rows.shape[1], x.device)
            assert known is not None
            finite = (rows | ~valid(known, rows.shape[1])).reshape(finite.shape)
        if not bool(finite.all()):
            where = tuple(int(i) for i in (~finite).nonzero()[0])
            place = f"sequence {where[0]}, step {where[1]}" if len(where) == 2 else f"step {where[0]}"
            raise NonFiniteError(
                f"x is not finite: first at {place}; {int((~finite).sum())} of {finite.numel()} steps hold NaN or "
                "infinity. Mend the data (x.isfinite() finds it); nothing is repaired here."
            )


def _warn_unless_solved(solution: Solution) -> None:
    solver = solution.solver
    if torch.compiler.is_compiling() or not isinstance(solver, Parallel) or not isinstance(solver.on_failure, Return):
        return  # any other policy deals with it
    if solution.result != Result.CONVERGED:
        warnings.warn(
            f"{solver} handed back states that are not solved ({solution.result.name}, residual "
            f"{float(solution.residual.max()):.1e}), as its policy Return() says. Pass on_failure=solvers.Finish() to "
            "have them completed.",
            NotConvergedWarning,
            stacklevel=4,
        )


def _turned(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    values = torch.as_tensor(values)
    if values.dim() != 2:
        raise InputError(f"reset and dt are laid out as x, (time, batch); got shape {tuple(values.shape)}.")
    return values.transpose(0, 1)


def _as_state(state: Any) -> ADPTState | None:
    if state is None or isinstance(state, ADPTState):
        return state
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(part, Tensor) for part in state):
        return ADPTState(*state)  # a state that went through a plain pytree
    raise InputError(
        f"state must be the ADPTState an earlier call returned; got {type(state).__name__}. "
        "Pass layer.initial_state(batch)._replace(state=...) to start from given numbers."
    )


def _solver(given: Solver | None, default: Solver) -> Solver:
    if given is None:
        return default
    if not isinstance(given, Solver):
        raise InputError(f"solver={given!r}: must be a solver object. Pass solver=solvers.Sequential().")
    return given


def _padded_only(dt: Tensor | None) -> None:
    if dt is not None:
        raise InputError("dt= goes with padded sequences. Pass lengths= instead of packing them.")


def _alone(what: str, **others: Tensor | None) -> None:
    for name, value in others.items():
        if value is not None:
            raise InputError(f"{what} already says where sequences begin and end; {name} does too. Drop {name}=.")


class ADPTNet(RecurrentLayer):
    """A recurrent layer with prescribed timescales and one dial for non-linearity: (batch, time, width) in and out.

    Args:
        width: Features in and out.
        state_size: Numbers in the state; `width` if not given.
        beta: The dial: 0 is a linear model, about 1 and above tracks states. A number, or `TrainableBeta(...)`.
        spectrum: The timescales.
        solver: How a call finds its states, unless the call says otherwise.
        adjoint: How a call is differentiated, likewise.
        batch_first: Whether `x` is (batch, time, width) or (time, batch, width).
        device: Where the parameters live.
        dtype: Of the parameters. The recurrence runs in at least float32.
        axes: The other choices: `retraction`, `conjugate`, `direction`, `projection`, `input_projection`, `gain`,
            `gate`, `rope`, `rotation_aware`, `start`, `memory` (see `cells.ADPTSpec`) and `readout` (see
            `nn.LayerSpec`).
    """

    def __init__(
        self,
        width: int,
        *,
        state_size: int | None = None,
        beta: BetaValue = 0.125,
        spectrum: SpectrumSpec = Linspace(),
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        batch_first: bool = True,
        device: Device = None,
        dtype: DType = None,
        **axes: Any,
    ):
        readout = axes.pop("readout", None)
        reject_unknown("ADPTNet", [name for name in axes if name not in adpt_axes()], (*adpt_axes(), "readout"))
        cell = ADPTSpec(width, state_size=state_size, beta=beta, spectrum=spectrum, **axes)
        super().__init__(
            cell.build(device=device, dtype=dtype),
            width,
            readout,
            spec=LayerSpec(cell, readout, batch_first),
            solver=solver,
            adjoint=adjoint,
            batch_first=batch_first,
        )


class Recurrent(RecurrentLayer):
    """A layer around any other cell, under the same contract: `Recurrent(cells.ReLURNN(width=64))`.

    Args:
        cell: The description of a cell; or a cell itself, such as `cells.from_torch(nn.GRUCell(64, 64))`, whose layer
            has no spec and is saved by its state dict.
        readout: From the state to the output; see `LayerSpec`.
        solver, adjoint, batch_first, device, dtype: As for `ADPTNet`.
    """

    def __init__(
        self,
        cell: CellSpec | Cell,
        *,
        readout: ProjectionSpec | None = None,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        batch_first: bool = True,
        device: Device = None,
        dtype: DType = None,
    ):
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
