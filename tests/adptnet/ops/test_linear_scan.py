"""The kernel of the diagonal recurrence; test_scans.py compares values and gradients with the reference as well."""

import pytest
import torch
from test_native import python
from test_scans import either_way, gradients, numbers, real_or_complex, shapes_of_transition, within_the_circle
from torch.testing import assert_close

from adptnet.ops.linear_scan import chunked, cpu, linear_scan, reference

pytestmark = pytest.mark.skipif(not cpu.ready(torch.float64), reason="no compiler, or ADPTNET_BACKEND=reference")


@either_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["real", "complex"])
@pytest.mark.parametrize("kind", ["constant", "of both"])
def test_in_single_precision_it_is_as_close_as_rounding_allows(kind, dtype, reverse):
    batch, steps, size = (3,), 200, 45
    wide = torch.float64 if dtype == torch.float32 else torch.complex128
    factors = 0.9 * within_the_circle(*shapes_of_transition[kind](batch, steps, size), dtype=wide)
    given = [factors, numbers(*batch, steps, size, dtype=wide), numbers(*batch, size, dtype=wide)]
    narrow = [tensor.to(dtype) for tensor in given]
    found = gradients(lambda *t: linear_scan(*t, reverse=reverse), narrow)
    expected = gradients(lambda *t: reference.linear_scan(*t, reverse=reverse), narrow)
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= 4 * steps * torch.finfo(dtype).eps * max(1.0, float(b.detach().abs().max()))


@real_or_complex
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 17, 50, 97, 600])
def test_any_width(size, dtype):
    given = [within_the_circle(size, dtype=dtype), numbers(2, 21, size, dtype=dtype), numbers(2, size, dtype=dtype)]
    found, expected = (gradients(op, given) for op in (linear_scan, reference.linear_scan))
    for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert_close(a, b, atol=1e-12, rtol=1e-10)


@real_or_complex
@pytest.mark.parametrize(("batch", "size"), [(1, 200), (3, 40), (5, 7)])
def test_the_same_numbers_for_any_number_of_threads(batch, size, dtype):
    factors, offset = within_the_circle(size, dtype=dtype), numbers(batch, 4001, size, dtype=dtype)
    runs = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(gradients(linear_scan, [factors, offset]))
    finally:
        torch.set_num_threads(before)
    for values, found in runs[1:]:
        assert torch.equal(values, runs[0][0])
        assert all(torch.equal(a, b) for a, b in zip(found, runs[0][1], strict=True))


def test_what_does_not_lie_in_order():
    factors, offset, initial = within_the_circle(50, 6), numbers(6, 50, 2).transpose(0, 2), numbers(6, 2).mT
    expected = reference.linear_scan(factors, offset, initial)
    assert_close(linear_scan(factors, offset, initial), expected)
    assert_close(linear_scan(factors[:, :1].expand(50, 6), offset), reference.linear_scan(factors[:, :1], offset))
    turned = numbers(2, 6, 50).mT
    with torch.no_grad():
        found = linear_scan(factors, turned.clone(memory_format=torch.preserve_format), initial, overwrite=True)
    assert_close(found, reference.linear_scan(factors, turned, initial))


def test_conjugates_and_numbers_of_another_kind():
    factors, offset = within_the_circle(5, dtype=torch.complex128), numbers(2, 30, 5, dtype=torch.complex128)
    assert_close(linear_scan(factors.conj(), offset.conj()), reference.linear_scan(factors, offset).conj())
    assert_close(linear_scan(factors.real, offset), reference.linear_scan(factors.real, offset))
    assert linear_scan(factors.real.half(), offset.real.half()).dtype == torch.half


def test_what_is_the_same_for_many_is_not_written_over():
    offset = numbers(1, 30, 5).expand(3, 30, 5)
    before = offset.clone()
    with torch.no_grad():
        found = linear_scan(within_the_circle(5), offset, numbers(3, 5), overwrite=True)
    assert found.shape == (3, 30, 5)
    assert torch.equal(offset, before)


def test_nan_is_kept_where_it_belongs():
    offset = torch.zeros(2, 40, 9)
    offset[0, 7, 3] = torch.nan
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[0, 20] = True
    states = linear_scan(torch.full((9,), 0.5), offset, reset=reset)
    assert states[0, 7:20, 3].isnan().all()
    assert states.isnan().sum() == 13  # nothing enters a step with a reset


def test_inputs_that_depend_on_each_other_are_counted_once():
    offset, transition = torch.randn(2, 9, 3, requires_grad=True), torch.rand(3)

    def run(scan, **options):
        made = offset * 1
        return torch.autograd.grad(scan(transition, made, made.mean(1)).sum(), offset, **options)[0]

    assert_close(run(linear_scan, create_graph=True), run(reference.linear_scan))


def test_further_derivatives_come_from_the_torch_program():
    given = [within_the_circle(17, 2) + 0.05, numbers(2, 17, 2), numbers(2, 2)]
    for tensor in given:
        tensor.requires_grad_()
    reset = torch.rand(2, 17) < 0.2
    assert torch.autograd.gradgradcheck(lambda *t: linear_scan(*t, reset=reset, reverse=True), given)
    tangents = tuple(torch.randn_like(tensor) for tensor in given)
    found = torch.func.jvp(linear_scan, tuple(given), tangents)
    expected = torch.func.jvp(chunked.linear_scan, tuple(given), tangents)
    assert_close(found, expected)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(a, b) for a, b in zip(given, tangents, strict=True)]
        pushed = torch.autograd.forward_ad.unpack_dual(linear_scan(*duals)).tangent
    assert_close(pushed, expected[1])
    every = torch.vmap(linear_scan, in_dims=(None, 0, 0))(*given)
    assert_close(every, linear_scan(*given))


COMPILED = """
import torch
from adptnet.ops.linear_scan import linear_scan
torch.set_default_dtype(torch.float64)
given = [torch.rand(4).requires_grad_(), torch.randn(2, 30, 4).requires_grad_(), torch.randn(2, 4).requires_grad_()]
run = lambda a, b, c: 2 * linear_scan(a, b, c, reverse=True)
graphs = []
torch.compile(run, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)(*given)
compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
found, expected = (torch.autograd.grad(f(*given).sum(), given) for f in (compiled, run))
torch.testing.assert_close(found, expected)
class Whole(torch.nn.Module):
    def forward(self, a, b):
        return linear_scan(a, b)
program = torch.export.export(Whole(), (given[0].detach(), given[1].detach()))
torch.testing.assert_close(program.module()(*given[:2]), linear_scan(*given[:2]))
print(*[sum("linear_scan" in str(node.target) for node in g.graph.nodes) for g in (graphs[0], program)])
"""


def test_compiled_and_exported_it_is_one_operation():
    assert python(COMPILED)[0] == "1 1"


@pytest.mark.parametrize("initial", [None, torch.ones(2, 4)], ids=["from zero", "from a state"])
def test_the_operation_obeys_the_rules_of_torch(initial):
    given = (torch.rand(4).requires_grad_(), torch.randn(2, 3, 4).requires_grad_(), initial, None, True)
    torch.library.opcheck(
        torch.ops.adptnet.linear_scan.default,
        given,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
