"""Translation between the evaluated parameters of a recurrence and the flat tensors that the kernels take.

`pack` and `unpack` rearrange the same numbers: a kernel computes `pack(parameters)`, and the reference scans the step
of `unpack(constants)`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...recurrence.conjugates import ConjugateSpec, Diagonal, Exact, Product, Taylor
from ...recurrence.directions import DirectionMatrices, Directions, apply_source
from ...recurrence.retractions import Cayley, Exponential, Retraction
from ...recurrence.spectra import BlockDiagonal
from ...recurrence.step import Memory, Parameters
from .form import DENSE, Constants, Factors, Form, RetractionKind, Source

__all__ = ["RotatedProblem", "change_basis", "pack", "stack_factors", "unpack"]

# K and V are applied by their factors only if that divides the number of multiplications by at least this. Products
# with factors are short and run at about half the speed of a product with a matrix.
MIN_SAVING = 3

_MODELS: dict[int, tuple[ConjugateSpec, Retraction]] = {
    RetractionKind.EXPONENTIAL: (Exact(), Exponential()),
    RetractionKind.CAYLEY: (Exact(), Cayley()),
    RetractionKind.TAYLOR_ONE: (Taylor(1), Exponential()),
    RetractionKind.TAYLOR_TWO: (Taylor(2), Exponential()),
}


def pack(parameters: Parameters, form: Form) -> Constants:
    """Return evaluated parameters as the kernels take them.

    Args:
        parameters: The parameters, with K and V as matrices.
        form: The form of the recurrence.
    """
    blocks, beta, memory = parameters.blocks, parameters.beta, parameters.memory
    assert blocks is not None
    real = blocks.real
    constants = Constants(real, blocks.imag)
    if form.rotates and parameters.directions is not None:
        planes = [plane for plane in parameters.directions if isinstance(plane, DirectionMatrices)]
        constants = constants._replace(
            weight=_join_planes([plane.weight for plane in planes], 1),
            bias=_join_planes([plane.bias for plane in planes], 1),
            norm_weight=_join_planes([plane.norm_weight for plane in planes], 0),
            norm_bias=_join_planes([plane.norm_bias for plane in planes], 0),
        )
    if form.rotates and beta is not None:
        beta = beta if isinstance(beta, Tensor) else torch.full((), beta, dtype=real.dtype, device=real.device)
        constants = constants._replace(beta=beta.reshape(-1).expand(form.heads))
    return constants if memory is None else _pack_memory(constants, memory)


def _join_planes(parts: Sequence[Tensor | None], axis: int) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return (present[0] if len(present) == 1 else torch.cat(present, axis)) if present else None


def _split_planes(whole: Tensor | None, planes: int, axis: int) -> Sequence[Tensor | None]:
    return [None] * planes if whole is None else whole.split(2, axis)


def _pack_memory(constants: Constants, memory: Memory) -> Constants:
    """Return the constants with a slow memory; its gain and feedback are combined into one operator."""
    gain, feedback, feed_imag = memory.gain, memory.feedback, None
    assert feedback is not None
    if gain.imag is not None:
        feed_imag = gain.imag * feedback.unflatten(-1, (-1, 2)).flip(-1).flatten()
    elif constants.imag is not None:
        feed_imag = torch.zeros_like(constants.imag)
    return constants._replace(
        feed_real=gain.real * feedback, feed_imag=feed_imag, decay=memory.decay.real, charge=memory.charge
    )


def unpack(constants: Constants, form: Form) -> Parameters:
    """Return the parameters of the recurrence that a kernel computes; the inverse of `pack`.

    Args:
        constants: The arguments of a kernel.
        form: The form of the recurrence.
    """
    conjugate, retraction = _MODELS[form.retraction] if form.rotates else (Diagonal(), Exponential())
    conjugate = Product(form.planes) if form.planes > 1 else conjugate
    memory = directions = None
    if not form.directions_in_drive:
        directions = _unpack_directions(constants, form) if form.rotates else []
    if constants.feed_real is not None and constants.decay is not None and constants.charge is not None:
        feed = BlockDiagonal(constants.feed_real, constants.feed_imag)
        memory = Memory(feed, None, BlockDiagonal(constants.decay), constants.charge)
    beta: float | Tensor | None = 0.0 if constants.beta is None else constants.beta
    if form.heads > 1 and isinstance(beta, Tensor):
        beta = beta.unsqueeze(-1)
    return Parameters(
        size=constants.real.shape[0],
        heads=form.heads,
        conjugate=conjugate,
        retraction=retraction,
        rotation_aware=form.rotation_aware,
        blocks=BlockDiagonal(constants.real, constants.imag),
        beta=None if form.beta_in_drive else beta,
        directions=directions,
        memory=memory,
        phased=form.phased,
    )


def _unpack_directions(constants: Constants, form: Form) -> list[DirectionMatrices]:
    """Return K and V of each plane."""
    parts = zip(
        _split_planes(constants.weight, form.planes, 1),
        _split_planes(constants.bias, form.planes, 1),
        _split_planes(constants.norm_weight, form.planes, 0),
        _split_planes(constants.norm_bias, form.planes, 0),
        strict=True,
    )
    return [_unpack_plane(*plane, form) for plane in parts]


def _unpack_plane(
    weight: Tensor | None, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, form: Form
) -> DirectionMatrices:
    assert weight is not None
    threshold = form.spike_threshold if form.source == Source.SPIKES else None
    source = functools.partial(apply_source, relu=form.source == Source.RELU, threshold=threshold)
    matrices = DirectionMatrices(source, weight, bias, dot=form.dot, softness=form.softness)
    if form.norm_epsilon is None:
        return matrices
    return matrices._replace(norm_weight=norm_weight, norm_bias=norm_bias, norm_epsilon=form.norm_epsilon)


def stack_factors(modules: nn.ModuleList, form: Form, dtype: torch.dtype) -> Factors:
    """Return the factors of K and V if products with them cost much less, detached from autograd; `DENSE` otherwise.

    Args:
        modules: The directions of each plane; those of several planes, or of the whole state, are applied as matrices.
        form: The form of the recurrence.
        dtype: The dtype of the drive.
    """
    module = (
        modules[0]
        if form.rotates and not form.directions_in_drive and form.planes == 1 and not form.whole_state
        else None
    )
    if not isinstance(module, Directions):
        return DENSE
    halves = [projection.split_heads() for projection in (module.key_projection, module.value_projection)]
    if any(MIN_SAVING * part.macs > part.in_features * part.out_features for half in halves for part in half):
        return DENSE
    factors = [[part.find_factors() for part in half] for half in halves]
    if not all(found for half in factors for found in half):
        return DENSE
    return Factors(
        **{
            name: torch.stack([torch.stack([found[name] for found in half]) for half in factors], 1).detach().to(dtype)
            for name in factors[0][0]
        }
    )


class RotatedProblem(NamedTuple):
    """A recurrence in the basis of a learned start Q₀, where Q₀ Λ̄ Q₀' becomes Λ̄. Its states are x Q₀ (row vectors)."""

    constants: Constants
    drive: Tensor
    state: Tensor


def change_basis(start: Tensor, constants: Constants, form: Form, drive: Tensor, state: Tensor) -> RotatedProblem:
    """Return a recurrence in the basis of a learned start.

    Args:
        start: Q₀, (n, n).
        constants: The parameters.
        form: The form of the recurrence.
        drive: (batch, time, features).
        state: (batch, n).
    """
    weight = None if constants.weight is None else start.mT @ constants.weight @ start
    bias = None if constants.bias is None else constants.bias @ start
    size = state.shape[-1]
    end = size * (1 + 2 * form.planes if form.directions_in_drive else 1)
    vectors = (drive[..., :end].unflatten(-1, (-1, size)) @ start).flatten(-2)
    drive = torch.cat((vectors, drive[..., end:]), -1)
    return RotatedProblem(constants._replace(weight=weight, bias=bias), drive, state @ start)
