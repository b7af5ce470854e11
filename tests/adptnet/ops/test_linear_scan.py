"""The kernel of the diagonal recurrence. Further comparisons with the reference are in test_scans.py."""

import pytest
import torch
from torch.testing import assert_close

from adptnet.ops.linear_scan import chunked, cpu, linear_scan, reference
from support.kernels import run_python, use_threads
from support.scans import either_way, randn, random_eigenvalues, real_or_complex, run_with_gradients, transition_shapes

pytestmark = pytest.mark.skipif(not cpu.has_kernel(torch.float64), reason="no compiler, or ADPTNET_BACKEND=reference")


@either_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["real", "complex"])
@pytest.mark.parametrize("shape", ["constant", "per sequence and step"])
def test_single_precision_is_as_accurate_as_rounding_allows(shape, dtype, reverse):
    batch, steps, size = (3,), 200, 45
    wide = torch.float64 if dtype == torch.float32 else torch.complex128
    factors = 0.9 * random_eigenvalues(*transition_shapes[shape](batch, steps, size), dtype=wide)
    tensors = [factors, randn(*batch, steps, size, dtype=wide), randn(*batch, size, dtype=wide)]
    narrow = [tensor.to(dtype) for tensor in tensors]
    found = run_with_gradients(lambda *t: linear_scan(*t, reverse=reverse), narrow)
    expected = run_with_gradients(lambda *t: reference.linear_scan(*t, reverse=reverse), narrow)
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= 4 * steps * torch.finfo(dtype).eps * max(1.0, float(b.detach().abs().max()))


@real_or_complex
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 17, 50, 97, 600])
def test_any_width(size, dtype):
    tensors = [random_eigenvalues(size, dtype=dtype), randn(2, 21, size, dtype=dtype), randn(2, size, dtype=dtype)]
    found, expected = (run_with_gradients(op, tensors) for op in (linear_scan, reference.linear_scan))
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert_close(a, b, atol=1e-12, rtol=1e-10)


@real_or_complex
@pytest.mark.parametrize(("batch", "size"), [(1, 200), (3, 40), (5, 7)])
def test_results_do_not_depend_on_the_number_of_threads(batch, size, dtype):
    factors, offset = random_eigenvalues(size, dtype=dtype), randn(batch, 4001, size, dtype=dtype)
    runs = []
    for threads in (1, 2, 3):
        with use_threads(threads):
            runs.append(run_with_gradients(linear_scan, [factors, offset]))
    for values, found in runs[1:]:
        assert torch.equal(values, runs[0][0])
        assert all(torch.equal(a, b) for a, b in zip(found, runs[0][1], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 33, 200])
def test_a_real_scan_rounds_every_product_and_sum(size, dtype):
    """A fused product and sum would round once, in those of the kernel's loops in which the compiler fuses them."""
    factors = random_eigenvalues(size).to(dtype)
    offset = randn(2, 50, size, dtype=dtype).requires_grad_()
    states = linear_scan(factors, offset)
    upstream = randn(2, 50, size, dtype=dtype)
    (found,) = torch.autograd.grad(states, offset, upstream)
    x = g = torch.zeros(2, size, dtype=dtype)
    for t in range(50):
        x = factors * x + offset[:, t]
        assert torch.equal(states[:, t], x)
    for t in reversed(range(50)):
        g = upstream[:, t] + factors * g
        assert torch.equal(found[:, t], g)


def test_non_contiguous_inputs():
    factors, offset, initial = random_eigenvalues(50, 6), randn(6, 50, 2).transpose(0, 2), randn(6, 2).mT
    expected = reference.linear_scan(factors, offset, initial)
    assert_close(linear_scan(factors, offset, initial), expected)
    assert_close(linear_scan(factors[:, :1].expand(50, 6), offset), reference.linear_scan(factors[:, :1], offset))
    transposed = randn(2, 6, 50).mT
    with torch.no_grad():
        found = linear_scan(factors, transposed.clone(memory_format=torch.preserve_format), initial, overwrite=True)
    assert_close(found, reference.linear_scan(factors, transposed, initial))


def test_conjugate_views_mixed_and_half_dtypes():
    factors, offset = random_eigenvalues(5, dtype=torch.complex128), randn(2, 30, 5, dtype=torch.complex128)
    assert_close(linear_scan(factors.conj(), offset.conj()), reference.linear_scan(factors, offset).conj())
    assert_close(linear_scan(factors.real, offset), reference.linear_scan(factors.real, offset))
    assert linear_scan(factors.real.half(), offset.real.half()).dtype == torch.half


def test_a_broadcast_offset_is_not_overwritten():
    offset = randn(1, 30, 5).expand(3, 30, 5)
    before = offset.clone()
    with torch.no_grad():
        found = linear_scan(random_eigenvalues(5), offset, randn(3, 5), overwrite=True)
    assert found.shape == (3, 30, 5)
    assert torch.equal(offset, before)


def test_nan_stays_in_its_channel_and_before_the_reset():
    offset = torch.zeros(2, 40, 9)
    offset[0, 7, 3] = torch.nan
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[0, 20] = True
    states = linear_scan(torch.full((9,), 0.5), offset, reset=reset)
    assert states[0, 7:20, 3].isnan().all()
    assert states.isnan().sum() == 13  # a reset sets the state before the step to zero


def test_inputs_that_depend_on_each_other_are_differentiated_once():
    offset, transition = torch.randn(2, 9, 3, requires_grad=True), torch.rand(3)

    def run(scan, **options):
        made = offset * 1
        return torch.autograd.grad(scan(transition, made, made.mean(1)).sum(), offset, **options)[0]

    assert_close(run(linear_scan, create_graph=True), run(reference.linear_scan))


def test_double_backward_forward_mode_and_vmap_run_the_torch_implementation():
    tensors = [random_eigenvalues(17, 2) + 0.05, randn(2, 17, 2), randn(2, 2)]
    for tensor in tensors:
        tensor.requires_grad_()
    reset = torch.rand(2, 17) < 0.2
    assert torch.autograd.gradgradcheck(lambda *t: linear_scan(*t, reset=reset, reverse=True), tensors)
    tangents = tuple(torch.randn_like(tensor) for tensor in tensors)
    found = torch.func.jvp(linear_scan, tuple(tensors), tangents)
    expected = torch.func.jvp(chunked.linear_scan, tuple(tensors), tangents)
    assert_close(found, expected)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(a, b) for a, b in zip(tensors, tangents, strict=True)]
        pushed = torch.autograd.forward_ad.unpack_dual(linear_scan(*duals)).tangent
    assert_close(pushed, expected[1])
    every = torch.vmap(linear_scan, in_dims=(None, 0, 0))(*tensors)
    assert_close(every, linear_scan(*tensors))


COMPILED = """
import torch
from adptnet.ops.linear_scan import linear_scan
torch.set_default_dtype(torch.float64)
tensors = [torch.rand(4).requires_grad_(), torch.randn(2, 30, 4).requires_grad_(), torch.randn(2, 4).requires_grad_()]
run = lambda a, b, c: 2 * linear_scan(a, b, c, reverse=True)
graphs = []
torch.compile(run, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)(*tensors)
compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
found, expected = (torch.autograd.grad(f(*tensors).sum(), tensors) for f in (compiled, run))
torch.testing.assert_close(found, expected)
class Model(torch.nn.Module):
    def forward(self, a, b):
        return linear_scan(a, b)
program = torch.export.export(Model(), (tensors[0].detach(), tensors[1].detach()))
torch.testing.assert_close(program.module()(*tensors[:2]), linear_scan(*tensors[:2]))
print(*[sum("linear_scan" in str(node.target) for node in g.graph.nodes) for g in (graphs[0], program)])
"""


def test_compiled_and_exported_it_is_one_operation():
    assert run_python(COMPILED)[0] == "1 1"


@pytest.mark.parametrize("initial", [None, torch.ones(2, 4)], ids=["from zero", "from a state"])
def test_the_operation_passes_opcheck(initial):
    tensors = (torch.rand(4).requires_grad_(), torch.randn(2, 3, 4).requires_grad_(), initial, None, True)
    torch.library.opcheck(
        torch.ops.adptnet.linear_scan.default,
        tensors,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
