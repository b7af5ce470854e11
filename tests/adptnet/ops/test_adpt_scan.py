"""The fused recurrence against its specification: values and all gradients, at sizes that are not powers of two."""

import ctypes
import multiprocessing
import threading
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from adptnet import ADPTNet, adjoints, conjugates, directions, projections, solvers
from adptnet.cells.structure import choose_scan
from adptnet.errors import InputError
from adptnet.ops import _backends, _buffers
from adptnet.ops.adpt_scan import Constants, Factors, Form, Source, adpt_scan, cpu, reference
from adptnet.ops.adpt_scan.form import decode_form, encode_form
from adptnet.ops.adpt_scan.packing import stack_factors
from support.kernels import VARIANTS, make_factors, make_problem, run_python, use_threads
from support.members import build, legal, name_of

pytestmark = pytest.mark.skipif(not cpu.has_kernel(torch.float64), reason="no compiler, or ADPTNET_BACKEND=reference")

NAMES = ("drive", "state", *Constants._fields)


def run_both(drive, state, constants, form, **options):
    """Return values and gradients of the kernel and of the specification, by name."""
    leaves = [t for t in (drive, state, *constants) if t is not None]
    names = [name for name, t in zip(NAMES, (drive, state, *constants), strict=True) if t is not None]
    weights = torch.randn(*drive.shape[:2], state.shape[-1], dtype=drive.dtype)
    results = []
    fast = {"lean": options.pop("lean", False), "factors": options.pop("factors", Factors())}
    for run in (lambda *a, **o: adpt_scan(*a, **fast, **o), reference.adpt_scan):
        for leaf in leaves:
            leaf.requires_grad_()
        states = run(drive, state, constants, form, **options)
        gradients = torch.autograd.grad((states * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        results.append({"states": states.detach(), **dict(zip(names, gradients, strict=True))})
    return results


def assert_agree(*arguments, tolerance=1e-10, **options):
    found, expected = run_both(*arguments, **options)
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        assert_close(found[name], value, atol=tolerance * scale, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 13, 50, 97])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 17])
@pytest.mark.parametrize("norm", [None, 1e-5], ids=["no norm", "norm"])
def test_any_width_and_batch(batch, size, norm, lean):
    assert_agree(*make_problem(batch, 6, size, norm_epsilon=norm), lean=lean)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("size", [1, 3, 13, 50])
@pytest.mark.parametrize("batch", [1, 2, 9, 17])
@pytest.mark.parametrize("planes", [2, 3])
def test_several_planes_at_any_width_and_batch(batch, size, planes, lean):
    assert_agree(*make_problem(batch, 6, size, planes=planes), lean=lean)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(("size", "heads"), [(1, 1), (6, 3), (39, 3), (52, 4), (50, 1)])
@pytest.mark.parametrize("batch", [1, 2, 9, 17])
@pytest.mark.parametrize("softness", [0.0, 0.3])
def test_planes_of_the_whole_state_at_any_width_and_batch(batch, size, heads, softness, lean):
    assert_agree(*make_problem(batch, 6, size, heads=heads, whole_state=True, softness=softness), lean=lean)


@pytest.mark.parametrize("half", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"planes": 2}, {"rotation_aware": True}], ids=str)
def test_a_soft_key_or_value_of_zero_has_the_correct_gradient(half, options):
    """A key of zero causes no rotation, but with softness it is differentiable there. With both zero, nothing is."""
    drive, state, constants, form = make_problem(3, 2, 6, heads=3, whole_state=True, softness=0.3, **options)
    constants.weight[:, [half] if half < 2 else [0, 1]] = 0.0
    assert_agree(drive, state, constants, form)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-30, 1e30, 1e150])
def test_the_size_of_the_state_does_not_matter_to_soft_directions(scale):
    drive, state, constants, form = make_problem(3, 5, 12, heads=3, whole_state=True, softness=0.3, beta=2.0)
    plain = adpt_scan(drive, state, constants, form)
    assert_close(adpt_scan(scale * drive, scale * state, constants, form) / scale, plain, atol=1e-12, rtol=1e-10)
    # Keys much shorter than the softness have a rotation of almost zero.
    assert_agree(drive, state, constants._replace(weight=scale * constants.weight.detach()), form, tolerance=1e-9)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("size", [2, 6, 18, 50])
@pytest.mark.parametrize("batch", [1, 3, 13])
@pytest.mark.parametrize("aware", [False, True])
def test_a_phase_at_any_width_and_batch(batch, size, aware, lean):
    assert_agree(*make_problem(batch, 6, size, phased=True, rotation_aware=aware), lean=lean)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", [17, 33, 40, 70, 81, 140])
def test_one_or_two_sequences_of_any_width(size, batch):
    """With one or two sequences a register tile has up to four or three panels of the matrix, and fewer at its end."""
    assert_agree(*make_problem(batch, 3, size))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_no_memory_is_read_before_it_is_written(variant, linear, monkeypatch):
    if linear and ("beta_in_drive" in variant or variant == {"rotates": False}):
        pytest.skip("β is not fixed")
    drive, state, constants, form = make_problem(3, 5, 12, **variant)
    if linear:
        form, constants = form._replace(linear=True), constants._replace(beta=torch.zeros(form.heads))
    inputs = (drive, state, *constants, None, torch.tensor([5, 2, 4]), *Factors())
    acquire, found = _buffers.acquire, []

    def acquire_filled(fill, size):
        block = acquire(size)
        ctypes.memset(block.address, fill, size)
        return block

    for fill in (0, 255):  # zeros, and NaN
        monkeypatch.setattr(_buffers, "acquire", partial(acquire_filled, fill))
        plan = cpu.make_plan(inputs, form)
        results = cpu.forward(plan, inputs, save=False)
        found.append([results[0], *cpu.backward(plan, torch.ones_like(results[0]), inputs, *results, [True] * 30)])
    for zeros, nans in zip(*found, strict=True):
        assert (zeros is None and nans is None) or torch.equal(zeros, nans)


def test_a_row_does_not_depend_on_the_others_in_its_simd_group():
    drive, state, constants, form = make_problem(8, 9, 6, beta_in_drive=True, dtype=torch.float32)
    drive[..., -1] = 0.33
    alone = adpt_scan(drive, state, constants, form)[0]
    for other in (0.8, 40.0):
        drive[1:, :, -1] = other
        assert torch.equal(adpt_scan(drive, state, constants, form)[0], alone)


@pytest.mark.parametrize("pairs", [False, True], ids=["real", "pairs"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("lean", [False, True])
def test_one_sequence_of_every_variant(variant, pairs, lean):
    """The initial state is zero and there are resets. For one sequence the basic recurrence has a loop of its own."""
    drive, state, constants, form = make_problem(1, 7, 12, pairs=pairs, **variant)
    reset = torch.tensor([[False, False, True, False, True, True, False]])
    assert_agree(drive, 0 * state, constants, form, reset=reset, lean=lean)
    assert_agree(drive, state, constants, form, lengths=torch.tensor([4]), lean=lean)


@pytest.mark.parametrize("pairs", [False, True], ids=["real", "pairs"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("lean", [False, True])
def test_every_variant_of_the_recurrence(variant, pairs, lean):
    assert_agree(*make_problem(5, 7, 12, pairs=pairs, **variant), lean=lean)
    reset, lengths = torch.rand(5, 7) < 0.3, torch.tensor([7, 1, 3, 5, 6])
    assert_agree(*make_problem(5, 7, 12, pairs=pairs, **variant), reset=reset, lengths=lengths, lean=lean)


@pytest.mark.parametrize(
    "variant",
    [
        "exponential",
        "taylor two",
        "heads",
        "fixed dot",
        "relu",
        "spikes",
        "slow memory, rotation-aware",
        "speech",
        "phase",
        "two planes",
        "two planes, rotation-aware, slow memory",
        "whole state, soft heads",
    ],
)
@pytest.mark.parametrize(
    ("pairs", "batch", "lean"),  # every two of their values occur together
    [(False, 1, False), (True, 3, False), (False, 13, False), (True, 1, True), (False, 3, True), (True, 13, True)],
)
def test_sequences_longer_than_a_block_of_the_backward(variant, pairs, batch, lean):
    """A block has 64 rows (steps times sequences of a tile): 64 steps of one sequence, 21 of three."""
    settings = {**VARIANTS[variant], "beta": 0.05}  # small, so that rounding errors do not grow into another trajectory
    arguments = make_problem(batch, 131, 12, pairs=pairs, **settings)
    reset, lengths = torch.rand(batch, 131) < 0.02, torch.randint(60, 132, (batch,))
    assert_agree(*arguments, reset=reset, lengths=lengths, lean=lean)


@pytest.mark.parametrize("pairs", [False, True], ids=["real", "pairs"])
@pytest.mark.parametrize(
    "variant", [name for name, of in VARIANTS.items() if "beta_in_drive" not in of and of != {"rotates": False}]
)
def test_where_beta_is_fixed_at_zero_directions_are_not_computed_and_change_nothing(variant, pairs):
    drive, state, constants, form = make_problem(5, 7, 12, pairs=pairs, **VARIANTS[variant])
    constants = constants._replace(beta=torch.zeros(form.heads))
    leaves = [t for t in (drive, state, *constants) if t is not None and t is not constants.beta]
    reset, lengths = torch.rand(5, 7) < 0.3, torch.tensor([7, 1, 3, 5, 6])
    weights = torch.randn(5, 7, state.shape[-1])
    found = []
    for form_in_use in (form, form._replace(linear=True)):
        for leaf in leaves:
            leaf.requires_grad_()
        states = adpt_scan(drive, state, constants, form_in_use, reset=reset, lengths=lengths)
        found.append([states, *torch.autograd.grad((states * weights).sum(), leaves)])
    for computed, skipped in zip(*found, strict=True):
        assert_close(skipped, computed, rtol=0, atol=1e-14)
    with pytest.raises(InputError, match="fixed at zero"):
        adpt_scan(drive, state, constants._replace(beta=torch.zeros(form.heads).requires_grad_()), form_in_use)


@pytest.mark.parametrize(
    "variant",
    ["exponential", "relu", "slow memory, rotation-aware", "heads", "speech", "two planes", "whole state, soft heads"],
)
def test_single_precision_is_as_accurate_as_rounding_allows(variant):
    steps = 64
    arguments = make_problem(3, steps, 36, **{**VARIANTS[variant], "beta": 0.125})
    _, exact = run_both(*arguments)
    narrow = [t.detach().float() for t in arguments[:2]]
    constants = Constants(*(None if t is None else t.detach().float() for t in arguments[2]))
    torch.manual_seed(1)  # the weights of the sum in `run_both`
    found, expected = run_both(*narrow, constants, arguments[3])
    for name, value in expected.items():
        # Both have rounding errors at every step. Their difference is bounded by the sum of these.
        scale = float(value.abs().max())
        assert (found[name] - value).abs().max() <= 8 * steps * torch.finfo(torch.float32).eps * scale, name
    assert (found["states"].double() - exact["states"]).abs().max() <= 4 * steps * torch.finfo(torch.float32).eps


def test_with_long_memory_gradients_are_as_accurate_as_those_of_the_loop():
    drive, state, constants, form = make_problem(2, 400, 40, beta=0.1)
    lambda_bar = torch.exp(-0.5 * torch.logspace(-3, -1, 40))
    arguments = [0.1 * drive, state, constants._replace(real=lambda_bar)]
    torch.manual_seed(1)  # the same weights of the sum for all
    _, exact = run_both(*arguments, form)
    narrow = Constants(*(None if t is None else t.detach().float() for t in arguments[2]))
    torch.manual_seed(1)
    weights = torch.randn(2, 400, 40)
    errors = []
    for run in (adpt_scan, reference.adpt_scan):
        leaves = {"drive": arguments[0].detach().float(), "state": arguments[1].detach().float()}
        leaves |= {"real": narrow.real, "weight": narrow.weight}
        for leaf in leaves.values():
            leaf.requires_grad_()
        states = run(leaves["drive"], leaves["state"], narrow, form)
        found = torch.autograd.grad((states * weights.float()).sum(), list(leaves.values()))
        errors.append({name: (g - exact[name]).abs().max().item() for name, g in zip(leaves, found, strict=True)})
    for name, error in errors[0].items():
        assert error <= 2 * errors[1][name], name


@pytest.mark.parametrize("axes", legal, ids=name_of)
def test_every_legal_layer_agrees_with_the_reference(axes, monkeypatch):
    layer = build(axes)
    x = torch.randn(3, 9, layer.width)
    weights = torch.randn(3, 9, layer.width)
    lengths, reset = torch.tensor([9, 2, 5]), torch.rand(3, 9) < 0.2
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def run(adjoint):
        y, final = layer(x, lengths=lengths, reset=reset, adjoint=adjoint)
        total = (y * weights).sum() + final.state.sin().sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        return y.detach(), final.state.detach(), *gradients

    found = [run(None), run(adjoints.Checkpointed())]
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    expected = run(None)
    for each in found:
        for a, b in zip(each, expected, strict=True):
            assert_close(a, b, atol=1e-10 * max(1.0, float(b.abs().max())), rtol=0)


def has_scan_kernel(axes) -> bool:
    layer = build(axes)
    return getattr(layer.cell, "scan", None) is not None and (
        layer.cell.scan(
            layer.cell.prepare(torch.randn(1, 2, layer.width), torch.arange(2)[None]), torch.zeros(1, layer.state_size)
        )
        is not None
    )


def test_most_legal_layers_have_a_kernel():
    left = [axes for axes in legal if not has_scan_kernel(axes)]
    for axes in left:
        direction, conjugate = axes.get("direction"), axes.get("conjugate", conjugates.Exact())
        reasons = [
            isinstance(conjugate, conjugates.Stateful),
            isinstance(direction, directions.FromWholeState) and isinstance(conjugate, conjugates.Taylor),
            direction is not None and direction.layer_norm and direction.heads > 1,
            direction is not None and direction.layer_norm and axes.get("start", False),
            axes.get("phase") is not None and axes.get("start", False),
        ]
        assert any(reasons), axes
    assert len(left) <= 10


def test_choose_scan_predicts_whether_a_kernel_runs(monkeypatch):
    chosen = [choose_scan(build(axes).cell, "cpu") for axes in legal]
    assert [backend.is_kernel for backend in chosen] == [has_scan_kernel(axes) for axes in legal]
    assert all(backend.reason.endswith(".") for backend in chosen)
    cell, answers = build(legal[0]).cell, []
    name, parameter = next(iter(cell.named_parameters()))
    monkeypatch.setattr(
        type(cell), "forward", lambda self: answers.append(choose_scan(self, "cpu").is_kernel), raising=False
    )
    torch.func.functional_call(cell, {name: parameter}, ())
    torch.func.vmap(lambda p: torch.func.functional_call(cell, {name: p}, ()), out_dims=None)(parameter[None])
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    cell()
    assert answers == [True, False, False]


@pytest.mark.parametrize("norm", [None, 1e-5], ids=["no norm", "norm"])
@pytest.mark.parametrize("planes", [1, 2])
def test_a_zero_state_is_not_rotated(norm, planes):
    for source in Source:
        drive, state, constants, form = make_problem(
            2, 4, 5, source=source, spike_threshold=0.5, beta=4.0, norm_epsilon=norm, planes=planes
        )
        assert_agree(0 * drive, 0 * state, constants, form)
        found, _ = run_both((0 * drive).detach(), (0 * state).detach(), constants, form)
        assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("distance", [0.0, 1e-9, 1e-4, 1e-2])
@pytest.mark.parametrize("beta", [0.125, 4.0, 1000.0])
@pytest.mark.parametrize("planes", [1, 2])
def test_parallel_keys_and_values_have_the_correct_gradient(sign, distance, beta, planes):
    drive, state, constants, form = make_problem(3, 1, 13, planes=planes)
    key = constants.weight[:, 0]
    parallel = torch.stack((key, sign * key + distance * torch.randn_like(key)), 1)
    weight = torch.cat((parallel, constants.weight[:, 2:]), 1)
    constants = constants._replace(weight=weight, beta=torch.tensor([beta]))
    assert_agree(drive, state, constants, form, tolerance=1e-10 * (1 + beta) ** 2 if distance else 1e-9 * (1 + beta))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("options", [{}, {"norm_epsilon": 1e-5}, {"planes": 2}], ids=["plain", "norm", "two planes"])
def test_no_nan_at_any_beta(beta, options, dtype):
    # Eight steps: gradients grow by a factor of hundreds per step here, and float32 overflows at 1e38.
    drive, state, constants, form = make_problem(4, 8, 6, dtype=dtype, **options)
    found, _ = run_both(drive, state, constants._replace(beta=torch.tensor([beta], dtype=dtype)), form)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("beta", [0.0, 1000.0])
@pytest.mark.parametrize("size", [3, 13, 50])
def test_a_norm_at_extreme_betas(size, beta):
    drive, state, constants, form = make_problem(
        5, 1, size, norm_epsilon=1e-5, bias=True, slow_memory=True, source=Source.RELU
    )
    constants = constants._replace(beta=torch.tensor([beta]))
    assert_agree(drive, state, constants, form, tolerance=1e-10 * (1 + beta))


@pytest.mark.parametrize("scale", [0.0, 1e-307, 1e-200, 1e-30, 1e30, 1e200])
def test_a_norm_of_projections_of_any_length(scale):
    drive, state, constants, form = make_problem(3, 4, 13, norm_epsilon=1e-5, beta=2.0)
    constants = constants._replace(weight=scale * constants.weight)
    found, expected = run_both(drive, state, constants, form)
    for name, value in expected.items():
        value, given = (v * scale if name == "weight" else v for v in (value, found[name]))
        assert_close(given, value, atol=1e-10 * max(1.0, float(value.abs().max())), rtol=0)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-30, 1e30, 1e150])
@pytest.mark.parametrize("planes", [1, 2])
def test_the_size_of_the_state_does_not_matter(scale, planes):
    drive, state, constants, form = make_problem(3, 5, 13, beta=2.0, planes=planes)
    plain = adpt_scan(drive, state, constants, form)
    assert_close(adpt_scan(scale * drive, scale * state, constants, form) / scale, plain, atol=1e-12, rtol=1e-10)


def test_nan_is_not_hidden():
    for source in (Source.STATE, Source.RELU):
        drive, state, constants, form = make_problem(2, 4, 5, source=source)
        drive[0, 1, 2] = torch.nan
        states = adpt_scan(drive, state, constants, form)
        assert states[0, 1:].isnan().any(-1).all()
        assert states[1].isfinite().all()


def test_zero_does_not_hide_nan():
    drive, state, constants, form = make_problem(3, 1, 5, directions_in_drive=True)
    drive[1, 0, 5:10], drive[1, 0, 10:] = 0.0, torch.nan  # a zero key, and a value of NaN
    for run in (adpt_scan, reference.adpt_scan):
        assert run(drive, state, constants, form).isfinite().all(-1).flatten().tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("state_size", "weight_size", "gradient_size"),
    [(1, 1e6, 1e-30), (1e-4, 1e10, 1e-30), (1e4, 1e-13, 1e18), (1e-9, 1, 1), (1e9, 1, 1), (1e6, 1e-6, 1e-20)],
)
def test_rows_of_any_size_in_single_precision(state_size, weight_size, gradient_size):
    drive, state, constants, form = make_problem(5, 1, 6, dtype=torch.float32)
    constants = constants._replace(weight=constants.weight * weight_size)
    leaves = [t.requires_grad_() for t in (state * state_size, constants.real, constants.weight, constants.beta)]
    upstream = gradient_size * torch.randn(5, 1, 6, dtype=torch.float32)
    found, required = (
        torch.autograd.grad(run(drive * state_size, leaves[0], constants, form), leaves, upstream)
        for run in (adpt_scan, reference.adpt_scan)
    )
    for one, other in zip(found, required, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("beta", [(0.1, 5.0, 0.2, 60.0, 0.0, 2.1, 1.9, 30.0, 0.3), (3.0,) * 9])
def test_rows_with_small_and_large_angles_side_by_side(beta):
    drive, state, constants, form = make_problem(9, 7, 6, beta_in_drive=True)
    drive[..., -1] = torch.tensor(beta).unsqueeze(-1)
    assert_agree(drive, state, constants, form, tolerance=1e-9)  # an angle of 60 costs a digit


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "variant", ["exponential", "bias", "heads", "directions in drive, heads", "slow memory", "norm"]
)
def test_a_gradient_does_not_depend_on_which_others_are_required(variant, batch, lean):
    drive, state, constants, form = make_problem(batch, 70, 12, **VARIANTS[variant])
    leaves = [t for t in (drive, state, *constants) if t is not None]
    upstream = torch.randn(batch, 70, state.shape[-1])

    def derived(required):
        for leaf in leaves:
            leaf.requires_grad_(any(leaf is t for t in required))
        return torch.autograd.grad(adpt_scan(drive, state, constants, form, lean=lean), required, upstream)

    for leaf, together in zip(leaves, derived(leaves), strict=True):
        assert torch.equal(*derived([leaf]), together)


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize(
    ("squared", "digits"), [(0.1249, 3), (0.1251, 3), (0.999, 16), (1.001, 16), (3.99, 16), (4.01, 16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_branch_of_the_coefficients_has_full_precision(dtype, squared, digits, batch):
    size = 8  # V is a rotation by 90 degrees, so that the squared angle is beta squared
    quarter = torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]])] * (size // 2))
    weight = torch.stack((torch.eye(size), quarter)).unsqueeze(0)
    numbers = [torch.randn(batch, size), torch.rand(size), torch.tensor([squared]).sqrt()]
    upstream = torch.randn(batch, 1, size)

    def derived(run, as_type):
        state, real, beta = (t.to(dtype).to(as_type).requires_grad_() for t in numbers)
        constants = Constants(real, weight=weight.to(as_type), beta=beta)
        states = run(torch.zeros(batch, 1, size, dtype=as_type), state, constants, Form())
        return states, *torch.autograd.grad(states, (state, real), upstream.to(as_type))

    for found, exact in zip(derived(adpt_scan, dtype), derived(reference.adpt_scan, torch.float64), strict=True):
        assert (found.double() - exact).abs().max() <= digits * torch.finfo(dtype).eps * exact.abs().max()


def test_a_beta_in_the_drive_overrides_the_constant():
    drive, state, constants, form = make_problem(3, 5, 6, beta_in_drive=True)
    assert_agree(drive, state, constants._replace(beta=torch.ones(1)), form)


def test_a_beta_in_the_drive_needs_one_head():
    with pytest.raises(InputError, match="one head"):
        adpt_scan(*make_problem(2, 3, 8, heads=2, beta_in_drive=True))


@pytest.mark.parametrize(("batch", "steps"), [(0, 3), (3, 0), (0, 0)])
def test_empty_batches_and_sequences(batch, steps):
    assert_agree(*make_problem(batch, steps, 5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"drive": torch.zeros(4, 6, 9)},
        {"state": torch.zeros(4, 8, dtype=torch.float32)},
        {"lengths": torch.ones(4, dtype=torch.int32)},
        {"reset": torch.zeros(4, 5, dtype=torch.bool)},
        {"weight": torch.zeros(1, 2, 8, 7)},
        {"beta": None},
        {"imag": torch.zeros(7)},
        {"feed_real": torch.zeros(8)},
        {"feed_imag": torch.zeros(8)},
        {"charge": torch.zeros(8)},
        {"norm_weight": torch.zeros(2, 7)},
        {"norm_bias": torch.zeros(2, 7), "norm_weight": torch.zeros(2, 8)},
        {"state": torch.zeros(4, 8, device="meta")},
        {"reset": torch.zeros(4, 6, dtype=torch.bool, device="meta")},
        {"drive": torch.zeros(4, 8)},
        {"real": torch.tensor(0.5)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_inconsistent_arguments_raise(wrong):
    drive, state, constants, form = make_problem(4, 6, 8)
    named = {"drive": drive, "state": state, "reset": None, "lengths": None, **constants._asdict(), **wrong}
    adpt_scan(drive, state, constants, form)  # a valid call is cached, which must not let an invalid one pass
    constants = Constants(*(named[name] for name in Constants._fields))
    with pytest.raises(InputError, match=next(iter(wrong))):
        adpt_scan(named["drive"], named["state"], constants, form, reset=named["reset"], lengths=named["lengths"])


@pytest.mark.parametrize("how", ["create_graph", "is_grads_batched", "default device"])
def test_inputs_that_depend_on_each_other_are_differentiated_once(how, monkeypatch):
    given, _, constants, form = make_problem(2, 3, 4)
    given.requires_grad_()
    upstream = torch.ones(2, 3, 4)

    def run(scan, upstream=upstream, **options):
        made = given * 1
        return torch.autograd.grad(scan(made, made.mean(1), constants, form), given, upstream, **options)[0]

    expected = run(reference.adpt_scan)
    if how == "create_graph":
        found = run(adpt_scan, create_graph=True)
    elif how == "is_grads_batched":
        found = run(adpt_scan, upstream[None], is_grads_batched=True)[0]
    else:  # under a mode the custom operation runs
        monkeypatch.setenv("ADPTNET_BACKEND", "reference")
        with torch.device("cpu"):
            found = run(adpt_scan)
    assert_close(found, expected)


@pytest.mark.parametrize(
    "unpack", [lambda t: t.to("meta"), lambda t: t.flatten()[:1], torch.Tensor.half], ids=["device", "shape", "type"]
)
def test_saved_tensors_that_changed_raise(unpack):
    drive, *others = make_problem(2, 3, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        states = adpt_scan(drive.requires_grad_(), *others)
    with pytest.raises(InputError, match="hooks"):
        states.sum().backward()


def test_tensors_without_memory_raise():
    drive, state, constants, form = make_problem(2, 3, 4)
    states = adpt_scan(drive.requires_grad_(), state, constants, form)
    with pytest.raises(InputError, match="no memory"):
        adpt_scan(torch._efficientzerotensor(2, 3, 4), state, constants, form)
    with pytest.raises(InputError, match="no memory"):
        torch.autograd.grad(states, drive, torch._efficientzerotensor(2, 3, 4))


def test_equal_forms_of_other_types_give_the_same_result():
    drive, state, constants, form = make_problem(2, 3, 4)
    with torch.no_grad():
        expected = adpt_scan(drive, state, constants, form)
    cpu._plans.clear()
    for heads in (True, 1.0, 1):
        found = adpt_scan(drive, state, constants, form._replace(heads=heads))
        assert_close(found.detach(), expected, atol=0, rtol=0)


def test_more_call_signatures_than_the_cache_holds():
    calls = [make_problem(1, steps, 3) for steps in range(1, cpu.MAX_PLANS + 2)]
    expected = [adpt_scan(*call) for call in calls]
    assert len(cpu._plans) <= cpu.MAX_PLANS
    assert_close([adpt_scan(*call) for call in calls], expected, atol=0, rtol=0)


def test_an_imaginary_feed_needs_complex_pairs():
    drive, state, constants, form = make_problem(4, 6, 8, slow_memory=True)
    with pytest.raises(InputError, match="feed_imag"):
        adpt_scan(drive, state, constants._replace(feed_imag=torch.ones(8)), form)


@pytest.mark.parametrize(
    "wrong", [{"heads": 0}, {"retraction": 9}, {"source": -1}, {"dot": 2.0}], ids=lambda wrong: next(iter(wrong))
)
def test_an_invalid_form_raises(wrong):
    drive, state, constants, form = make_problem(4, 6, 8)
    with pytest.raises(InputError, match=next(iter(wrong))):
        adpt_scan(drive, state, constants, form._replace(**wrong))


@pytest.mark.parametrize("missing", ["left", "right", "outer", "inner"])
def test_factors_come_in_pairs(missing):
    factors, weight = make_factors(8, 1, 2, (2, 4))
    drive, state, constants, form = make_problem(4, 6, 8)
    with pytest.raises(InputError, match=missing):
        adpt_scan(drive, state, constants._replace(weight=weight), form, factors=factors._replace(**{missing: None}))


@pytest.mark.parametrize("side", [3, 9])
def test_kronecker_factors_make_the_matrix(side):
    factors = Factors(outer=torch.ones(1, 2, side, side), inner=torch.ones(1, 2, 8 // side, 8 // side))
    with pytest.raises(InputError, match="outer"):
        adpt_scan(*make_problem(4, 6, 8), factors=factors)


def test_non_contiguous_inputs():
    drive, state, constants, form = make_problem(4, 6, 8)
    transposed = drive.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(
        adpt_scan(transposed, state, constants, form), adpt_scan(drive, state, constants, form), atol=0, rtol=0
    )


def test_inputs_that_are_views_of_others():
    drive, state, constants, form = make_problem(4, 6, 8, pairs=True)
    views = constants._replace(
        real=constants.real.repeat_interleave(2)[::2],
        imag=torch.imag(torch.complex(constants.real, -constants.imag).conj()),  # lazily negated
        weight=constants.weight.mT.contiguous().mT,
    )
    assert_agree(drive[:1].expand(4, 6, 8), state.T.contiguous().T, views, form)


@pytest.mark.parametrize("first", ["auto", "reference"])
def test_another_backend_between_forward_and_backward(first, monkeypatch):
    drive, state, constants, form = make_problem(3, 5, 8)
    drive.requires_grad_()
    required = torch.autograd.grad(reference.adpt_scan(drive, state, constants, form).square().sum(), drive)[0]
    monkeypatch.setenv("ADPTNET_BACKEND", first)
    states = adpt_scan(drive, state, constants, form)
    monkeypatch.setenv("ADPTNET_BACKEND", {"auto": "reference", "reference": "auto"}[first])
    assert_close(torch.autograd.grad(states.square().sum(), drive)[0], required, atol=1e-10, rtol=1e-10)


def test_in_place_changes_are_detected_and_saved_tensor_hooks_apply():
    drive, state, constants, form = make_problem(3, 5, 8)
    drive.requires_grad_()
    plain = torch.autograd.grad(adpt_scan(drive, state, constants, form).sum(), drive)[0]
    for unpack in (
        torch.clone,
        lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    ):  # the same values, with other strides
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
            packed = adpt_scan(drive, state, constants, form)
        assert torch.equal(torch.autograd.grad(packed.sum(), drive)[0], plain)
    states = adpt_scan(drive, state, constants, form)
    constants.real.mul_(0.5)
    with pytest.raises(RuntimeError, match="inplace"):
        states.sum().backward()


def test_a_second_backward_gives_the_same():
    drive, state, constants, form = make_problem(4, 6, 8)
    drive.requires_grad_()
    states = adpt_scan(drive, state, constants, form)
    first, second = (torch.autograd.grad(states.square().sum(), drive, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_double_backward_runs_the_reference():
    drive, state, constants, form = make_problem(1, 3, 3)
    leaves = [t.requires_grad_() for t in (drive, state, constants.real, constants.weight, constants.beta)]

    def run(drive, state, real, weight, beta):
        return adpt_scan(drive, state, Constants(real, weight=weight, beta=beta), form)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_forward_mode_and_transforms_run_the_reference():
    layer = ADPTNet.paper(4, beta=1.0)
    x, tangent = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    _, pushed = torch.func.jvp(lambda x: layer(x)[0], (x,), (tangent,))
    difference = (layer(x + 1e-6 * tangent)[0] - layer(x - 1e-6 * tangent)[0]) / 2e-6
    assert_close(pushed, difference, atol=1e-7, rtol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        shown = torch.autograd.forward_ad.unpack_dual(layer(dual)[0]).tangent
    assert_close(shown, pushed)


def test_the_operation_supports_forward_mode_and_batched_gradients():
    drive, state, constants, form = make_problem(2, 3, 4)
    tangent = torch.randn_like(drive)

    def by(run):
        return lambda drive: run(drive, state, constants, form)

    fast, slow = (torch.func.jvp(by(run), (drive,), (tangent,))[1] for run in (adpt_scan, reference.adpt_scan))
    assert_close(fast, slow, atol=1e-12, rtol=0)
    fast, slow = (
        torch.autograd.functional.jacobian(by(run), drive, vectorize=True) for run in (adpt_scan, reference.adpt_scan)
    )
    assert_close(fast, slow, atol=1e-12, rtol=0)
    assert_close(torch.func.jacrev(by(adpt_scan))(drive), slow, atol=1e-12, rtol=0)


def test_a_replaced_step_is_the_one_that_runs():
    layer = ADPTNet.paper(4, beta=1.0)
    layer.cell.stepper = lambda: lambda state, drive: 0.5 * state + drive
    x = torch.randn(2, 1, 4)
    assert_close(layer(x)[0], layer.cell.prepare(x, torch.zeros(2, 1, dtype=torch.int64)))
    assert "stepper()" in layer.cell.choose_scan("cpu").reason


def test_a_fallback_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(_backends, "_logged", set())
    layer = ADPTNet.paper(4, beta=1.0, direction=directions.FromState(heads=2, layer_norm=True))
    for _ in range(3):
        layer(torch.randn(2, 3, 4))
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "LayerNorm" in caplog.text


@pytest.mark.parametrize(
    ("size", "heads", "rank", "factors"),
    [
        (12, 1, 5, (4, 3)),
        (13, 1, 1, (13, 1)),
        (50, 1, 0, (10, 5)),
        (33, 1, 7, None),
        (96, 1, 17, (3, 32)),
        (14, 2, 2, (2, 7)),
        (22, 3, 4, (2, 11)),
    ],
)
@pytest.mark.parametrize("source", [Source.STATE, Source.RELU])
@pytest.mark.parametrize("lean", [False, True])
def test_products_with_factors_equal_those_with_dense_matrices(size, heads, rank, factors, source, lean):
    for batch in (1, 7):
        drive, state, constants, form = make_problem(batch, 5, size * heads, heads=heads, bias=True, source=source)
        parts, weight = make_factors(size, heads, rank, factors)
        assert_agree(drive, state, constants._replace(weight=weight), form, factors=parts, lean=lean)


@pytest.mark.parametrize(
    "projection",
    [projections.LowParam((8, 8), 2), projections.LowRank(8, bias=True), projections.Kronecker((16, 4))],
    ids=repr,
)
def test_a_layer_multiplies_by_its_factors(projection, monkeypatch):
    layer = ADPTNet.paper(64, beta=1.0, projection=projection, direction=directions.FromState(relu=True))
    used = stack_factors(layer.cell.directions, layer.cell.recurrence.form, torch.float64)
    assert any(part is not None for part in used)
    x, parameters = torch.randn(3, 7, 64), list(layer.cell.directions.parameters())
    found = [*torch.autograd.grad(layer(x)[0].square().sum(), parameters)]
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    expected = torch.autograd.grad(layer(x)[0].square().sum(), parameters)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_factors_that_save_little_become_dense():
    layer = ADPTNet.paper(6, beta=1.0, projection=projections.LowParam((2, 3), 2))
    assert stack_factors(layer.cell.directions, layer.cell.recurrence.form, torch.float64) == Factors()
    assert has_scan_kernel({"width": 6, "projection": projections.LowRank(2)})
    assert solvers.Sequential()(layer.cell, torch.randn(2, 3, 6)).states.requires_grad


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_are_deterministic_for_a_given_number_of_threads(threads):
    drive, state, constants, form = make_problem(37, 40, 24)
    for leaf in (drive, constants.weight):
        leaf.requires_grad_()
    runs = []
    with use_threads(threads):
        for _ in range(3):
            states = adpt_scan(drive, state, constants, form)
            runs.append((states, *torch.autograd.grad(states.square().sum(), (drive, constants.weight))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    assert_agree(drive.detach(), state, constants, form)


def test_two_python_threads_at_once():
    torch.manual_seed(3)
    problems = [make_problem(9, 60, size) for size in (24, 31)]
    expected = [adpt_scan(*p) for p in problems]
    wrong = []

    def repeat(index):
        for _ in range(20):
            if not torch.equal(adpt_scan(*problems[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=repeat, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def run_in_child(queue, arguments):
    torch.set_num_threads(2)
    queue.put(adpt_scan(*arguments).sum().item())


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_another_process(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    arguments = make_problem(4, 5, 8)
    expected = adpt_scan(*arguments).sum().item()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=run_in_child, args=(queue, arguments))
    child.start()
    assert queue.get(timeout=100) == pytest.approx(expected, abs=1e-9)
    child.join()


class LayerDataset(torch.utils.data.Dataset):
    """A dataset whose items are outputs of a layer."""

    def __init__(self):
        self.layer = ADPTNet.paper(5, beta=1.0)

    def __len__(self):
        return 4

    @torch.no_grad()
    def __getitem__(self, index):
        return self.layer(torch.full((3, 5), float(index)))[0]


def test_in_the_worker_of_a_loader():
    data = LayerDataset()
    loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork")
    for index, item in enumerate(loader):
        assert_close(item[0], data[index])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_compiled_and_exported_it_is_one_operation():
    drive, state, constants, form = make_problem(2, 5, 6)

    def run(drive, state, weight):
        return adpt_scan(drive, state, constants._replace(weight=weight), form) * 2

    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    leaves = [t.requires_grad_() for t in (drive, state, constants.weight)]
    found = torch.compile(run, backend=backend, fullgraph=True)(*leaves)
    assert_close(found, run(*leaves))
    nodes = [node for node in graphs[0].graph.nodes if "adpt_scan" in str(node.target)]
    assert len(nodes) == 1
    for a, b in zip(
        torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(*leaves).sum(), leaves),
        torch.autograd.grad(run(*leaves).sum(), leaves),
        strict=True,
    ):
        assert_close(a, b)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = ADPTNet.paper(6, beta=1.0)

    def forward(self, x):
        return self.layer(x)[0]


def test_a_layer_is_exported_with_one_operation():
    model, x = Model(), torch.randn(2, 5, 6)
    program = torch.export.export(model, (x,))
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    assert sum("adpt_scan" in str(node.target) for graph in graphs for node in graph.nodes) == 1
    assert_close(program.module()(x), model(x))


COMPILED = """
import torch, adptnet
layer, x = adptnet.ADPTNet.paper(6, beta=1.0, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
graphs = []
run = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
torch.testing.assert_close(run(x), layer(x)[0])
nodes = [node for part in graphs[0].modules() for node in part.graph.nodes if "adpt_scan" in str(node.target)]
again = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend="aot_eager")
parameters = [*layer.parameters()]
gradients = torch.autograd.grad(again(x).sum(), parameters)
torch.testing.assert_close(gradients, torch.autograd.grad(layer(x)[0].sum(), parameters))
norm_of_heads = adptnet.directions.FromState(heads=2, layer_norm=True)  # no kernel
other = adptnet.ADPTNet.paper(6, beta=1.0, direction=norm_of_heads, dtype=torch.float64)
torch.testing.assert_close(torch.compile(lambda x: other(x)[0], fullgraph=True, backend="eager")(x), other(x)[0])
print(len(nodes))
"""


def test_a_layer_is_compiled_with_one_operation():
    assert (
        run_python(COMPILED)[0] == "1"
    )  # in a subprocess, because the compiler cannot trace through the shape checks of these tests


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_form_survives_encoding(variant):
    form = make_problem(1, 1, 6, **variant)[3]
    assert decode_form(encode_form(form)) == form


def test_the_operation_passes_opcheck():
    drive, state, constants, form = make_problem(2, 3, 4)
    leaves = [None if t is None else t.requires_grad_() for t in (drive, state, *constants)]
    torch.library.opcheck(
        torch.ops.adptnet.adpt_scan.default,
        (*leaves, None, None, *Factors(), encode_form(form), True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


class RecordOperations(TorchDispatchMode):
    """Record the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("lean", [False, True])
def test_a_dispatch_mode_sees_the_operation_and_changes_no_result(lean):
    drive, state, constants, form = make_problem(2, 5, 4)
    leaves = [t.requires_grad_() for t in (drive, state, *constants) if t is not None]

    def training():
        states = adpt_scan(drive, state, constants, form, lean=lean)
        return [states, *torch.autograd.grad(states.square().sum(), leaves)]

    alone = training()
    with RecordOperations() as seen:
        watched = training()
    assert {"adptnet.adpt_scan.default", "adptnet.adpt_scan_backward.default"} <= seen.names
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_fake_tensors_run_the_operation():
    with FakeTensorMode() as mode:
        drive, state, constants, form = make_problem(2, 5, 4)
    with mode:
        inside = adpt_scan(drive, state, constants, form)
    outside = adpt_scan(drive, state, constants, form)  # a tensor subclass, without an active mode
    assert inside.shape == outside.shape == (2, 5, 4)
    assert type(outside) is type(drive)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("batch", [24, 25, 65, 131])
def test_batches_of_several_tiles(batch, heads):
    assert_agree(*make_problem(batch, 3, 6, heads=heads))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [6, 512])
def test_threads_have_about_equally_many_sequences(threads, size):
    for batch in range(200):
        for heads in (1, 3):
            tile = cpu._choose_tile(batch, heads, size, threads)
            rows = [min(tile, batch - begin) for begin in range(0, batch, tile)]
            assert 1 <= tile <= max(1, min(64, batch))
            busiest = max(sum(rows[thread::threads]) for thread in range(threads))
            assert heads > 1 or busiest <= max(tile, 1.1 * batch / threads + 3)


@pytest.mark.parametrize("steps", [5, 3000])  # in memory of torch, and in pooled memory
@pytest.mark.parametrize("grad", [False, True])
def test_the_default_device_has_no_effect(steps, grad):
    layer, x = ADPTNet.paper(8, beta=1.0), torch.randn(2, steps, 8)
    expected = layer(x)[0]
    with torch.set_grad_enabled(grad), torch.device("meta"):
        found = layer(x)[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_traced_graph_holds_the_operation(pre_dispatch):
    layer = ADPTNet.paper(8, beta=1.0).requires_grad_(False)
    x, other = torch.randn(2, 2, 20, 8)  # longer than a short call, which rounds differently
    graph = make_fx(lambda x: layer(x)[0], pre_dispatch=pre_dispatch)(x)
    assert any(node.target is torch.ops.adptnet.adpt_scan.default for node in graph.graph.nodes)
    assert torch.equal(graph(other), layer(other)[0])


def test_inside_a_transform_that_maps_other_tensors():
    layer, x = ADPTNet.paper(8, beta=1.0), torch.randn(2, 5, 8)
    heads, resets = torch.randn(3, 8, 4), torch.rand(3, 2, 5) < 0.5
    assert_close(torch.vmap(lambda head: layer(x)[0] @ head)(heads), torch.stack([layer(x)[0] @ h for h in heads]))
    with torch.no_grad():
        found = torch.vmap(lambda reset: layer(x, reset=reset)[0])(resets)
    assert_close(found, torch.stack([layer(x, reset=reset)[0] for reset in resets]))


def test_lazily_negated_inputs():
    drive, state, constants, form = make_problem(3, 5, 8)
    lazy = torch._neg_view(drive)
    assert lazy.is_neg()
    assert torch.equal(adpt_scan(lazy, state, constants, form), adpt_scan(lazy.resolve_neg(), state, constants, form))


@pytest.mark.parametrize("steps", [16, 4096])
def test_outputs_may_be_changed_in_place_at_any_length(steps):
    layer, x = ADPTNet.paper(8, beta=1.0), torch.randn(16, steps, 8)
    expected = layer(x)[0] + 1
    found = layer(x)[0]
    found += 1
    assert torch.equal(found, expected)
