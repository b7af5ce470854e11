"""Base class of recurrent layers: it runs any cell along a sequence."""

import abc
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._typing import Device, DType
from .._validate import check_dtype, check_finite, check_lengths, make_validity_mask, mark_finite
from ..cells import ADPTState, Cell
from ..errors import IncompatibleError, InputError, NotConvergedWarning
from ..ops._backends import Backend, note_run
from ..ops._fx import Proxy, record_call
from ..ops._torch_state import without_autocast
from ..recurrence.projections import Dense, Projection, ProjectionSpec
from ..recurrence.projections.base import apply_map
from ..solvers import Result, Return, Sequential, Solution, Solver
from ..solvers.adjoints import Adjoint, Unrolled
from ..solvers.named import as_adjoint, as_solver
from ..solvers.parallel import Parallel
from ..solvers.problem import Trajectory
from ..spec import reset_from_spec
from .packing import check_padded, run_packed, run_ragged
from .short_calls import run_short_call
from .streaming import Streamable

if TYPE_CHECKING:  # a spec builds a layer
    from .adpt_layer import LayerSpec

__all__ = ["RecurrentLayer"]

_SHORT_CALL = Backend("adpt_layer", "the call is short, and the kernel supports this layer.")
_SHORT_TRAINING_CALL = Backend("cpu", "the call is short, and drive and recurrence are one function of autograd.")


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

    spec: "LayerSpec | None"  # None if the layer was made from a cell rather than from its spec

    def __init__(
        self,
        cell: Cell,
        width: int,
        readout: ProjectionSpec | None,
        *,
        spec: "LayerSpec | None",
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
                note_run("forward", _SHORT_TRAINING_CALL if done[0].requires_grad else _SHORT_CALL)
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
        check_dtype(x, self.cell.dtype)
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
        options: dict[str, Any] = {"lengths": lengths, "reset": reset, "adjoint": adjoint}
        solution: Trajectory | Solution
        if type(solver) is Sequential:  # a subclass may solve in another way
            solution = solver.run(cell, x, self._as_state(state), **options)
        else:
            solution = solver(cell, x, self._as_state(state), **options)
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

    def _check_finite(self, x: Tensor, lengths: Tensor | None) -> None:
        if not x.is_floating_point():
            return  # the solver raises an error that names the dtype
        finite = mark_finite(x.detach())
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


def _check_no_dt(dt: Tensor | None) -> None:
    if dt is not None:
        raise InputError("dt= needs padded sequences. Pass lengths= instead of packing them.")


def _check_exclusive(what: str, **others: Tensor | None) -> None:
    for name, value in others.items():
        if value is not None:
            raise InputError(f"{what} already defines where sequences begin and end. Drop {name}=.")
