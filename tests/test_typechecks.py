"""The shape checks of the test suite itself: they run where shapes are stated, and only there."""

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from adptnet.ops.plane_rotation.rotation import skew
from support.typechecks import checker


def test_a_wrong_shape_raises():
    assert skew(torch.ones(2, 3), torch.ones(2, 3)).shape == (2, 3, 3)
    with pytest.raises(jaxtyping.TypeCheckError):
        skew(torch.ones(2, 3), torch.ones(2, 4))


def test_a_function_that_states_no_shape_is_not_wrapped():
    decorate = jaxtyping.jaxtyped(typechecker=checker)

    def plain(x: Tensor) -> Tensor:
        return x

    def shaped(x: Float[Tensor, "n"]) -> Tensor:  # noqa: F821 - the name of an axis
        return x

    assert decorate(plain) is plain
    with pytest.raises(jaxtyping.TypeCheckError):
        decorate(shaped)(torch.ones(2, 3))
