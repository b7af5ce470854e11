"""Per-head constants in the bound on ‖J - M‖: the radius of the spectrum, and how fast key and value can rotate.

J is the Jacobian of the step and M = Q Λ̄ Q' its conjugate (docs/reference/notation.md). Proofs are in
docs/explanation/bounds.md.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTCell, ADPTSpec
from ..errors import IncompatibleError
from ..recurrence.conjugates import Taylor
from ..recurrence.directions import Directions, FromInput, FromWholeState
from ..recurrence.projections import Projection
from ..recurrence.projections.base import Biased
from ..recurrence.projections.heads import Heads
from ..recurrence.spectra import BlockDiagonal

__all__ = [
    "HeadConstants",
    "bound_deviation",
    "bound_singular_value_shift",
    "compute_head_constants",
    "enclosing_radius",
    "joint_condition_number",
]

_LINES = 33  # number of supporting lines in `joint_condition_number`; more lines tighten it by less than 1 %


class HeadConstants(NamedTuple):
    """Constants of one head of a cell, computed from its eigenvalues, its β and its matrices K and V."""

    moduli: Tensor  # (n / heads,), float64: |λ̄|
    radius: float  # r: that of the smallest disc, centred on the real axis, that contains the eigenvalues
    beta: float
    # s: upper bound on ‖x‖ (‖dk/dx‖ + ‖dv/dx‖), summed over the rotation planes, each of which has its own K and V; the
    # joint condition number of K and V for one plane; infinite for singular K or V
    rotation_rate: float
    condition_numbers: tuple[float, ...]  # κ(K), κ(V) of each plane, with softness ε those of [K; εI] and [V; εI]


class _Plane(NamedTuple):
    """The part of `HeadConstants` of one plane."""

    rotation_rate: float
    condition_numbers: tuple[float, float]


def compute_head_constants(cell: ADPTCell) -> list[HeadConstants]:
    """Return the constants of each head.

    With `directions.FromInput` the rotation rate is 0, because key and value do not depend on the state.

    Args:
        cell: The cell.
    """
    blocks: BlockDiagonal = cell.spectrum()
    heads = cell.spec.heads
    blocks = _to_float64(blocks).split_heads(heads)
    betas = cell.beta.report()["used"]  # after clipping; one value, or one for each head
    betas = betas * heads if len(betas) == 1 else betas
    direction = cell.spec.direction
    planes: list[list[_Plane]] = []
    if isinstance(direction, FromWholeState) and (heads > 1 or direction.softness):
        planes = [_bound_whole_state(d, direction) for d in cell.directions]
    elif not isinstance(direction, FromInput):
        planes = [[_bound_plane(*pair) for pair in _split_projections(d, heads)] for d in cell.directions]
    constants = []
    for head in range(heads):
        condition_numbers = tuple(number for plane in planes for number in plane[head].condition_numbers)
        rates = [plane[head].rotation_rate for plane in planes]
        eigenvalues = BlockDiagonal(blocks.real[head], None if blocks.imag is None else blocks.imag[head])
        constants.append(
            HeadConstants(
                eigenvalues.modulus(), enclosing_radius(eigenvalues), betas[head], sum(rates), condition_numbers
            )
        )
    return constants


def bound_deviation(spec: ADPTSpec, head: HeadConstants) -> float:
    """Return the upper bound 2rβs on ‖J - M‖, where r is `head.radius` and s is `head.rotation_rate`.

    s is at most κ(K) + κ(V) for each plane. For `Taylor(2)` the bound is larger by the factor 1 + 2β.

    Args:
        spec: The spec of the cell.
        head: The constants of one head.
    """
    if head.beta == 0 or head.radius == 0 or head.rotation_rate == 0:
        return 0.0
    second_order = 1 + 2 * head.beta if spec.conjugate == Taylor(2) else 1.0
    return 2 * head.radius * head.beta * head.rotation_rate * second_order


def bound_singular_value_shift(spec: ADPTSpec, head: HeadConstants) -> float:
    """Return an upper bound on |σ_i(M) - |λ̄|_(i)|, where |λ̄|_(i) is the i-th largest modulus.

    It is 0 unless the conjugate is `Taylor`: the other forms of M have the singular values |λ̄|.

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
    # Bisection on the centre: the largest distance is a convex function of it. A centre that is not optimal gives a
    # larger radius, which is still valid.
    for _ in range(100):
        centre = (low + high) / 2
        furthest = int(((real - centre).square() + squares).argmax())
        low, high = (low, centre) if float(real[furthest]) < centre else (centre, high)
    return math.sqrt(float(((real - (low + high) / 2).square() + squares).max()))


def joint_condition_number(key: Tensor, value: Tensor) -> float:
    """Return an upper bound on ‖K‖‖x‖/‖Kx‖ + ‖V‖‖x‖/‖Vx‖ over all states x. Up to rounding, it is at most κ(K) + κ(V).

    The x that K shrinks most is rarely the x that V shrinks most. With a = (‖Kx‖/‖K‖)² and b = (‖Vx‖/‖V‖)² over unit x,
    the sum is a^(-1/2) + b^(-1/2), convex and decreasing in both. For all weights p, q >= 0 with p + q = 1,
    p a + q b >= h, where h is the smallest eigenvalue of p K'K/‖K‖² + q V'V/‖V‖². So (a, b) lies in a polygon above
    finitely many such lines, over which the sum is largest at a corner between neighbouring lines.

    Args:
        key: K, (n, n).
        value: V, (n, n).
    """
    key, value = (
        matrix.detach().double() / torch.linalg.matrix_norm(matrix.detach().double(), 2) for matrix in (key, value)
    )
    smallest = [float(_smallest_singular_value_bound(matrix)) for matrix in (key, value)]  # of matrices of norm 1
    if min(smallest) == 0:
        return math.inf
    sum_of_condition_numbers = 1 / smallest[0] + 1 / smallest[1]
    # The slopes q/p at which p a = q b range from smallest[0]², where K shrinks x most, to 1 / smallest[1]², where V
    # does; the range of slopes goes beyond both by a factor of 100.
    log_slope_range = math.log10(smallest[0] ** 2 / 100), math.log10(100 / smallest[1] ** 2)
    slopes = torch.logspace(*log_slope_range, _LINES, dtype=torch.float64, device=key.device).reshape(-1, 1, 1)
    weights = torch.cat((1 / (1 + slopes), slopes / (1 + slopes)), -1)
    combined = torch.cat((weights[..., :1].sqrt() * key, weights[..., 1:].sqrt() * value), -2)
    heights = _smallest_singular_value_bound(combined).square()
    lines = [
        (1.0, 0.0, smallest[0] ** 2),
        *((p, q, h) for (p, q), h in zip(weights.squeeze(1).tolist(), heights.tolist(), strict=True)),
        (0.0, 1.0, smallest[1] ** 2),
    ]
    largest = 2.0  # both terms are at least 1
    for (p, q, h), (next_p, next_q, next_h) in itertools.pairwise(lines):
        determinant = p * next_q - next_p * q
        a = max((h * next_q - next_h * q) / determinant, smallest[0] ** 2)
        b = max((next_h * p - h * next_p) / determinant, smallest[1] ** 2)
        largest = max(largest, a**-0.5 + b**-0.5)
    return min(largest, sum_of_condition_numbers)


def _smallest_singular_value_bound(matrices: Tensor) -> Tensor:
    """Return a lower bound on the smallest singular value of matrices of norm at most 1.

    It is the computed value minus its rounding error, clamped at 0.
    """
    rounding = 4 * matrices.shape[-1] * torch.finfo(torch.float64).eps
    smallest: Tensor = torch.linalg.svdvals(matrices)[..., -1]
    return (smallest - rounding).clamp(min=0)


def _to_float64(blocks: BlockDiagonal) -> BlockDiagonal:
    imag = None if blocks.imag is None else blocks.imag.detach().double()
    return BlockDiagonal(blocks.real.detach().double(), imag)


def _bound_plane(key: Projection, value: Projection) -> _Plane:
    """Return the constants of one plane; the bound on ‖x‖ (‖dk/dx‖ + ‖dv/dx‖) is the joint condition number."""
    numbers = float(key.condition_number()), float(value.condition_number())
    if math.isinf(max(numbers)):
        return _Plane(math.inf, numbers)
    return _Plane(joint_condition_number(key.dense(), value.dense()), numbers)


def _bound_whole_state(directions: object, direction: FromWholeState) -> list[_Plane]:
    """Return the constants of the plane of each head, whose directions are the first parts of unit([K_h; εI] x)."""
    heads, softness = direction.heads, direction.softness
    if not softness:
        return [_Plane(math.inf, (math.inf, math.inf))] * heads
    ((key, value),) = _split_projections(directions, 1)
    matrices = [part.dense().detach().double() for part in (key, value)]
    below = softness * torch.eye(matrices[0].shape[-1], dtype=torch.float64, device=matrices[0].device)
    planes = []
    for pair in zip(*(matrix.chunk(heads) for matrix in matrices), strict=True):
        stacked = [torch.cat((rows, below)) for rows in pair]
        singular = [torch.linalg.svdvals(matrix) for matrix in stacked]
        numbers = float(singular[0][0] / singular[0][-1]), float(singular[1][0] / singular[1][-1])
        planes.append(_Plane(joint_condition_number(*stacked), numbers))
    return planes


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
