"""The product of a frame with a sequence of matrices: the kernel against single products."""

import pytest
import torch
from torch.testing import assert_close

from adptnet.ops import _build
from adptnet.ops.matrix_chain import cpu, matrix_chain, reference
from support.kernels import use_threads

pytestmark = pytest.mark.skipif(not cpu.has_kernel(torch.float64), reason="no compiler, or ADPTNET_BACKEND=reference")


def make_chain(batch, steps, size, count, dtype=torch.float64):
    return torch.randn(batch, steps, size, size, dtype=dtype) / size**0.5, torch.randn(batch, size, count, dtype=dtype)


@pytest.mark.parametrize("size", [1, 2, 7, 13, 33, 128])
@pytest.mark.parametrize("count", [1, 5, 16, 50])
@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 6)])
def test_a_chain_equals_its_products(size, count, batch, steps):
    matrices, frame = make_chain(batch, steps, size, count)
    assert_close(matrix_chain(matrices, frame), reference.matrix_chain(matrices, frame), atol=1e-12, rtol=0)


def test_in_single_precision_a_chain_is_as_accurate_as_its_products():
    matrices, frame = make_chain(2, 20, 40, 40)
    exact = reference.matrix_chain(matrices, frame)
    single = [run(matrices.float(), frame.float()).double() - exact for run in (matrix_chain, reference.matrix_chain)]
    assert single[0].abs().max() <= 2 * single[1].abs().max()


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(batch):
    matrices, frame = make_chain(batch, 30, 64, 64)
    found = []
    for count in (1, 2, 3):
        with use_threads(count):
            found.append(matrix_chain(matrices, frame))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_slices_transposes_and_empty_inputs():
    matrices, frame = make_chain(2, 9, 6, 6)
    part = matrices[:, 3:7]
    assert not part.is_contiguous()
    assert_close(matrix_chain(part, frame), reference.matrix_chain(part, frame), atol=1e-13, rtol=0)
    transposed = matrices.mT
    assert_close(matrix_chain(transposed, frame.mT), reference.matrix_chain(transposed, frame.mT), atol=1e-13, rtol=0)
    assert torch.equal(matrix_chain(matrices[:, :0], frame), frame)
    assert matrix_chain(matrices[:0], frame[:0]).shape == (0, 6, 6)
    assert matrix_chain(matrices, frame[..., :0]).shape == (2, 6, 0)


def test_nan_propagates_as_in_the_products():
    matrices, frame = make_chain(1, 3, 20, 20)
    matrices[0, 1, 4, 2] = torch.nan
    assert torch.equal(matrix_chain(matrices, frame).isnan(), reference.matrix_chain(matrices, frame).isnan())


def test_gradients_run_the_reference():
    matrices, frame = (t.requires_grad_() for t in make_chain(1, 3, 4, 4))
    assert torch.autograd.gradcheck(matrix_chain, (matrices, frame))
    assert torch.autograd.gradcheck(matrix_chain, (matrices, frame), check_forward_ad=True, check_backward_ad=False)
    assert "matrix_chain" in _build.OPERATIONS
