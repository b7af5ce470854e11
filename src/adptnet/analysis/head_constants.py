"""Constants of the bounds, for each head: the width of the spectrum, and how fast key and value rotate with the state.

Proofs are in docs/explanation/bounds.md.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTCell, ADPTSpec
from ..errors import IncompatibleError
from ..recurrence.conjugates import Taylor
from ..recurrence.directions import Directions, FromInput
from ..recurrence.projections import Projection
from ..recurrence.projections.base import Biased
from ..recurrence.projections.heads import Heads
from ..recurrence.spectra import BlockDiagonal

__all__ = [
    "HeadConstants",
    "bound_deviation",
    "bound_displacement",
    "compute_head_constants",
    "enclosing_radius",
    "joint_condition",
]

_SLOPES = 33  # supporting lines in `joint_condition`: more tighten it by less than a percent


class HeadConstants(NamedTuple):
    """Constants of one head of a cell: of its eigenvalues, β, and of its matrices K and V."""

    moduli: Tensor  # (n / heads,), float64: |λ̄|
    radius: float  # of the smallest disc, centred on the real axis, that contains the eigenvalues
    beta: float
    rate: float  # upper bound of ‖x‖ (‖dk/dx‖ + ‖dv/dx‖), summed over the planes; infinite for singular K or V
    conditions: tuple[float, ...]  # κ(K), κ(V) of each plane


def compute_head_constants(cell: ADPTCell) -> list[HeadConstants]:
    """Return the constants of each head. Directions from the input have rate 0: they do not depend on the state.

    Args:
        cell: The cell.
    """
    blocks: BlockDiagonal = cell.spectrum()
    heads = cell.spec.heads
    blocks = _to_float64(blocks).split_heads(heads)
    betas = cell.beta.report()["used"]
    betas = betas * heads if len(betas) == 1 else betas
    planes = (
        [] if isinstance(cell.spec.direction, FromInput) else [_split_projections(d, heads) for d in cell.directions]
    )
    constants = []
    for head in range(heads):
        conditions = tuple(float(part.condition_number()) for plane in planes for part in plane[head])
        rates = [_rotation_rate(*plane[head]) for plane in planes]
        own = BlockDiagonal(blocks.real[head], None if blocks.imag is None else blocks.imag[head])
        constants.append(HeadConstants(own.modulus(), enclosing_radius(own), betas[head], sum(rates), conditions))
    return constants


def bound_deviation(spec: ADPTSpec, head: HeadConstants) -> float:
    """Return the upper bound 2rβs of ‖J - M‖, where s is `head.rate`, at most κ(K) + κ(V) per plane.

    For `Taylor(2)` it is larger by the factor 1 + 2β.

    Args:
        spec: The spec of the cell.
        head: The constants of one head.
    """
    if head.beta == 0 or head.radius == 0 or head.rate == 0:
        return 0.0
    second_order = 1 + 2 * head.beta if spec.conjugate == Taylor(2) else 1.0
    return 2 * head.radius * head.beta * head.rate * second_order


def bound_displacement(spec: ADPTSpec, head: HeadConstants) -> float:
    """Return the bound of |σ_i(M) - |λ̄|_(i)|, which is nonzero only for a Taylor form.

    Args:
        spec: The spec of the cell.
        head: The constants of one head.
    """
    if not isinstance(spec.conjugate, Taylor):
        return 0.0
    return 2 * head.radius * head.beta * (1 + head.beta if spec.conjugate.order == 2 else 1.0)


def enclosing_radius(eigenvalues: BlockDiagonal) -> float:
    """Return the radius of the smallest disc, centred on the real axis, that contains the eigenvalues.

    For real eigenvalues it is half of λ̄_max - λ̄_min.

    Args:
        eigenvalues: Λ̄.
    """
    real = eigenvalues.real.detach().double()
    low, high = float(real.min()), float(real.max())
    if eigenvalues.imag is None:
        return (high - low) / 2
    squares = eigenvalues.imag.detach().double().square()
    for _ in range(100):  # the largest distance is convex in the centre; any centre gives a valid radius
        centre = (low + high) / 2
        furthest = int(((real - centre).square() + squares).argmax())
        low, high = (low, centre) if float(real[furthest]) < centre else (centre, high)
    return math.sqrt(float(((real - (low + high) / 2).square() + squares).max()))


def joint_condition(key: Tensor, value: Tensor) -> float:
    """Return an upper bound of ‖K‖‖x‖/‖Kx‖ + ‖V‖‖x‖/‖Vx‖ over all states x. Up to rounding, it is at most κ(K) + κ(V).

    The worst state of K is rarely the worst state of V. With a = (‖Kx‖/‖K‖)² and b = (‖Vx‖/‖V‖)² over unit x, the sum
    is a^(-1/2) + b^(-1/2), convex and decreasing in both. (a, b) lies above every line p a + q b = h, where h is the
    smallest eigenvalue of p K'K/‖K‖² + q V'V/‖V‖². So the maximum is at a corner between two such lines.

    Args:
        key: K, (n, n).
        value: V, (n, n).
    """
    key, value = (
        matrix.detach().double() / torch.linalg.matrix_norm(matrix.detach().double(), 2) for matrix in (key, value)
    )
    smallest = [float(_bound_smallest_singular_value(matrix)) for matrix in (key, value)]
    if min(smallest) == 0:
        return math.inf
    separate = 1 / smallest[0] + 1 / smallest[1]
    ends = math.log10(smallest[0] ** 2 / 100), math.log10(100 / smallest[1] ** 2)
    slopes = torch.logspace(*ends, _SLOPES, dtype=torch.float64, device=key.device).reshape(-1, 1, 1)
    weights = torch.cat((1 / (1 + slopes), slopes / (1 + slopes)), -1)
    combined = torch.cat((weights[..., :1].sqrt() * key, weights[..., 1:].sqrt() * value), -2)
    heights = _bound_smallest_singular_value(combined).square()
    lines = [
        (1.0, 0.0, smallest[0] ** 2),
        *((p, q, h) for (p, q), h in zip(weights.squeeze(1).tolist(), heights.tolist(), strict=True)),
        (0.0, 1.0, smallest[1] ** 2),
    ]
    worst = 2.0
    for (p, q, h), (next_p, next_q, next_h) in itertools.pairwise(lines):
        determinant = p * next_q - next_p * q
        a = max((h * next_q - next_h * q) / determinant, smallest[0] ** 2)
        b = max((next_h * p - h * next_p) / determinant, smallest[1] ** 2)
        worst = max(worst, a**-0.5 + b**-0.5)
    return min(worst, separate)


def _bound_smallest_singular_value(matrices: Tensor) -> Tensor:
    """Return the smallest singular value of matrices of norm at most 1, less its rounding error, and at least 0."""
    rounding = 4 * matrices.shape[-1] * torch.finfo(torch.float64).eps
    smallest: Tensor = torch.linalg.svdvals(matrices)[..., -1]
    return (smallest - rounding).clamp(min=0)


def _to_float64(blocks: BlockDiagonal) -> BlockDiagonal:
    imag = None if blocks.imag is None else blocks.imag.detach().double()
    return BlockDiagonal(blocks.real.detach().double(), imag)


def _rotation_rate(key: Projection, value: Projection) -> float:
    if math.isinf(float(key.condition_number())) or math.isinf(float(value.condition_number())):
        return math.inf
    return joint_condition(key.dense(), value.dense())


def _split_projections(directions: object, heads: int) -> list[tuple[Projection, Projection]]:
    """Return K and V of each head, without biases."""
    if not isinstance(directions, Directions) or not directions.is_stock():
        raise IncompatibleError(
            "the bounds hold for linear maps K and V; here K or V has hooks, or was replaced by another module. "
            "Remove the hooks, merge the adapter (LoRA), or use certificate(layer, inputs).deviation, the largest "
            "‖J - M‖ along a trajectory."
        )
    keys, values = (
        list(part.projections) if isinstance(part, Heads) else [part]
        for part in (directions.key_projection, directions.value_projection)
    )
    return [(_without_bias(key), _without_bias(value)) for key, value in zip(keys, values, strict=True)]


def _without_bias(projection: object) -> Projection:
    inner = projection.projection if isinstance(projection, Biased) else projection
    assert isinstance(inner, Projection)
    return inner
