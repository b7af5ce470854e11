"""Translation of the parameters of a cell to the arguments of the fused kernels."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.adpt_scan import DENSE, Constants, Factors, Form, RetractionKind, Source
from ..recurrence.beta import Beta, is_zero
from ..recurrence.conjugates import ConjugateSpec, Taylor
from ..recurrence.directions import LAYER_NORM_EPS, Directions, FromInput, FromState
from ..recurrence.projections import Projection
from ..recurrence.projections.base import Biased
from ..recurrence.projections.factored import KroneckerProjection, LowParamProjection, LowRankProjection
from ..recurrence.projections.heads import Heads
from ..recurrence.retractions import Cayley, Retraction
from ..recurrence.spectra import BlockDiagonal
from .spec import ADPTSpec

__all__ = [
    "add_memory",
    "change_basis",
    "make_constants",
    "make_factors",
    "make_form",
]

# K and V are applied by their factors only if that divides the number of multiplications by at least this. Products
# with factors are short and run at about half the speed of a product with a matrix.
MIN_SAVING = 3


def make_form(spec: ADPTSpec, *, beta_in_drive: bool = False) -> Form:
    """Return the form of the recurrence as the kernel takes it.

    Args:
        spec: The spec of the cell.
        beta_in_drive: Whether β is part of the drive.
    """
    direction = spec.direction
    source, spike, dot, norm = Source.STATE, 0.0, None, None
    if isinstance(direction, FromState):
        source = Source.RELU if direction.relu else Source.STATE
        if direction.spike is not None:
            source, spike = Source.SPIKES, direction.spike
        if spec.conjugate.has_directions:
            dot, norm = direction.dot, LAYER_NORM_EPS if direction.layer_norm else None
    return Form(
        heads=spec.heads,
        rotates=spec.conjugate.has_directions,
        directions_in_drive=spec.conjugate.has_directions and isinstance(direction, FromInput),
        beta_in_drive=beta_in_drive,
        source=int(source),
        spike_threshold=spike,
        retraction=int(_retraction_code(spec.conjugate, spec.retraction)),
        dot=dot,
        rotation_aware=spec.rotation_aware,
        norm_epsilon=norm,
        linear=spec.conjugate.has_directions and not beta_in_drive and is_zero(spec.beta),
    )


def _retraction_code(conjugate: ConjugateSpec, retraction: Retraction) -> RetractionKind:
    if isinstance(conjugate, Taylor):
        return RetractionKind.TAYLOR_ONE if conjugate.order == 1 else RetractionKind.TAYLOR_TWO
    return RetractionKind.CAYLEY if isinstance(retraction, Cayley) else RetractionKind.EXPONENTIAL


def make_constants(blocks: BlockDiagonal, directions: nn.ModuleList, beta: Beta | None, form: Form) -> Constants:
    """Return Λ̄, K, V and β as the kernel takes them. Factored projections become dense matrices, once per call.

    Args:
        blocks: Λ̄.
        directions: The directions of each plane, of which the kernel supports one.
        beta: β; None if it is part of the drive.
        form: The form of the recurrence.
    """
    real = blocks.real
    weight = bias = strengths = norm_weight = norm_bias = None
    if form.rotates and not form.directions_in_drive:
        module = directions[0]
        assert isinstance(module, Directions)
        both = [_stack_matrices(p, real.dtype) for p in (module.key_projection, module.value_projection)]
        weight = torch.stack([matrices for matrices, _ in both], 1)
        biases = [vectors for _, vectors in both if vectors is not None]
        bias = torch.stack(biases, 1) if biases else None
        if module.key_norm is not None and module.value_norm is not None:
            norms = (module.key_norm, module.value_norm)
            norm_weight, norm_bias = (
                torch.stack([getattr(n, name) for n in norms]).to(real.dtype) for name in ("weight", "bias")
            )
    if form.rotates and beta is not None:
        value = beta(real)
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=real.dtype, device=real.device)
        strengths = value.reshape(-1).expand(form.heads)
    constants = Constants(real, blocks.imag, weight, bias, strengths)
    return constants._replace(norm_weight=norm_weight, norm_bias=norm_bias)


def _stack_matrices(projection: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the matrices of all heads, (heads, m, m), and their biases, (heads, m), or None."""
    projection.refresh()
    parts = _split_heads(projection)
    biases = [part.bias.to(dtype) for part in parts if isinstance(part, Biased)]
    return torch.stack([part.dense().to(dtype) for part in parts]), torch.stack(biases) if biases else None


def _split_heads(projection: Projection) -> list[Projection]:
    """Return the projection of each head."""
    each = projection.projections if isinstance(projection, Heads) else [projection]
    return [part for part in each if isinstance(part, Projection)]


def make_factors(directions: nn.ModuleList, form: Form, dtype: torch.dtype) -> Factors:
    """Return the factors of K and V if products with them cost much less, detached from autograd; `DENSE` otherwise.

    Args:
        directions: The directions of each plane, of which the kernel supports one.
        form: The form of the recurrence.
        dtype: The dtype of the drive.
    """
    module = directions[0] if form.rotates and not form.directions_in_drive else None
    if not isinstance(module, Directions):
        return DENSE
    halves = [_split_heads(p) for p in (module.key_projection, module.value_projection)]
    if any(MIN_SAVING * part.macs > part.in_features * part.out_features for half in halves for part in half):
        return DENSE
    factors = [[_factors(part) for part in half] for half in halves]
    if any(found is DENSE for half in factors for found in half):
        return DENSE

    def stack(name: str) -> Tensor | None:
        if getattr(factors[0][0], name) is None:
            return None
        return torch.stack([torch.stack([getattr(f, name) for f in half]) for half in factors], 1).detach().to(dtype)

    return Factors(*(stack(name) for name in Factors._fields))


def _factors(projection: Projection) -> Factors:
    """Return the factors of a projection; `DENSE` if it is not factored."""
    if isinstance(projection, Biased):
        return _factors(projection.projection)
    if isinstance(projection, LowParamProjection) and _has_methods_of(projection, LowParamProjection):
        low_rank, kronecker = _factors(projection.low_rank), _factors(projection.kronecker)
        return DENSE if low_rank is DENSE or kronecker is DENSE else Factors(*low_rank[:2], *kronecker[2:])
    if isinstance(projection, LowRankProjection) and _has_methods_of(projection, LowRankProjection):
        return Factors(left=projection.left, right=projection.right)
    if isinstance(projection, KroneckerProjection) and _has_methods_of(projection, KroneckerProjection):
        return Factors(outer=projection.outer, inner=projection.inner)
    return DENSE


def _has_methods_of(projection: Projection, kind: type[Projection]) -> bool:
    """Return whether a projection is the map of `kind`. Its type may differ: a parametrized module has its own."""
    return type(projection).dense is kind.dense and type(projection).bind is kind.bind


def add_memory(constants: Constants, gain: BlockDiagonal, feedback: Tensor, decay: Tensor, charge: Tensor) -> Constants:
    """Return `constants` with a slow memory added; `gain` and `feedback` are combined into one operator.

    Args:
        constants: The parameters of the fast state.
        gain: γ.
        feedback: (n,).
        decay: Γ, (n,).
        charge: 1 - Γ, (n,).
    """
    feed_imag = None
    if gain.imag is not None:
        feed_imag = gain.imag * feedback.unflatten(-1, (-1, 2)).flip(-1).flatten()
    elif constants.imag is not None:
        feed_imag = torch.zeros_like(constants.imag)
    return constants._replace(feed_real=gain.real * feedback, feed_imag=feed_imag, decay=decay, charge=charge)


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
    end = size * (3 if form.directions_in_drive else 1)
    vectors = (drive[..., :end].unflatten(-1, (-1, size)) @ start).flatten(-2)
    drive = torch.cat((vectors, drive[..., end:]), -1)
    return RotatedProblem(constants._replace(weight=weight, bias=bias), drive, state @ start)
