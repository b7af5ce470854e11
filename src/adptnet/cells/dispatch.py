"""Choose the program that runs a cell, with the reason: all steps in sequence, or one step at known states.

A kernel computes a recurrence of a fixed form. First the cell must have that form: no replaced step, no hooks on K and
V, and only classes that the form knows. Then `ops.adpt_scan.dispatch` decides by the form, dtype, device and
environment. Every caller of an ADPT kernel asks here: `scan`, Jacobians, Newton passes, `solvers.Auto`, short calls.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops._backends import REFERENCE, TRANSFORMED, Backend, note_run
from ..ops._torch_state import is_transformed
from ..ops.adpt_scan import Form, RetractionKind, Source, adpt_scan, choose
from ..ops.adpt_scan import choose_step as choose_step_of_form
from ..ops.adpt_scan.packing import change_basis, pack, stack_factors
from ..recurrence.beta import is_zero
from ..recurrence.conjugates import Diagonal, Exact, Product, Taylor
from ..recurrence.directions import LAYER_NORM_EPS, Directions, FromInput, FromState, FromWholeState
from ..recurrence.retractions import Cayley, Exponential
from ..recurrence.step import Parameters
from .base import Cell
from .spec import ADPTSpec

__all__ = ["Recurrence", "choose_scan", "choose_step", "explain_replaced", "make_form", "run_scan"]

# The methods that define the step of a cell. Not every cell has all of them.
_STEP = ("step", "stepper", "initial_state", "prepare", "prepare_with_arguments", "evaluate")

_HOOKED = Backend(
    REFERENCE,
    "K or V has hooks or is not a projection of adptnet, so the module is called at every step.",
    "Remove the hooks from K and V, and use projections of adptnet.",
)
_START = Backend(
    REFERENCE,
    "the kernel for Jacobians and Newton passes does not support a learned start.",
    "Use a cell without start=True.",
    is_announced=True,
)


class Recurrence(NamedTuple):
    """The recurrence of a cell, as far as it decides whether a kernel computes it."""

    owners: tuple[tuple[Cell, type[Cell]], ...]  # cells that define the step, and the class whose step each must have
    spec: ADPTSpec
    directions: nn.ModuleList  # K and V of each plane
    modules: tuple[nn.Module, ...]  # everything with parameters of the step: spectrum, β, K and V
    form: Form  # the recurrence as a kernel takes it
    dt: bool = False  # whether the length of each step is part of the drive


def choose_scan(
    recurrence: Recurrence, dtype: torch.dtype | None, device: torch.device, tensors: Sequence[Tensor] = ()
) -> Backend:
    """Choose the program that runs all steps of a cell, forward and backward.

    Args:
        recurrence: The recurrence of the cell.
        dtype: The dtype of its drive; None if unknown.
        device: The device of its drive, which need not be present.
        tensors: Tensors of the call.
    """
    reference = _explain_modified(recurrence) or _explain_custom(recurrence.spec) or _explain_unsupported(recurrence)
    if reference is not None:
        return reference
    if is_transformed(*tensors):
        return TRANSFORMED
    spec = recurrence.spec
    paired, slow = spec.spectrum.is_complex, spec.memory is not None
    return choose(recurrence.form, spec.size, paired=paired, slow=slow, dtype=dtype, device=device)


def choose_step(recurrence: Recurrence, states: Tensor, drive: Tensor, diagonal: bool | None = None) -> Backend:
    """Choose the program for the step of a cell at known states: Jacobians and Newton passes.

    Args:
        recurrence: The recurrence of the cell.
        states: The states.
        drive: The drive.
        diagonal: None for Jacobians; for a Newton pass, whether its transition is diag(M) instead of Λ̄.
    """
    reference = _explain_modified(recurrence) or _explain_custom(recurrence.spec) or _explain_unsupported(recurrence)
    if reference is not None:
        return reference
    spec = recurrence.spec
    if spec.start:
        return _START
    paired, slow = spec.spectrum.is_complex, spec.memory is not None
    sources = (t for part in recurrence.modules for t in itertools.chain(part.parameters(), part.buffers()))
    tensors = states, drive, *sources
    return choose_step_of_form(recurrence.form, spec.size, tensors, paired=paired, slow=slow, diagonal=diagonal)


def run_scan(
    parameters: Parameters, recurrence: Recurrence, drive: Tensor, state: Tensor, **options: Any
) -> Tensor | None:
    """Run all steps by the kernel that `choose_scan` chose.

    Args:
        parameters: The evaluated parameters, with K and V as matrices.
        recurrence: The recurrence.
        drive: (batch, time, features).
        state: (batch, state_size).
        options: `reset`, `lengths` and `lean` of `adpt_scan`.

    Returns:
        The states, (batch, time, state_size); None inside a `torch.func` transform.
    """
    constants, form, start = pack(parameters, recurrence.form), recurrence.form, parameters.start
    if is_transformed(drive, state, *constants):
        note_run("forward", TRANSFORMED)
        return None
    if start is None:
        factors = stack_factors(recurrence.directions, form, drive.dtype)
        return adpt_scan(drive, state, constants, form, factors=factors, **options)
    start = start.to(drive.dtype)
    rotated = change_basis(start, constants, form, drive, state)
    return adpt_scan(rotated.drive, rotated.state, rotated.constants, form, **options) @ start.mT


def make_form(spec: ADPTSpec, *, beta_in_drive: bool = False) -> Form:
    """Return the form of the recurrence of a cell.

    Args:
        spec: The spec of the cell.
        beta_in_drive: Whether β is part of the drive.
    """
    direction, conjugate = spec.direction, spec.conjugate
    rotates = conjugate.has_directions
    source, spike, dot, norm, whole, softness = Source.STATE, 0.0, None, None, False, 0.0
    if isinstance(direction, FromState):
        source = Source.RELU if direction.relu else Source.STATE
        if direction.spike is not None:
            source, spike = Source.SPIKES, direction.spike
        if rotates:
            dot, norm = direction.dot, LAYER_NORM_EPS if direction.layer_norm else None
    if rotates and isinstance(direction, FromWholeState):
        softness = direction.softness
        whole = direction.heads > 1 or softness > 0
    retraction = RetractionKind.CAYLEY if isinstance(spec.retraction, Cayley) else RetractionKind.EXPONENTIAL
    if isinstance(conjugate, Taylor):
        retraction = RetractionKind.TAYLOR_ONE if conjugate.order == 1 else RetractionKind.TAYLOR_TWO
    return Form(
        heads=spec.heads,
        rotates=rotates,
        directions_in_drive=rotates and spec.has_directions_in_drive(beta_in_drive=beta_in_drive),
        beta_in_drive=beta_in_drive,
        source=int(source),
        spike_threshold=spike,
        retraction=int(retraction),
        dot=dot,
        rotation_aware=spec.rotation_aware,
        norm_epsilon=norm,
        linear=rotates and not beta_in_drive and is_zero(spec.beta),
        phased=spec.phase is not None,
        planes=max(1, conjugate.planes),
        whole_state=whole,
        softness=softness,
    )


def _explain_modified(recurrence: Recurrence) -> Backend | None:
    """Return the reference with the reason if modules were replaced or hooked, so that they must be called."""
    for cell, kind in recurrence.owners:
        replaced = explain_replaced(cell, kind)
        if replaced is not None:
            return replaced
    stock = all(isinstance(module, Directions) and module.is_stock() for module in recurrence.directions)
    return None if stock else _HOOKED


def explain_replaced(cell: Cell, kind: type[Cell]) -> Backend | None:
    """Return the reference with the reason if a method that defines the step is not that of `kind`; None if all are.

    Args:
        cell: The cell.
        kind: The class for which a kernel exists.
    """
    own, actual = cell.__dict__, type(cell)
    if actual is kind and True not in [name in own for name in _STEP]:
        return None
    for name in _STEP:
        if name in own or getattr(actual, name, None) is not getattr(kind, name, None):
            reason = f"{actual.__name__} replaces {name}() of {kind.__name__}, and a kernel computes only the original."
            return Backend(REFERENCE, reason, f"Use {kind.__name__} itself if its step is the one you need.")
    return None


def _explain_custom(spec: ADPTSpec) -> Backend | None:
    """Return the reference with the reason if `Form` cannot express a component of the model; None if it can."""
    # Types are compared exactly: a subclass may define another model.
    if type(spec.conjugate) not in (Exact, Taylor, Diagonal, Product):
        return _name_axis(spec, "conjugate", "conjugates.Exact()")
    if spec.conjugate.has_rotation and type(spec.retraction) not in (Exponential, Cayley):
        return _name_axis(spec, "retraction", "retractions.Exponential()")
    if type(spec.direction) not in (FromState, FromInput, FromWholeState):
        return _name_axis(spec, "direction", "directions.FromState()")
    return None


def _name_axis(spec: ADPTSpec, axis: str, known: str) -> Backend:
    reason = f"the kernel does not support {axis}={getattr(spec, axis)}."
    return Backend(REFERENCE, reason, f"Use {axis}={known} if the model may change.")


def _explain_unsupported(recurrence: Recurrence) -> Backend | None:
    """Return the reference with the reason if no kernel supports this combination of options; None if one does."""
    spec, direction = recurrence.spec, recurrence.spec.direction
    from_state = isinstance(direction, FromState)
    varying = _explain_varying(recurrence)
    if varying is not None:
        return varying
    if recurrence.form.beta_in_drive and spec.heads > 1:
        return Backend(REFERENCE, "the kernel does not support beta= with heads.", "Use heads=1, or drop beta=.")
    if spec.conjugate.has_directions and from_state and direction.layer_norm and spec.heads > 1:
        reason = "the kernel does not support LayerNorm on key and value over several heads."
        return Backend(REFERENCE, reason, "Use heads=1, or layer_norm=False.")
    if recurrence.form.whole_state and not spec.conjugate.has_rotation:
        reason = "the kernel does not support FromWholeState with Taylor."
        return Backend(REFERENCE, reason, "Use conjugates.Exact(), or FromState().")
    if spec.start and recurrence.form.phased:
        reason = "the kernel does not support a phase with a learned start, which would mix its pairs."
        return Backend(REFERENCE, reason, "Use start=False, or phase=None.")
    needs_basis = isinstance(direction, FromState) and (direction.is_entrywise or direction.layer_norm)
    if spec.start and (spec.memory is not None or needs_basis):
        reason = "the kernel does not support a learned start with a slow memory, ReLU, spikes or LayerNorm."
        return Backend(REFERENCE, reason, "Use start=False, or FromState() without options and no memory.")
    return None


def _explain_varying(recurrence: Recurrence) -> Backend | None:
    if not recurrence.dt:
        return None
    return Backend(REFERENCE, "the kernel does not support dt=.", "Resample the inputs to equal steps, and drop dt=.")
