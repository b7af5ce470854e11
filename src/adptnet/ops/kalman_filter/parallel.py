"""The Kalman filter in parallel over time: the variances by one associative scan, then the means by another.

A segment of time is summarised by three numbers (or matrices): the map of the state that enters it (`reach`, R in the
README), the variance at its end (`variance`, C), and its information about the state that entered it (`information`,
J). Two neighbouring segments combine into one. Of a segment with a reset (`cut`) only the variance is ever needed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._linalg import solve_linear
from ..linear_scan import linear_scan
from ..matrix_scan import matrix_scan

__all__ = ["diagonal_filter", "matrix_filter"]


class _Segment(NamedTuple):
    reach: Tensor
    variance: Tensor
    information: Tensor
    cut: Tensor | None = None  # bool: whether it contains a reset; None if there are no resets at all


def diagonal_filter(
    transition: Tensor,
    offset: Tensor,
    observed: Tensor,
    strength: Tensor,
    initial: Tensor,
    *,
    reset: Tensor | None = None,
) -> Tensor:
    """Return the filtered means for a diagonal transition.

    Args:
        transition, offset, observed, strength, initial, reset: As in `reference.diagonal_filter`.
    """
    if not offset.shape[-2]:
        return offset.clone()
    factors = torch.broadcast_to(transition, offset.shape)
    if reset is not None:
        factors = torch.where(reset.unsqueeze(-1), 0, factors)
    weight = strength.unsqueeze(-1)
    modulus = factors.abs()
    steps = _Segment(
        modulus / (1 + weight),
        1 / (1 + weight) + torch.zeros_like(modulus),
        modulus.square() * weight / (1 + weight),
        None if reset is None else torch.broadcast_to(reset, offset.shape[:-1]).unsqueeze(-1),
    )
    variance = _scan_prefixes(steps, _join_diagonal, -2).variance
    gain = weight * variance
    return linear_scan((1 - gain) * factors, (1 - gain) * offset + gain * observed, initial, reset=reset)


def _mask_before_reset(first: _Segment, then: _Segment) -> _Segment:
    """Return `first`, with zeros where a reset in `then` cuts it off: products with zero would keep a NaN."""
    if first.cut is None or then.cut is None:
        return first
    reach, variance, information = (torch.where(then.cut, 0, part) for part in first[:3])
    return _Segment(reach, variance, information, first.cut | then.cut)


def _join_diagonal(first: _Segment, then: _Segment) -> _Segment:
    first = _mask_before_reset(first, then)
    shared = 1 / (1 + first.variance * then.information)
    return _Segment(
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
    """Return the filtered means for a dense transition.

    Args:
        transition, offset, observed, strength, initial, reset: As in `reference.matrix_filter`.
    """
    if not offset.shape[-2]:
        return offset.clone()
    matrices = torch.broadcast_to(transition, (*offset.shape, offset.shape[-1]))
    if reset is not None:
        matrices = torch.where(reset[..., None, None], 0, matrices)
    eye = torch.eye(offset.shape[-1], dtype=offset.dtype, device=offset.device)
    weight = strength[..., None, None]
    steps = _Segment(
        matrices / (1 + weight),
        eye / (1 + weight) + torch.zeros_like(matrices),
        matrices.mT @ matrices * weight / (1 + weight),
        None if reset is None else torch.broadcast_to(reset, offset.shape[:-1])[..., None, None],
    )
    gain = weight * _scan_prefixes(steps, _join_matrices, -3).variance
    complement = eye - gain
    corrected = complement @ offset.unsqueeze(-1) + gain @ observed.unsqueeze(-1)
    return matrix_scan(complement @ matrices, corrected.squeeze(-1), initial, reset=reset)


def _join_matrices(first: _Segment, then: _Segment) -> _Segment:
    eye = torch.eye(first.reach.shape[-1], dtype=first.reach.dtype, device=first.reach.device)
    first = _mask_before_reset(first, then)
    information = then.information  # symmetric, as variances are
    right = torch.cat((then.reach.mT, information @ first.reach), -1)
    reach, informed = solve_linear(eye + information @ first.variance, right).chunk(2, -1)
    shared = reach.mT
    return _Segment(
        shared @ first.reach,
        _symmetrize(shared @ first.variance @ then.reach.mT + then.variance),
        _symmetrize(first.reach.mT @ informed + first.information),
        first.cut,
    )


def _symmetrize(matrices: Tensor) -> Tensor:
    """Return the symmetric part: an antisymmetric rounding error would grow along the scan where transitions do."""
    return (matrices + matrices.mT) / 2


def _scan_prefixes(steps: _Segment, join: Callable[[_Segment, _Segment], _Segment], time: int) -> _Segment:
    """Return the segments from the first step to each step t, in two levels as `linear_scan`; `time` is a dimension."""
    count = steps.reach.shape[time]
    length = max(1, math.isqrt(count))
    chunks = -(-count // length)

    def split_chunks(values: Tensor) -> tuple[Tensor, ...]:
        missing = chunks * length - count
        last = values.narrow(time, count - 1, 1)
        filled = torch.cat((values, *[last] * missing), time) if missing else values
        parts: tuple[Tensor, ...] = filled.unflatten(time, (chunks, length)).unbind(time)
        return parts

    rows = [_Segment(*parts) for parts in zip(*(split_chunks(part) for part in _present(steps)), strict=True)]
    local = [rows[0]]
    for row in rows[1:]:
        local.append(join(local[-1], row))
    ends = [_Segment(*parts) for parts in zip(*(part.unbind(time) for part in _present(local[-1])), strict=True)]
    before = [ends[0]]
    for end in ends[1:-1]:
        before.append(join(before[-1], end))
    entering = _Segment(*(torch.stack(parts, time) for parts in zip(*map(_present, before), strict=True)))
    joined = []
    for row in local:  # the first chunk is final; all others are joined to the chunks before them
        if chunks == 1:
            joined.append(row)
            continue
        rest = join(entering, _Segment(*(part.narrow(time, 1, chunks - 1) for part in _present(row))))
        both = zip(_present(row), _present(rest), strict=True)
        joined.append(_Segment(*(torch.cat((part.narrow(time, 0, 1), later), time) for part, later in both)))
    stacked = [torch.stack(parts, time) for parts in zip(*map(_present, joined), strict=True)]
    return _Segment(*(part.flatten(time - 1, time).narrow(time, 0, count) for part in stacked))


def _present(segment: _Segment) -> list[Tensor]:
    return [part for part in segment if part is not None]
