"""Nothing crosses a reset in any scan: no NaN and no infinity, neither in the states nor in the gradients."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from adptnet.ops import adpt_scan, kalman_filter, linear_scan, matrix_scan
from adptnet.ops.adpt_scan import Constants, Form
from adptnet.ops.adpt_scan import reference as adpt_reference
from adptnet.ops.kalman_filter import reference as filter_reference
from adptnet.ops.linear_scan import chunked as linear_chunked
from adptnet.ops.linear_scan import reference as linear_reference
from adptnet.ops.matrix_scan import chunked as matrix_chunked
from adptnet.ops.matrix_scan import reference as matrix_reference

BATCH, SIZE = 2, 3


class Scan(NamedTuple):
    """A scan and its inputs, each of which has one row per step."""

    run: Callable[..., Tensor]
    inputs: Callable[[int], list[Tensor]]
    reversible: bool = True


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def linear_inputs(dtype: torch.dtype) -> Callable[[int], list[Tensor]]:
    return lambda steps: [randn(BATCH, steps, SIZE, dtype=dtype) / 2, randn(BATCH, steps, SIZE, dtype=dtype)]


def matrix_inputs(steps: int) -> list[Tensor]:
    return [randn(BATCH, steps, SIZE, SIZE) / 3, randn(BATCH, steps, SIZE)]


def make_scan(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(transition: Tensor, offset: Tensor, reset: Tensor, reverse: bool) -> Tensor:
        return scan(transition, offset, torch.ones_like(offset[:, 0]), reset=reset, reverse=reverse)

    return run


def overwriting(transition: Tensor, offset: Tensor, reset: Tensor, reverse: bool) -> Tensor:
    initial = torch.ones_like(offset[:, 0])
    if torch.is_grad_enabled():
        return linear_chunked.linear_scan(transition, offset, initial, reset=reset, reverse=reverse)
    return linear_chunked.linear_scan(transition, offset.clone(), initial, reset=reset, reverse=reverse, overwrite=True)


def make_filter(found: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(transition: Tensor, offset: Tensor, observed: Tensor, reset: Tensor, reverse: bool) -> Tensor:
        strength = torch.full((BATCH, 1), 0.5)
        return found(transition, offset, observed, strength, torch.ones_like(offset[:, 0]), reset=reset)

    return run


def make_recurrence(scan: Callable[..., Tensor], form: Form) -> Callable[..., Tensor]:
    constants = Constants(
        torch.linspace(0.2, 0.9, SIZE), weight=torch.eye(SIZE).flip(0).expand(1, 2, SIZE, SIZE).clone()
    )
    constants.weight[0, 1] += torch.ones(SIZE, SIZE).triu()
    constants = constants._replace(beta=torch.tensor([0.0 if form.linear else 0.7]))

    def run(drive: Tensor, reset: Tensor, reverse: bool) -> Tensor:
        return scan(drive, torch.ones(BATCH, SIZE), constants, form, reset=reset)

    return run


SCANS = {
    "linear reference": Scan(make_scan(linear_reference.linear_scan), linear_inputs(torch.float64)),
    "linear chunked": Scan(make_scan(linear_chunked.linear_scan), linear_inputs(torch.float64)),
    "linear overwriting": Scan(overwriting, linear_inputs(torch.float64)),
    "linear": Scan(make_scan(linear_scan.linear_scan), linear_inputs(torch.float64)),
    "linear complex reference": Scan(make_scan(linear_reference.linear_scan), linear_inputs(torch.complex128)),
    "linear complex chunked": Scan(make_scan(linear_chunked.linear_scan), linear_inputs(torch.complex128)),
    "linear complex": Scan(make_scan(linear_scan.linear_scan), linear_inputs(torch.complex128)),
    "matrix reference": Scan(make_scan(matrix_reference.matrix_scan), matrix_inputs),
    "matrix chunked": Scan(make_scan(matrix_chunked.matrix_scan), matrix_inputs),
    "matrix": Scan(make_scan(matrix_scan.matrix_scan), matrix_inputs),
    "diagonal filter reference": Scan(
        make_filter(filter_reference.diagonal_filter),
        lambda steps: [*linear_inputs(torch.float64)(steps), randn(BATCH, steps, SIZE)],
        reversible=False,
    ),
    "diagonal filter": Scan(
        make_filter(kalman_filter.diagonal_filter),
        lambda steps: [*linear_inputs(torch.float64)(steps), randn(BATCH, steps, SIZE)],
        reversible=False,
    ),
    "matrix filter reference": Scan(
        make_filter(filter_reference.matrix_filter),
        lambda steps: [*matrix_inputs(steps), randn(BATCH, steps, SIZE)],
        reversible=False,
    ),
    "matrix filter": Scan(
        make_filter(kalman_filter.matrix_filter),
        lambda steps: [*matrix_inputs(steps), randn(BATCH, steps, SIZE)],
        reversible=False,
    ),
    **{
        f"recurrence {name}{' linear' * linear}": Scan(
            make_recurrence(scan, Form(linear=linear)), lambda steps: [randn(BATCH, steps, SIZE)], reversible=False
        )
        for name, scan in (("reference", adpt_reference.adpt_scan), ("kernel", adpt_scan.adpt_scan))
        for linear in (False, True)
    },
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["NaN", "infinity"])
@pytest.mark.parametrize("steps", [9, 38])
@pytest.mark.parametrize(
    ("name", "reverse"),
    [(name, way) for name, scan in SCANS.items() for way in ((False, True) if scan.reversible else (False,))],
)
def test_non_finite_values_between_two_resets_stay_there(name, steps, reverse, bad):
    scan = SCANS[name]
    # Sequence 0 has three parts, with a reset at the first step (in scan order) of the second and of the third.
    starts = [steps // 3, 2 * steps // 3]
    parts = torch.arange(steps)
    middle = (parts >= starts[0]) & (parts < starts[1])
    reset = torch.zeros(BATCH, steps, dtype=torch.bool)
    reset[0, starts] = True
    if reverse:
        middle, reset = middle.flip(0), reset.flip(1)
    outside = torch.ones(BATCH, steps, dtype=torch.bool)
    outside[0] = ~middle
    clean = scan.inputs(steps)
    upstream = torch.randn_like(clean[-1])
    expected = differentiate(scan, clean, upstream, reset, reverse)
    for broken in range(len(clean) + 1):  # each input, then the incoming gradient
        given = [values.clone() for values in (*clean, upstream)]
        inside = given[broken][0, middle]
        inside[1 if broken < len(clean) else 0] = bad
        given[broken][0, middle] = inside
        found = differentiate(scan, given[:-1], given[-1], reset, reverse)
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here[outside], there[outside])
        if broken < len(clean):
            assert not found[0][0, middle].isfinite().all()


def differentiate(scan: Scan, inputs: list[Tensor], upstream: Tensor, reset: Tensor, reverse: bool) -> list[Tensor]:
    """Return the states, computed with and without autograd, and the gradient of each input."""
    with torch.no_grad():
        plain = scan.run(*inputs, reset, reverse)
    leaves = [values.clone().requires_grad_() for values in inputs]
    states = scan.run(*leaves, reset, reverse)
    return [plain, states.detach(), *torch.autograd.grad(states, leaves, upstream)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["NaN", "infinity"])
@pytest.mark.parametrize("name", [name for name in SCANS if not name.startswith("recurrence")])
def test_a_non_finite_transition_at_a_reset_is_not_used(name, bad):
    scan = SCANS[name]
    inputs = scan.inputs(20)
    reset = torch.zeros(BATCH, 20, dtype=torch.bool)
    reset[0, 7] = True
    expected = scan.run(*inputs, reset, False)
    inputs[0][0, 7] = bad
    torch.testing.assert_close(scan.run(*inputs, reset, False), expected)
