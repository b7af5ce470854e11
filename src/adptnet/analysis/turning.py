"""What enters every bound: how wide the spectrum is, and how fast key and value can turn with the state.

Proofs are in docs/explanation/bounds.md.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..cells import ADPTCell
from ..errors import IncompatibleError
from ..recurrence.directions import Directions, FromInput
from ..recurrence.projections import Projection
from ..recurrence.projections.base import Biased
from ..recurrence.projections.heads import Heads
from ..recurrence.spectra import BlockDiagonal

__all__ = ["Turning", "enclosing_radius", "joint_condition", "turnings"]

_SLOPES = 33  # supporting lines in `joint_condition`: more tighten it by less than a percent


class Turning(NamedTuple):
    """One head of a cell: its eigenvalues, its β, and the conditions of its K and V."""

    moduli: Tensor  # (n / heads,), float64: |λ̄|
    radius: float  # of the smallest disc, centred on the real axis, that holds the eigenvalues
    beta: float
    rate: float  # ‖x‖ (‖dk‖ + ‖dv‖) is at most this, summed over the planes; infinite for singular K or V
    conditions: tuple[float, ...]  # κ(K), κ(V) of each plane


def turnings(cell: ADPTCell) -> list[Turning]:
    """The heads of `cell`. Directions from the input have rate 0: they do not turn with the state."""
    blocks: BlockDiagonal = cell.spectrum()
    heads = cell.spec.heads
    blocks = _double(blocks).heads(heads)
    betas = cell.beta.report()["used"]
    betas = betas * heads if len(betas) == 1 else betas
    planes = [] if isinstance(cell.spec.direction, FromInput) else [_matrices(d, heads) for d in cell.directions]
    found = []
    for head in range(heads):
        conditions = tuple(float(part.condition_number()) for plane in planes for part in plane[head])
        rates = [_rate(*plane[head]) for plane in planes]
        own = BlockDiagonal(blocks.real[head], None if blocks.imag is None else blocks.imag[head])
        found.append(Turning(own.modulus(), enclosing_radius(own), betas[head], sum(rates), conditions))
    return found


def enclosing_radius(eigenvalues: BlockDiagonal) -> float:
    """Of the smallest disc, centred on the real axis, that holds the eigenvalues: half the spread if they are real."""
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
    """At least the largest ‖K‖‖x‖/‖Kx‖ + ‖V‖‖x‖/‖Vx‖ of any state x, and at most κ(K) + κ(V), rounding aside.

    The worst state of K is rarely the worst of V. With a = (‖Kx‖/‖K‖)² and b = (‖Vx‖/‖V‖)² over unit x, the sum is
    a^(-1/2) + b^(-1/2), convex and decreasing in both; (a, b) lies above every line p a + q b = h, h the smallest
    eigenvalue of the same mixture of matrices. So the largest value is at a corner between two such lines.
    """
    key, value = (
        matrix.detach().double() / torch.linalg.matrix_norm(matrix.detach().double(), 2) for matrix in (key, value)
    )
    smallest = [float(_at_least(matrix)) for matrix in (key, value)]
    if min(smallest) == 0:
        return math.inf
    separate = 1 / smallest[0] + 1 / smallest[1]
    ends = math.log10(smallest[0] ** 2 / 100), math.log10(100 / smallest[1] ** 2)
    slopes = torch.logspace(*ends, _SLOPES, dtype=torch.float64, device=key.device).reshape(-1, 1, 1)
    weights = torch.cat((1 / (1 + slopes), slopes / (1 + slopes)), -1)
    heights = _at_least(torch.cat((weights[..., :1].sqrt() * key, weights[..., 1:].sqrt() * value), -2)).square()
    lines = [
        (1.0, 0.0, smallest[0] ** 2),
        *((p, q, h) for (p, q), h in zip(weights.squeeze(1).tolist(), heights.tolist(), strict=True)),
        (0.0, 1.0, smallest[1] ** 2),
    ]
    worst = 2.0
    for (p, q, h), (next_p, next_q, next_h) in itertools.pairwise(lines):
        turn = p * next_q - next_p * q
        a = max((h * next_q - next_h * q) / turn, smallest[0] ** 2)
        b = max((next_h * p - h * next_p) / turn, smallest[1] ** 2)
        worst = max(worst, a**-0.5 + b**-0.5)
    return min(worst, separate)


def _at_least(matrices: Tensor) -> Tensor:
    """The smallest singular value of matrices of norm at most 1, lowered by its rounding: 0 if nothing is left."""
    rounding = 4 * matrices.shape[-1] * torch.finfo(torch.float64).eps
    smallest: Tensor = torch.linalg.svdvals(matrices)[..., -1]
    return (smallest - rounding).clamp(min=0)


def _double(blocks: BlockDiagonal) -> BlockDiagonal:
    imag = None if blocks.imag is None else blocks.imag.detach().double()
    return BlockDiagonal(blocks.real.detach().double(), imag)


def _rate(key: Projection, value: Projection) -> float:
    if math.isinf(float(key.condition_number())) or math.isinf(float(value.condition_number())):
        return math.inf
    return joint_condition(key.dense(), value.dense())


def _matrices(directions: object, heads: int) -> list[tuple[Projection, Projection]]:
    """K and V of each head, without their biases."""
    if not isinstance(directions, Directions) or not directions.is_stock():
        raise IncompatibleError(
            "the bounds are of linear maps K and V; here one has hooks or is a module of another kind. Remove the "
            "hooks or merge the adapter, or use certificate(layer, inputs).deviation, which measures."
        )
    keys, values = (
        list(part.projections) if isinstance(part, Heads) else [part]
        for part in (directions.key_projection, directions.value_projection)
    )
    return [(_plain(key), _plain(value)) for key, value in zip(keys, values, strict=True)]


def _plain(projection: object) -> Projection:
    inner = projection.projection if isinstance(projection, Biased) else projection
    assert isinstance(inner, Projection)
    return inner
