"""`adpt_scan` on the GPU path, with the kernels run by Triton's interpreter: values, gradients, launches."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adptnet.ops import _backends
from adptnet.ops import adpt_scan as package
from adptnet.ops.adpt_scan import Constants, adpt_scan, launch, reference
from adptnet.ops.tolerance import Tolerance
from support.kernels import VARIANTS, make_problem

# The others run linear_scan (no rotation) or the eager loop (a phase without a rotation, planes).
SUPPORTED = [name for name, given in VARIANTS.items() if not {"rotates", "planes", "whole_state"} & given.keys()]
NAMES = ("states", "drive", "state", *Constants._fields)


@pytest.fixture(params=["resident", "streamed"])
def kernels(request, emulated_gpu, monkeypatch):
    """Make tiny heads run by the kernels for small or for large heads, and return the module of the kernels."""
    plan = launch.plan_launch

    def plan_streamed(form, size, device):
        found = plan(form, size, device)
        if form.directions_in_drive:  # which needs no K and V
            return found
        return found._replace(kind="streamed", some=8, block=16, inner=16)

    if request.param == "streamed":
        monkeypatch.setattr(package.triton, "plan_launch", plan_streamed)
    return package.triton


def differentiate(scan, dtype, problem, reset=None, lengths=None, **options):
    """Return the states and all gradients, by name."""
    drive, state, constants, form = problem
    leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (drive, state, *constants)]
    states = scan(leaves[0], leaves[1], Constants(*leaves[2:]), form, reset=reset, lengths=lengths, **options)
    upstream = torch.linspace(-1, 1, states.numel(), dtype=torch.float64).cos().reshape(states.shape).to(dtype)
    present = [t for t in leaves if t is not None]
    gradients = iter(torch.autograd.grad(states, present, upstream, allow_unused=True, materialize_grads=True))
    values = [states.detach(), *(None if t is None else next(gradients) for t in leaves)]
    return {name: value.double() for name, value in zip(NAMES, values, strict=True) if value is not None}


def relative_errors(found, exact):
    return {name: float((found[name] - e).abs().max() / e.abs().max().clamp(min=1e-30)) for name, e in exact.items()}


def check(make, *, seeds=4, **call):
    """Compare with float64: at most 8 times the error of the float32 reference, the largest of several problems."""
    allowed = dict.fromkeys(NAMES, torch.finfo(torch.float32).eps / 2)
    for seed in reversed(range(seeds)):
        torch.manual_seed(seed)
        problem = make()
        exact = differentiate(reference.adpt_scan, torch.float64, problem, **call)
        rounded = differentiate(reference.adpt_scan, torch.float32, problem, **call)
        for name, error in relative_errors(rounded, exact).items():
            allowed[name] = max(allowed[name], error)
    with _backends.record_runs():
        found = differentiate(adpt_scan, torch.float32, problem, **call)
    assert found.keys() == exact.keys()
    for name, error in relative_errors(found, exact).items():
        assert error <= 8 * allowed[name], (name, error, allowed[name])


RESET = torch.tensor([[False, True, False], [True, False, False], [False, False, False]])
LENGTHS = torch.tensor([3, 2, 1])


QUICK = [*(("resident", name) for name in SUPPORTED), *(("streamed", name) for name in SUPPORTED[1::3])]


@pytest.mark.parametrize(("kernels", "name"), QUICK, indirect=["kernels"])
def test_every_variant_equals_the_reference(kernels, name):
    pairs = SUPPORTED.index(name) % 2 == 0  # each with or without pairs here, both in the slow test
    size = 12 if VARIANTS[name].get("heads") == 2 else 6  # whole pairs in each head
    make = functools.partial(make_problem, 3, 3, size, pairs=pairs, dtype=torch.float64, **VARIANTS[name])
    check(make, reset=RESET if pairs else None, lengths=None if pairs else LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_every_variant_with_odd_sizes(kernels, name, pairs):
    heads = VARIANTS[name].get("heads", 1)
    for batch, steps, size in ((1, 1, 2 * heads), (17, 2, 18 * heads), (2, 7, 10 * heads)):
        make = functools.partial(make_problem, batch, steps, size, pairs=pairs, dtype=torch.float64, **VARIANTS[name])
        reset = torch.rand(batch, steps) < 0.3
        lengths = torch.randint(0, steps + 1, (batch,))
        lengths[0] = steps
        check(make, reset=reset, lengths=lengths)


@pytest.mark.parametrize(("batch", "steps", "size"), [(17, 2, 17), (1, 1, 1), (2, 2, 65)])
def test_odd_sizes(emulated_gpu, batch, steps, size):
    planned = launch.plan_launch(launch.Form(), size, torch.device("cpu"))
    assert planned.kind == ("streamed" if size > 64 else "resident")
    check(functools.partial(make_problem, batch, steps, size, dtype=torch.float64), seeds=2)


def test_projections_that_are_not_saved_are_recomputed(kernels):
    make = functools.partial(make_problem, 3, 3, 6, bias=True, source=1, dtype=torch.float64)
    problem = make()
    saved = differentiate(adpt_scan, torch.float32, problem, reset=RESET)
    lean = differentiate(adpt_scan, torch.float32, problem, reset=RESET, lean=True)
    for name, value in saved.items():
        torch.testing.assert_close(lean[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_stays_in_its_row(kernels, bad):
    problem = make_problem(3, 3, 6, dtype=torch.float64)
    good = differentiate(adpt_scan, torch.float32, problem)
    problem[0][1, 1, 2] = bad
    found = differentiate(adpt_scan, torch.float32, problem)
    for name in ("states", "drive", "state"):
        assert torch.equal(found[name][[0, 2]], good[name][[0, 2]])
    assert not found["states"][1].isfinite().all()


def test_padding_is_not_read(kernels):
    """NaN in the drive past the end of a sequence reaches neither values nor gradients."""
    problem = make_problem(3, 3, 6, rotation_aware=True, beta_in_drive=True, dtype=torch.float64)
    good = differentiate(adpt_scan, torch.float32, problem, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        problem[0][row, length:] = torch.nan
    found = differentiate(adpt_scan, torch.float32, problem, lengths=LENGTHS)
    for name, value in good.items():
        assert torch.equal(found[name], value), name


def test_weights_of_any_scale_give_the_same_directions(emulated_gpu):
    drive, state, constants, form = make_problem(2, 2, 5, dtype=torch.float32)
    for scale in (0.0, 1e-38, 1e-30, 1e-12, 1e12, 1e18):
        scaled = constants._replace(weight=constants.weight * scale)
        expected = reference.adpt_scan(drive, state, scaled, form)
        torch.testing.assert_close(adpt_scan(drive, state, scaled, form), expected, atol=2e-6, rtol=2e-6)


def test_constants_that_are_not_used_have_zero_gradient(emulated_gpu):
    drive, state, constants, form = make_problem(2, 2, 4, directions_in_drive=True, beta_in_drive=True)
    extra = {"weight": torch.randn(1, 2, 4, 4), "bias": torch.randn(1, 2, 4), "beta": torch.ones(1)}
    found = differentiate(adpt_scan, torch.float32, (drive, state, constants._replace(**extra), form))
    assert not any(found[name].any() for name in extra)


def test_empty_batches_and_sequences(kernels):
    for batch, steps in ((0, 3), (2, 0)):
        problem = make_problem(batch, steps, 4, bias=True, dtype=torch.float64)
        found = differentiate(adpt_scan, torch.float32, problem)
        for name, expected in differentiate(reference.adpt_scan, torch.float32, problem).items():
            torch.testing.assert_close(found[name], expected)


class Count(TorchDispatchMode):
    """Count the operations that would be launches on a GPU, besides our kernels, and those that synchronize."""

    FREE = ("view", "reshape", "permute", "transpose", "unsqueeze", "select", "slice", "empty", "detach", "alias")
    FREE += (
        "expand",
        "unbind",
        "split",
        "_unsafe_view",
        "as_strided",
        "new_empty",
        "fill_",
    )  # the tests fill new memory

    def __init__(self):
        super().__init__()
        self.launches, self.syncs = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if name.startswith(("_local_scalar_dense", "nonzero", "lift_fresh", "_to_copy", "item")):
            self.syncs.append(name)
        elif not name.startswith(self.FREE):
            self.launches.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_one_launch_forward_and_four_backward(emulated_gpu, monkeypatch, kind):
    module, launched = package.triton, []

    class Recorded:
        def __getitem__(self, grid):
            launched.append(grid)
            return lambda *arguments, **options: None

    for direction in ("forward", "backward"):
        monkeypatch.setattr(module, f"{kind}_{direction}", Recorded())
    size = 8 if kind == "resident" else 65
    drive, state, constants, form = make_problem(17, 2, size, dtype=torch.float32)
    with Count() as forward:
        states, projections = module.forward(drive, state, constants, form, None, None, True)
    assert (launched, forward.launches, forward.syncs) == ([(2, 1)], [], [])
    upstream = torch.ones_like(states)
    with Count() as backward:
        module.backward(upstream, states, projections, drive, state, constants, form, None, None)
    assert launched == [(2, 1)] * 2
    # One product for K and V, and the sums over the batch of the gradients of the spectrum and of β.
    assert sorted(backward.launches) == ["bmm.default", "sum.dim_IntList", "sum.dim_IntList"]
    assert not backward.syncs


def test_heads_are_an_axis_of_the_grid(emulated_gpu, monkeypatch):
    grids = []

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(package.triton, "resident_forward", Recorded())
    drive, state, constants, form = make_problem(33, 2, 12, heads=3, dtype=torch.float32)
    package.triton.forward(drive, state, constants, form, None, None, False)
    assert grids == [(3, 3)]


def test_every_launch_is_on_the_device_of_its_tensors(emulated_gpu, monkeypatch):
    """Triton launches on the current device, so launches must be inside a guard."""
    events = []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            events.append(("enter", self.tensor.device.type))

        def __exit__(self, *_):
            events.append("leave")

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **how: events.append("launch")

    from adptnet.ops import adpt_step, linear_scan

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    for name in ("resident_forward", "resident_backward"):
        monkeypatch.setattr(package.triton, name, Kernel())
    for name in ("apply_kernel", "apply_backward_kernel"):
        monkeypatch.setattr(linear_scan.triton, name, Kernel())
    drive, state, constants, form = make_problem(2, 3, 4, dtype=torch.float32)
    saved = torch.zeros(2, 3, 1, 2, 4, dtype=torch.float32)
    package.triton.forward(drive, state, constants, form, None, None, False)
    package.triton.backward(drive, drive, saved, drive, state, constants, form, None, None)
    linear_scan.triton.forward(constants.real, drive, None, None, False)
    linear_scan.triton.backward(drive, drive, constants.real, None, None, False, needs_transition_grad=True)
    assert events == [("enter", "cpu"), "launch", "leave"] * 4
    events.clear()
    for name in ("evaluate", "summarize", "carry", "apply", "pull_back"):
        monkeypatch.setattr(adpt_step.triton, f"{name}_kernel", Kernel())
    newton = adpt_step.DevicePass(constants, form, False)
    newton(drive, drive, state, state, None, tolerance=Tolerance(1e-3, 1e-2))
    newton.pull_back(drive, drive, drive)
    assert events == [("enter", "cpu"), *["launch"] * 4, "leave", ("enter", "cpu"), "launch", "leave"]
