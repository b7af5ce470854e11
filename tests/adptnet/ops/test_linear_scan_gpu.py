"""`linear_scan` on the GPU path, with the kernels run by Triton's interpreter."""

import itertools

import pytest
import torch

from adptnet.ops import linear_scan as package
from adptnet.ops.linear_scan import linear_scan, reference

SHAPES = {"constant": (3,), "per sequence": (2, 1, 3), "varying": (2, None, 3)}
EXACT = {torch.float32: torch.float64, torch.complex64: torch.complex128, torch.float64: torch.float64}


@pytest.fixture
def kernels(emulated_gpu, monkeypatch):
    """Return the module with the kernels, with chunks short enough for tiny sequences to have several levels."""
    monkeypatch.setattr(package.triton, "LENGTH", 4)
    return package.triton


def differentiate(scan, dtype, leaves, upstream, **options):
    leaves = [t.to(dtype).requires_grad_() for t in leaves]
    states = scan(*leaves, **options)
    return [states.detach(), *torch.autograd.grad(states, leaves, upstream.to(dtype))]


def check_against_reference(dtype, shape, steps, *, reverse, resets, starts):
    """Compare values and all gradients: at most 8 times the error of the reference in the same precision."""
    exact = EXACT[dtype]
    transition = torch.randn(*(steps if n is None else n for n in SHAPES[shape]), dtype=exact)
    transition = transition / (1 + transition.abs())
    leaves = [transition, torch.randn(2, steps, 3, dtype=exact)] + [torch.randn(2, 3, dtype=exact)] * starts
    upstream = torch.randn(2, steps, 3, dtype=exact)
    options = {"reset": torch.rand(2, steps) < 0.15 if resets else None, "reverse": reverse}
    expected = differentiate(reference.linear_scan, exact, leaves, upstream, **options)
    rounded = differentiate(reference.linear_scan, dtype, leaves, upstream, **options)
    found = differentiate(linear_scan, dtype, leaves, upstream, **options)
    for e, r, f in zip(expected, rounded, found, strict=True):
        bound = 8 * max(float((r - e).abs().max()), torch.finfo(dtype).eps / 2 * float(e.abs().max()))
        assert float((f - e).abs().max()) <= bound
    given = [t.to(dtype).clone() for t in leaves]
    linear_scan(*given, **options, overwrite=True)
    assert torch.equal(given[1], found[0])  # in place, by the same kernels


@pytest.mark.parametrize("steps", [1, 5, 23])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_those_of_the_reference(kernels, shape, steps):
    complex_numbers, reverse = shape != "constant", steps == 5
    dtype = torch.complex64 if complex_numbers else torch.float32
    for resets, starts in ((True, True), (False, steps == 1)):
        check_against_reference(dtype, shape, steps, reverse=reverse, resets=resets, starts=starts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_combination_equals_the_reference(kernels, dtype, shape):
    for steps, *flags in itertools.product((1, 4, 5, 17, 70), *[(False, True)] * 3):
        reverse, resets, starts = flags
        check_against_reference(dtype, shape, steps, reverse=reverse, resets=resets, starts=starts)


def test_leading_dimensions_odd_widths_and_strides(kernels):
    transition, offset = torch.rand(1, 3, 1, 67), torch.randn(2, 3, 67, 9).transpose(-1, -2)
    torch.testing.assert_close(linear_scan(transition, offset), reference.linear_scan(transition, offset))
    given = offset.clone(memory_format=torch.preserve_format)
    assert not given.is_contiguous()
    linear_scan(transition, given, overwrite=True)
    torch.testing.assert_close(given, reference.linear_scan(transition, offset))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("broken", ["transition", "offset", "upstream"])
def test_neither_nan_nor_infinity_passes_a_reset(kernels, dtype, reverse, broken):
    steps, at = 12, {"transition": 5, "offset": 7, "upstream": 5}[broken]
    reset = torch.zeros(1, steps, dtype=torch.bool)
    reset[0, [5, 9]] = True
    given = {name: torch.randn(1, steps, 3, dtype=dtype) / 2 for name in ("transition", "offset", "upstream")}

    def run() -> list[torch.Tensor]:
        order = (1,) if reverse else ()
        marks = reset.flip(1) if reverse else reset
        leaves = [given[name].flip(order).requires_grad_() for name in ("transition", "offset")]
        states = linear_scan(*leaves, reset=marks, reverse=reverse)
        gradients = torch.autograd.grad(states, leaves, given["upstream"].flip(order))
        return [t.detach().flip(order) for t in (states, *gradients)]

    expected = run()
    given[broken][0, at] = torch.inf
    whole = torch.tensor([i for i in range(steps) if broken == "transition" or not 5 <= i < 9])
    for f, e in zip(run(), expected, strict=True):
        torch.testing.assert_close(f[:, whole], e[:, whole])


@pytest.mark.parametrize("steps", [1, 4, 5, 21, 22])
def test_no_program_loops_over_more_than_one_chunk(kernels, monkeypatch, steps):
    """Parallelism and launches: ⌈T / chunk⌉ programs per sequence and 64 columns, and 2 launches more per level."""
    grids = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            grids.append(grid)
            return self.kernel[grid]

    for name in ("summarize_kernel", "apply_kernel", "apply_backward_kernel"):
        monkeypatch.setattr(kernels, name, Counted(getattr(kernels, name)))
    offset = torch.randn(2, steps, 65, dtype=torch.float32, requires_grad=True)
    states = linear_scan(torch.rand(65, dtype=torch.float32), offset)
    expected = kernels.count_launches(steps)
    assert expected == {1: 1, 4: 1, 5: 3, 21: 5, 22: 5}.get(steps, 3)
    assert len(grids) == expected
    assert max(grids) == (2 * -(-steps // 4), 2)
    states.sum().backward()
    assert len(grids) == 2 * expected
