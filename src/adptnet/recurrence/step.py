"""The ADPT recurrence x_t = M x_{t-1} + drive_t: a step, its operator M and its Jacobian.

With an input-driven phase P, the operator and the Jacobian are those of x_t = P M x_{t-1} + drive_t.

Pure functions of `Parameters`, the parameters of a cell evaluated for one call. Every other program of the recurrence,
such as a kernel, is compared with `step`; `analysis.definition` defines the same step with dense matrices.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.linear_scan import linear_scan
from .conjugates import (
    Conjugate,
    ConjugateSpec,
    Eigen,
    Exact,
    MultiHeadConjugate,
    PhasedConjugate,
    Product,
    RotatedBlocks,
    Taylor,
)
from .directions import DirectionMatrices, Directions, FromInput, FromState, KeyValue
from .drive import unpack_phase
from .jacobian import ProjectedDirection, StepJacobian, rotation_coefficients, step_jacobian, taylor_coefficients
from .retractions import Retraction
from .spectra import BlockDiagonal

__all__ = [
    "DirectionFunction",
    "DriveParts",
    "Memory",
    "Parameters",
    "bound_radius",
    "conjugate",
    "evaluate_eigenvalues",
    "evaluate_plane",
    "jacobian",
    "split_drive",
    "step",
]


DirectionFunction = Callable[[Tensor], KeyValue] | DirectionMatrices  # from the state to key and value


class Memory(NamedTuple):
    """The evaluated parameters of a slow memory: fast += gain (feedback ⊙ slow), slow ← decay slow + charge ⊙ fast."""

    gain: BlockDiagonal
    feedback: Tensor | None  # None for 1
    decay: BlockDiagonal
    charge: Tensor


class Parameters(NamedTuple):
    """The form and the evaluated parameters of an ADPT recurrence, which are the same at every step of a sequence."""

    size: int  # state dimension n, without a slow memory
    heads: int
    conjugate: ConjugateSpec
    retraction: Retraction
    rotation_aware: bool  # whether the drive is rotated with the state
    blocks: BlockDiagonal | None  # Λ̄; None if it depends on the `dt` in the drive
    beta: float | Tensor | None  # None if it is part of the drive
    directions: Sequence[DirectionFunction] | None  # of each plane; None if they are part of the drive
    modules: Sequence[nn.Module] = ()  # the modules that the directions were evaluated from
    spectrum: Callable[[Tensor | None], BlockDiagonal] | None = None  # Λ̄ as a function of `dt`
    start: Tensor | None = None  # Q₀
    memory: Memory | None = None  # the state is then (x, w)
    phased: bool = False  # whether the drive holds an input-driven phase P


class DriveParts(NamedTuple):
    """The parts that are concatenated in the drive, see `ADPTCell.prepare_with_arguments`."""

    drive: Tensor  # (*b, n)
    planes: list[KeyValue] | None  # None if the directions come from the state
    phase: BlockDiagonal | None  # P, (*b, n); None without an input-driven phase
    dt: Tensor | None  # (*b, 1)
    beta: Tensor | None  # (*b, 1)


def step(
    parameters: Parameters,
    state: Tensor,
    drive: Tensor,
    carry: Callable[[Tensor], Tensor] | None = None,
    follow: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the next state: M x + drive, and the slow memory if there is one.

    The two functions replace x in one place each, as a spiking cell does.

    Args:
        parameters: The evaluated parameters.
        state: (*b, n); x and w, (*b, 2n), with a slow memory.
        drive: (*b, features).
        carry: M is applied to `carry(x)`; to x if None.
        follow: The slow memory follows `follow(x)`; x if None.
    """
    parts, memory = split_drive(parameters, drive), parameters.memory
    fast, driven = state, parts.drive
    if memory is not None:
        fast, slow = state.split(parameters.size, -1)
        driven = driven + memory.gain.mv(slow if memory.feedback is None else memory.feedback * slow)
    operator = _make_operator(parameters, fast, parts)
    driven = operator.rotate(driven) if parameters.rotation_aware else driven
    following = operator.mv(fast if carry is None else carry(fast)) + driven
    if memory is None:
        return following
    followed = following if follow is None else follow(following)
    return torch.cat((following, memory.decay.mv(slow) + memory.charge * followed), -1)


def conjugate(parameters: Parameters, state: Tensor, drive: Tensor) -> Conjugate:
    """Return the operator M at a state.

    Args:
        parameters: The evaluated parameters.
        state: (*b, n); x and w, (*b, 2n), with a slow memory.
        drive: (*b, features).
    """
    x = state if parameters.memory is None else state[..., : parameters.size]
    return _make_operator(parameters, x, split_drive(parameters, drive))


def _make_operator(parameters: Parameters, x: Tensor, parts: DriveParts) -> Conjugate:
    eigen, planes, beta = evaluate_plane(parameters, x, parts)
    operator = parameters.conjugate.operator(eigen, planes, beta, parameters.retraction)
    operator = operator if parameters.heads == 1 else MultiHeadConjugate(operator, parameters.heads)
    return operator if parts.phase is None else PhasedConjugate(operator, parts.phase)


def evaluate_plane(
    parameters: Parameters, x: Tensor, parts: DriveParts
) -> tuple[Eigen, Sequence[KeyValue], float | Tensor]:
    """Return eigenvalues, key-value pairs and β at a state. If there are several heads, they are dimension -2.

    Args:
        parameters: The evaluated parameters.
        x: (*b, n).
        parts: The parts of the drive at this step.
    """
    eigen: Eigen = evaluate_eigenvalues(parameters, parts)
    beta = parts.beta if parameters.beta is None else parameters.beta
    assert beta is not None
    if parameters.heads > 1:
        assert isinstance(eigen, BlockDiagonal)
        eigen = eigen.split_heads(parameters.heads)
        beta = beta.unsqueeze(-2) if parts.beta is not None and isinstance(beta, Tensor) else beta
    if parameters.start is not None:
        assert isinstance(eigen, BlockDiagonal)
        eigen = RotatedBlocks(eigen, parameters.start)
    if parameters.directions is not None:
        return eigen, [directions(x) for directions in parameters.directions], beta
    assert parts.planes is not None
    return eigen, parts.planes, beta


def evaluate_eigenvalues(parameters: Parameters, parts: DriveParts) -> BlockDiagonal:
    """Return Λ̄ at a step.

    Args:
        parameters: The evaluated parameters.
        parts: The parts of the drive at this step.
    """
    if parameters.blocks is not None:
        return parameters.blocks
    assert parameters.spectrum is not None
    return parameters.spectrum(parts.dt)


def jacobian(parameters: Parameters, state: Tensor, drive: Tensor) -> StepJacobian | Conjugate | None:
    """Return the Jacobian in closed form, or M if that is the Jacobian; None if there is no closed form.

    Args:
        parameters: The evaluated parameters.
        state: (*b, n).
        drive: (*b, features).
    """
    if parameters.memory is not None:
        return None
    parts, form = split_drive(parameters, drive), parameters.conjugate
    # directions of the input that are not part of the drive belong to a β of 0, where M = Λ̄
    from_input = any(isinstance(m, Directions) and isinstance(m.spec, FromInput) for m in parameters.modules)
    if parameters.directions is None or from_input or not form.has_directions:
        return _make_operator(parameters, state, parts)  # M does not depend on the state
    if type(form) not in (Exact, Product, Taylor) or form.planes > 1:
        return None  # a subclass may define another step
    if parameters.blocks is None or parameters.start is not None or len(parameters.modules) != 1:
        return None
    module, blocks = parameters.modules[0], parameters.blocks
    if not isinstance(module, Directions) or not module.is_stock():
        return None  # hooks and other modules are differentiated by autograd
    direction = module.spec
    if type(direction) is not FromState or direction.heads > 1 or direction.dot is not None or direction.layer_norm:
        return None
    beta = parts.beta if parameters.beta is None else parameters.beta
    assert beta is not None
    if isinstance(form, Taylor):
        coefficients = taylor_coefficients(blocks, beta, form.order)
    else:
        rotated = parts.drive if parameters.rotation_aware else None
        coefficients = rotation_coefficients(blocks, beta, parameters.retraction, rotated)
    dtype = blocks.real.dtype
    pair = (module.key_projection, module.value_projection)
    directions = [ProjectedDirection(projection.dense().to(dtype), projection.bind(dtype)) for projection in pair]
    closed = step_jacobian(state, blocks, direction.source, directions, coefficients)
    return closed._replace(phase=parts.phase)


def bound_radius(
    parameters: Parameters, state: Tensor, drive: Tensor, reset_state: Tensor, reset: Tensor | None
) -> Tensor | None:
    """Return the bound ‖x_t‖ <= |λ̄|_max ‖x_{t-1}‖ + ‖drive_t‖ for each step, which holds for any β, K and V.

    Args:
        parameters: The evaluated parameters.
        state: The state before the first step, (batch, n).
        drive: (batch, time, features).
        reset_state: The state that enters at a reset, (batch, n).
        reset: (batch, time) bool, or None.

    Returns:
        (batch, time); None for `Taylor`, whose M may have a larger norm than |λ̄|_max, and with a slow memory.
    """
    if isinstance(parameters.conjugate, Taylor) or parameters.memory is not None:
        return None
    parts = split_drive(parameters, drive)
    largest = evaluate_eigenvalues(parameters, parts).modulus().amax(-1, keepdim=True)
    added = torch.linalg.vector_norm(parts.drive, dim=-1, keepdim=True)
    if reset is not None:
        restarted = largest * torch.linalg.vector_norm(reset_state, dim=-1)[:, None, None]
        added = torch.where(reset.unsqueeze(-1), added + restarted, added)
    entering = torch.linalg.vector_norm(state, dim=-1, keepdim=True)
    return linear_scan(largest, added, entering, reset=reset).squeeze(-1)


def split_drive(parameters: Parameters, drive: Tensor) -> DriveParts:
    """Split the drive into the drive itself and the arguments that follow it.

    Args:
        parameters: The evaluated parameters.
        drive: (*b, features).
    """
    in_drive, by_dt, by_beta = parameters.directions is None, parameters.blocks is None, parameters.beta is None
    if not (in_drive or by_dt or by_beta or parameters.phased):
        return DriveParts(drive, None, None, None, None)
    size, heads = parameters.size, parameters.heads
    count = 2 * parameters.conjugate.planes if in_drive else 0
    vector_count = count + parameters.phased
    driven, *rest = drive.split([size, *[size] * vector_count, *[1] * by_dt, *[1] * by_beta], -1)
    vectors = [v if heads == 1 else v.unflatten(-1, (heads, -1)) for v in rest[:count]]
    planes = [KeyValue(*vectors[i : i + 2]) for i in range(0, count, 2)]
    return DriveParts(
        driven,
        planes if in_drive else None,
        unpack_phase(rest[count]) if parameters.phased else None,
        rest[vector_count] if by_dt else None,
        rest[-1] if by_beta else None,
    )
