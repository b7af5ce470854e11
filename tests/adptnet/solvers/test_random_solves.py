"""CONVERGED means right to tolerance in every channel, for states and gradients: random solves against float64."""

import collections

import pytest
import torch

from adptnet.solvers import Result
from support.random_problems import judge

CHUNK = 250


@pytest.fixture(autouse=True)
def single_precision():
    """Float32 is the default of users; the suite's is float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def check(seeds):
    outcomes, wrong = collections.Counter(), []
    for seed in seeds:
        result, right = judge(seed)
        outcomes[result] += 1
        if not right:
            wrong.append(seed)
    assert not wrong, f"CONVERGED, but wrong, for seeds {wrong}"
    return outcomes


def test_random_solves_that_converged_are_right():
    assert check(range(60))[Result.CONVERGED] > 40


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 20_000, CHUNK))
def test_twenty_thousand_random_solves_that_converged_are_right(first):
    assert check(range(first, first + CHUNK))[Result.CONVERGED] > 0.7 * CHUNK
