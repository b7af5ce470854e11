"""Compare every GPU kernel with its reference on the device: values and all gradients, at odd sizes.

The exact result is that of the eager reference in float64 on the CPU. A kernel passes if its error is at most
`MARGIN` times that of the reference in float32, the largest of several random problems.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adptnet.nn import ADPTNet
from adptnet.ops import adpt_scan, adpt_step
from adptnet.ops.adpt_scan import Constants, Form, RetractionKind, Source
from adptnet.ops.adpt_scan import reference as scan_reference
from adptnet.ops.adpt_scan.packing import unpack
from adptnet.ops.adpt_step import reference as pass_reference
from adptnet.ops.linear_scan import linear_scan
from adptnet.ops.linear_scan import reference as linear_reference
from adptnet.ops.tolerance import Tolerance
from adptnet.recurrence.step import conjugate, step

__all__ = ["MARGIN", "Check", "Sizes", "check_kernels"]

MARGIN = 8.0
PROBLEMS = 3  # random problems of the float32 reference, of which the largest error is allowed
Tensors = dict[str, Tensor]

FORMS: dict[str, tuple[Form, dict[str, bool]]] = {
    "plain": (Form(), {}),
    "Cayley, bias": (Form(retraction=int(RetractionKind.CAYLEY)), {"bias": True}),
    "complex, heads": (Form(heads=2), {"pairs": True}),
    "ReLU": (Form(source=int(Source.RELU)), {"pairs": True}),
    "spikes, LayerNorm, slow memory": (
        Form(source=int(Source.SPIKES), spike_threshold=0.1, norm_epsilon=1e-5),
        {"bias": True, "slow": True},
    ),
    "Taylor": (Form(retraction=int(RetractionKind.TAYLOR_TWO)), {"small": True}),
    "fixed dot product": (Form(dot=0.4), {}),
    "directions and beta in the drive": (Form(directions_in_drive=True, beta_in_drive=True), {}),
    "rotation-aware": (Form(rotation_aware=True), {}),
    "phase": (Form(phased=True), {}),
    "diagonal": (Form(linear=True), {"pairs": True}),
}


class Sizes(NamedTuple):
    """Shapes to check at: (batch, steps, state dimension of a head)."""

    scans: Sequence[tuple[int, int, int]] = ((1, 1, 2), (17, 33, 34), (3, 70, 66), (2, 5, 130))
    passes: Sequence[tuple[int, int, int]] = ((1, 1, 2), (3, 130, 34), (2, 65, 130), (1, 20, 300))


SIZES = Sizes()


class Check(NamedTuple):
    """The comparison of one kernel at one size: the quantity with the largest error relative to what is allowed."""

    kernel: str
    what: str
    size: tuple[int, int, int]
    quantity: str
    error: float  # relative to the largest element
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is allowed; False for NaN."""
        return self.error <= self.allowed


def check_kernels(device: torch.device, sizes: Sizes = SIZES) -> Iterator[Check]:
    """Run every check.

    Args:
        device: The device of the kernels.
        sizes: The sizes to check at.
    """
    for size in sizes.scans:
        for what, (form, options) in FORMS.items():
            yield _check_scan(device, what, form, size, **options)
        for what in ("constant", "varying", "complex"):
            yield _check_linear_scan(device, what, size)
        yield _check_bfloat16(device, size)
    for size in sizes.passes:
        for diagonal in (False, True):
            yield _check_pass(device, size, diagonal)
        yield _check_transposed_jacobians(device, size)


def _check_scan(device: torch.device, what: str, form: Form, size: tuple[int, int, int], **options: bool) -> Check:
    batch, steps, head = size

    def make() -> Tensors:
        return _make_problem(batch, steps, head * form.heads, form, **options)

    def run(scan: Callable[..., Tensor], inputs: Tensors, reset: Tensor) -> Tensors:
        leaves = {name: value.requires_grad_(name != "beta" or not form.linear) for name, value in inputs.items()}
        constants = Constants(**{name: leaves[name] for name in leaves if name in Constants._fields})
        states = scan(leaves["drive"], leaves["state"], constants, form, reset=reset)
        return _differentiate(states, leaves)

    return _compare("adpt_scan", what, size, device, make, run, adpt_scan.adpt_scan, scan_reference.adpt_scan)


def _check_linear_scan(device: torch.device, what: str, size: tuple[int, int, int]) -> Check:
    batch, steps, n = size

    def make() -> Tensors:
        shape = (batch, steps, n) if what == "varying" else (n,)
        transition = 0.95 * torch.tanh(torch.randn(shape))
        made = {"transition": transition, "offset": torch.randn(batch, steps, n), "initial": torch.randn(batch, n)}
        return {name: torch.complex(v, 0.3 * v.roll(1, -1)) for name, v in made.items()} if what == "complex" else made

    def run(scan: Callable[..., Tensor], inputs: Tensors, reset: Tensor) -> Tensors:
        leaves = {name: value.requires_grad_() for name, value in inputs.items()}
        return _differentiate(scan(*leaves.values(), reset=reset), leaves)

    return _compare("linear_scan", what, size, device, make, run, linear_scan, linear_reference.linear_scan)


def _check_pass(device: torch.device, size: tuple[int, int, int], diagonal: bool) -> Check:
    limits, what = Tolerance(1e-3, 1e-2), "Forward-DEER" if diagonal else "Conv-DEER"

    def make() -> Tensors:
        problem = _make_problem(*size, Form())
        return {"states": torch.randn_like(problem["drive"]), **problem}

    def run(kernel: bool, inputs: Tensors, reset: Tensor) -> Tensors:
        states, drive, initial = (inputs[name] for name in ("states", "drive", "state"))
        constants = Constants(**{name: inputs[name] for name in inputs if name in Constants._fields})
        if kernel:
            found = adpt_step.DevicePass(constants, Form(), diagonal)(
                states, drive, initial, initial, reset, tolerance=limits
            )
        else:
            parameters = unpack(constants, Form())
            found = pass_reference.newton_pass(
                states.clone(), drive, initial, initial, reset,
                lambda s, u: step(parameters, s, u),
                lambda s, u: conjugate(parameters, s, u).diagonal() if diagonal else constants.real,
                constants.real, tolerance=limits,
            )  # fmt: skip
        return {name: values for name, values in found._asdict().items() if values is not None}

    return _compare("newton_pass", what, size, device, make, run, True, False)


def _check_transposed_jacobians(device: torch.device, size: tuple[int, int, int]) -> Check:
    def make() -> Tensors:
        problem = _make_problem(*size, Form())
        return {
            "entering": torch.randn_like(problem["drive"]),
            "gradient": torch.randn_like(problem["drive"]),
            **problem,
        }

    def run(kernel: bool, inputs: Tensors, reset: Tensor) -> Tensors:
        entering, drive, gradient = (inputs[name] for name in ("entering", "drive", "gradient"))
        constants = Constants(**{name: inputs[name] for name in inputs if name in Constants._fields})
        if kernel:
            return {"pulled": adpt_step.DevicePass(constants, Form(), False).pull_back(entering, drive, gradient)}
        entering.requires_grad_()
        following = step(unpack(constants, Form()), entering, drive)
        return {"pulled": torch.autograd.grad(following, entering, gradient)[0]}

    return _compare("transposed Jacobians", "plain", size, device, make, run, True, False)


def _check_bfloat16(device: torch.device, size: tuple[int, int, int]) -> Check:
    """Compare a layer in bfloat16 with the same layer in float64; the layer on the CPU is the reference."""
    batch, steps, n = size
    torch.manual_seed(0)
    layer = ADPTNet(n, dtype=torch.bfloat16)
    x = torch.randn(batch, steps, n, dtype=torch.bfloat16)

    def run(where: torch.device, dtype: torch.dtype) -> Tensors:
        copy = ADPTNet(n, dtype=dtype).to(where)
        copy.load_state_dict({name: value.to(where, dtype) for name, value in layer.state_dict().items()})
        inputs = x.to(where, dtype).requires_grad_()
        outputs, _ = copy(inputs)
        return _differentiate(outputs, {"x": inputs, **dict(copy.named_parameters())})

    exact, rounded = run(torch.device("cpu"), torch.float64), run(torch.device("cpu"), torch.bfloat16)
    found = run(device, torch.bfloat16)
    floor = torch.finfo(torch.bfloat16).eps / 2
    allowed = {name: max(floor, error) for name, error in _errors(rounded, exact).items()}
    return _worst("layer", "bfloat16", size, found, exact, allowed)


def _make_problem(
    batch: int,
    steps: int,
    n: int,
    form: Form,
    *,
    pairs: bool = False,
    bias: bool = False,
    slow: bool = False,
    small: bool = False,
) -> Tensors:
    """Return random arguments of `adpt_scan` in float64, by name."""
    head = n // form.heads
    real = 0.9 * torch.tanh(torch.randn(n))
    drive = 0.5 * torch.randn(batch, steps, n * (3 if form.directions_in_drive else 1) + form.beta_in_drive)
    if form.phased:
        angles = torch.randn(batch, steps, n // 2)
        drive = torch.cat((drive, torch.stack((angles.cos(), angles.sin()), -1).flatten(-2)), -1)
    if form.beta_in_drive:
        drive[..., -1].abs_()
    found = {"drive": drive, "state": torch.randn(batch, n * (2 if slow else 1)), "real": real}
    if pairs:
        found["real"] = 0.7 * real[::2].repeat_interleave(2)
        found["imag"] = 0.5 * torch.tanh(torch.randn(n // 2)).repeat_interleave(2)
    if not form.directions_in_drive:
        found["weight"] = torch.randn(form.heads, 2, head, head) / math.sqrt(head)
    if bias:
        found["bias"] = torch.randn(form.heads, 2, head)
    if not form.beta_in_drive:
        beta = 0.1 if small else 0.7
        found["beta"] = torch.zeros(form.heads) if form.linear else beta * (1 + torch.randn(form.heads).square())
    if slow:
        found |= {"feed_real": 0.1 * torch.randn(n), "decay": torch.rand(n), "charge": torch.rand(n)}
    if form.norm_epsilon is not None:
        found |= {"norm_weight": 1 + 0.3 * torch.randn(2, n), "norm_bias": 0.3 * torch.randn(2, n)}
    return found


def _differentiate(values: Tensor, leaves: Tensors) -> Tensors:
    """Return the values and the gradient of each leaf that needs one."""
    upstream = torch.linspace(-1, 1, values.numel(), dtype=torch.float64).cos().reshape(values.shape)
    needed = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(
        values, list(needed.values()), upstream.to(values), allow_unused=True, materialize_grads=True
    )
    return {"values": values.detach(), **dict(zip(needed, gradients, strict=True))}


def _compare(
    kernel: str,
    what: str,
    size: tuple[int, int, int],
    device: torch.device,
    make: Callable[[], Tensors],
    run: Callable[..., Tensors],
    fast: Any,
    slow: Any,
) -> Check:
    """Compare a kernel with its reference on the last of several random problems."""
    before, single = torch.get_default_dtype(), {torch.float64: torch.float32, torch.complex128: torch.complex64}
    torch.set_default_dtype(torch.float64)
    try:
        allowed: dict[str, float] = {}
        for seed in range(PROBLEMS):
            torch.manual_seed(seed)
            problem, reset = make(), torch.rand(size[:2]) < 0.1
            exact = run(slow, {name: value.clone() for name, value in problem.items()}, reset)
            rounded = run(slow, {name: value.to(single[value.dtype]) for name, value in problem.items()}, reset)
            for name, error in _errors(rounded, exact).items():
                allowed[name] = max(allowed.get(name, torch.finfo(torch.float32).eps / 2), error)
    finally:
        torch.set_default_dtype(before)
    given = {name: value.to(device, single[value.dtype], copy=True) for name, value in problem.items()}
    found = run(fast, given, reset.to(device))
    return _worst(kernel, what, size, found, exact, allowed)


def _errors(found: Tensors, exact: Tensors) -> dict[str, float]:
    """Return the largest error of each quantity, relative to its largest element."""
    errors = {}
    for name, value in exact.items():
        wide = found[name].detach().cpu().to(value.dtype)
        errors[name] = float((wide - value).abs().max() / value.abs().max().clamp(min=1e-30))
    return errors


def _worst(
    kernel: str,
    what: str,
    size: tuple[int, int, int],
    found: Tensors,
    exact: Tensors,
    allowed: dict[str, float],
) -> Check:
    """Return the check of the quantity that uses most of what is allowed."""
    errors = _errors(found, exact)
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name] / allowed[name])
    return Check(kernel, what, size, name, errors[name], MARGIN * allowed[name])
