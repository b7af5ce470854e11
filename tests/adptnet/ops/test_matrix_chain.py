"""A frame carried through matrices: the kernel against products one after another."""

import pytest
import torch
from torch.testing import assert_close

from adptnet.ops import _build
from adptnet.ops.matrix_chain import cpu, matrix_chain, reference
from adptnet_lab.benchmarks.timing import on_threads

pytestmark = pytest.mark.skipif(not cpu.ready(torch.float64), reason="no compiler, or ADPTNET_BACKEND=reference")


def drawn(batch, steps, size, count, dtype=torch.float64):
    return torch.randn(batch, steps, size, size, dtype=dtype) / size**0.5, torch.randn(batch, size, count, dtype=dtype)


@pytest.mark.parametrize("size", [1, 2, 7, 13, 33, 128])
@pytest.mark.parametrize("count", [1, 5, 16, 50])
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 6)])
def test_a_chain_is_its_products(size, count, batch, steps):
    matrices, frame = drawn(batch, steps, size, count)
    assert_close(matrix_chain(matrices, frame), reference.matrix_chain(matrices, frame), atol=1e-12, rtol=0)


def test_in_single_precision_a_chain_rounds_as_its_products_do():
    matrices, frame = drawn(2, 20, 40, 40)
    exact = reference.matrix_chain(matrices, frame)
    single = [run(matrices.float(), frame.float()).double() - exact for run in (matrix_chain, reference.matrix_chain)]
    assert single[0].abs().max() <= 2 * single[1].abs().max()


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_threads_change_nothing(batch):
    matrices, frame = drawn(batch, 30, 64, 64)
    found = []
    for count in (1, 2, 3):
        with on_threads(count):
            found.append(matrix_chain(matrices, frame))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_part_of_longer_memory_and_empty_ones():
    matrices, frame = drawn(2, 9, 6, 6)
    part = matrices[:, 3:7]
    assert not part.is_contiguous()
    assert_close(matrix_chain(part, frame), reference.matrix_chain(part, frame), atol=1e-13, rtol=0)
    turned = matrices.mT
    assert_close(matrix_chain(turned, frame.mT), reference.matrix_chain(turned, frame.mT), atol=1e-13, rtol=0)
    assert torch.equal(matrix_chain(matrices[:, :0], frame), frame)
    assert matrix_chain(matrices[:0], frame[:0]).shape == (0, 6, 6)
    assert matrix_chain(matrices, frame[..., :0]).shape == (2, 6, 0)


def test_numbers_that_are_not_finite_stay_so():
    matrices, frame = drawn(1, 3, 20, 20)
    matrices[0, 1, 4, 2] = torch.nan
    assert torch.equal(matrix_chain(matrices, frame).isnan(), reference.matrix_chain(matrices, frame).isnan())


def test_derivatives_are_those_of_the_products():
    matrices, frame = (t.requires_grad_() for t in drawn(1, 3, 4, 4))
    assert torch.autograd.gradcheck(matrix_chain, (matrices, frame))
    assert torch.autograd.gradcheck(matrix_chain, (matrices, frame), check_forward_ad=True, check_backward_ad=False)
    assert "matrix_chain" in _build.OPERATIONS
