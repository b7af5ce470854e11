"""The same filter parallel in time: the variances by one associative scan, then the means by another.

Of each stretch of time three numbers (or matrices) are needed: what it makes of the state that enters it (`reach`), the
variance it ends with (`variance`), and what it tells of the state that entered it (`information`). Two neighbouring
stretches combine into one. Of a stretch with a reset (`cut`) only the variance is ever needed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._linalg import solve
from ..linear_scan import linear_scan
from ..matrix_scan import matrix_scan

__all__ = ["diagonal_filter", "matrix_filter"]


class _Stretch(NamedTuple):
    reach: Tensor
    variance: Tensor
    information: Tensor
    cut: Tensor | None = None  # bool: whether there is a reset in it; None if there are none at all


def diagonal_filter(
    transition: Tensor,
    offset: Tensor,
    observed: Tensor,
    strength: Tensor,
    initial: Tensor,
    *,
    reset: Tensor | None = None,
) -> Tensor:
    """As `reference.diagonal_filter`."""
    if not offset.shape[-2]:
        return offset.clone()
    factors = torch.broadcast_to(transition, offset.shape)
    if reset is not None:
        factors = torch.where(reset.unsqueeze(-1), 0, factors)
    pull = strength.unsqueeze(-1)
    size = factors.abs()
    steps = _Stretch(
        size / (1 + pull),
        1 / (1 + pull) + torch.zeros_like(size),
        size.square() * pull / (1 + pull),
        None if reset is None else torch.broadcast_to(reset, offset.shape[:-1]).unsqueeze(-1),
    )
    variance = _prefixes(steps, _join_diagonal, -2).variance
    gain = pull * variance
    return linear_scan((1 - gain) * factors, (1 - gain) * offset + gain * observed, initial, reset=reset)


def _before(first: _Stretch, then: _Stretch) -> _Stretch:
    """`first` where it reaches the end of `then`, otherwise zeros: products with zero would keep a NaN."""
    if first.cut is None or then.cut is None:
        return first
    reach, variance, information = (torch.where(then.cut, 0, part) for part in first[:3])
    return _Stretch(reach, variance, information, first.cut | then.cut)


def _join_diagonal(first: _Stretch, then: _Stretch) -> _Stretch:
    first = _before(first, then)
    shared = 1 / (1 + first.variance * then.information)
    return _Stretch(
        then.reach * shared * first.reach,
        then.reach * shared * first.variance * then.reach + then.variance,
        first.reach * shared * then.information * first.reach + first.information,
        first.cut,
    )


def matrix_filter(
    transition: Tensor,
    offset: Tensor,
    observed: Tensor,
    strength: Tensor,
    initial: Tensor,
    *,
    reset: Tensor | None = None,
) -> Tensor:
    """As `reference.matrix_filter`."""
    if not offset.shape[-2]:
        return offset.clone()
    matrices = torch.broadcast_to(transition, (*offset.shape, offset.shape[-1]))
    if reset is not None:
        matrices = torch.where(reset[..., None, None], 0, matrices)
    eye = torch.eye(offset.shape[-1], dtype=offset.dtype, device=offset.device)
    pull = strength[..., None, None]
    steps = _Stretch(
        matrices / (1 + pull),
        eye / (1 + pull) + torch.zeros_like(matrices),
        matrices.mT @ matrices * pull / (1 + pull),
        None if reset is None else torch.broadcast_to(reset, offset.shape[:-1])[..., None, None],
    )
    gain = pull * _prefixes(steps, _join_matrices, -3).variance
    kept = eye - gain
    pulled = kept @ offset.unsqueeze(-1) + gain @ observed.unsqueeze(-1)
    return matrix_scan(kept @ matrices, pulled.squeeze(-1), initial, reset=reset)


def _join_matrices(first: _Stretch, then: _Stretch) -> _Stretch:
    eye = torch.eye(first.reach.shape[-1], dtype=first.reach.dtype, device=first.reach.device)
    first = _before(first, then)
    known = then.information  # symmetric, as variances are
    right = torch.cat((then.reach.mT, known @ first.reach), -1)
    across, pulled = solve(eye + known @ first.variance, right).chunk(2, -1)
    shared = across.mT
    return _Stretch(
        shared @ first.reach,
        _symmetric(shared @ first.variance @ then.reach.mT + then.variance),
        _symmetric(first.reach.mT @ pulled + first.information),
        first.cut,
    )


def _symmetric(matrices: Tensor) -> Tensor:
    """What rounding adds to the other part would grow along the scan where transitions do."""
    return (matrices + matrices.mT) / 2


def _prefixes(steps: _Stretch, join: Callable[[_Stretch, _Stretch], _Stretch], time: int) -> _Stretch:
    """Each stretch from the first step to step t, in two levels as in `linear_scan`. Time is dimension `time`."""
    count = steps.reach.shape[time]
    length = max(1, math.isqrt(count))
    chunks = -(-count // length)

    def chunked(values: Tensor) -> tuple[Tensor, ...]:
        missing = chunks * length - count
        last = values.narrow(time, count - 1, 1)
        filled = torch.cat((values, *[last] * missing), time) if missing else values
        parts: tuple[Tensor, ...] = filled.unflatten(time, (chunks, length)).unbind(time)
        return parts

    rows = [_Stretch(*parts) for parts in zip(*(chunked(part) for part in _given(steps)), strict=True)]
    local = [rows[0]]
    for row in rows[1:]:
        local.append(join(local[-1], row))
    ends = [_Stretch(*parts) for parts in zip(*(part.unbind(time) for part in _given(local[-1])), strict=True)]
    before = [ends[0]]
    for end in ends[1:-1]:
        before.append(join(before[-1], end))
    entering = _Stretch(*(torch.stack(parts, time) for parts in zip(*map(_given, before), strict=True)))
    joined = []
    for row in local:  # the first chunk stands as it is; to all others what came before is joined
        if chunks == 1:
            joined.append(row)
            continue
        rest = join(entering, _Stretch(*(part.narrow(time, 1, chunks - 1) for part in _given(row))))
        both = zip(_given(row), _given(rest), strict=True)
        joined.append(_Stretch(*(torch.cat((part.narrow(time, 0, 1), r), time) for part, r in both)))
    every = [torch.stack(parts, time) for parts in zip(*map(_given, joined), strict=True)]
    return _Stretch(*(part.flatten(time - 1, time).narrow(time, 0, count) for part in every))


def _given(stretch: _Stretch) -> list[Tensor]:
    return [part for part in stretch if part is not None]
