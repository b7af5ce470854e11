"""Selection of GPU kernels, with faked GPU properties: neither a GPU nor Triton is needed."""

import collections
import logging
import sys
import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import adptnet
from adptnet import directions, solvers, spectra
from adptnet.cells import ADPTSpec, SlowMemory
from adptnet.cells import dispatch as cell_dispatch
from adptnet.ops import _backends, _gpu, adpt_scan
from adptnet.ops.adpt_scan import Constants, Form, RetractionKind, diagonal, dispatch, launch, reference
from adptnet.ops.adpt_scan.form import DEFAULT_FORM
from adptnet.ops.plane_rotation import rotation
from adptnet.recurrence.conjugates import Diagonal, Product, Taylor
from adptnet.recurrence.drive import InputPhase
from adptnet.recurrence.projections import Dense, LowParam
from support.kernels import SHARED_MEMORY_PER_BLOCK


class FakeGPU:
    def __init__(self, shared: int):
        self.shared_memory_per_block_optin = shared


@pytest.fixture
def with_gpu(monkeypatch):
    """Return a function that fakes Triton and a GPU with this much shared memory per block; no GPU for None."""
    monkeypatch.setenv("ADPTNET_BACKEND", "auto")
    monkeypatch.setattr(_gpu, "_has_triton", lambda: True)

    def fake(shared: int | None) -> None:
        _gpu._shared_memory.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: shared is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(shared is not None))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a fake GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeGPU(shared))
        major = 7 if shared == SHARED_MEMORY_PER_BLOCK["T4"] else 8
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (major, 0))

    yield fake
    _gpu._shared_memory.cache_clear()


@pytest.mark.parametrize("gpu", SHARED_MEMORY_PER_BLOCK)
def test_every_launch_fits_into_the_shared_memory_of_the_gpu(with_gpu, gpu):
    available = SHARED_MEMORY_PER_BLOCK[gpu]
    with_gpu(available)
    for size in (*range(1, 300), 512, 1000, 1024, 2000, 2048, 2049):
        found = launch.plan_launch(Form(), size, torch.device("cuda:0"))
        reason = launch.explain_unsupported(
            Form(), size, paired=False, slow=False, dtype=torch.float32, device="cuda:0"
        )
        assert (reason is None) == (found is not None) == (size <= 2048)
        if found is not None:
            assert size <= found.pad < max(17, 2 * size)  # the next power of two, at least 16
            assert found.kind == ("streamed" if size > 64 else "resident")
            needed = launch.STREAMED if found.kind == "streamed" else launch.RESIDENT[found.pad][found.precision]
            assert needed * 9 // 8 <= available


def test_the_size_of_a_head_and_not_of_the_state_decides(with_gpu):
    with_gpu(SHARED_MEMORY_PER_BLOCK["A100"])
    device = torch.device("cuda:0")
    assert launch.plan_launch(Form(heads=16), 1024, device).kind == "resident"
    assert launch.plan_launch(Form(heads=2), 4096, device).kind == "streamed"
    assert explain(4100, Form(heads=2)) == (
        "the Triton kernel supports heads of up to 2048 state dimensions; these are 2050."
    )
    given = launch.plan_launch(Form(directions_in_drive=True), 2048, device)
    assert (given.kind, given.rows) == ("given", 1)  # without K and V there is nothing to stream


@pytest.mark.parametrize(
    ("gpu", "setting", "precision"),
    [("A100", "highest", "tf32x3"), ("A100", "high", "tf32"), ("A100", "medium", "tf32"), ("T4", "high", "ieee")],
)
def test_products_have_the_precision_that_torch_is_set_to(with_gpu, gpu, setting, precision):
    with_gpu(SHARED_MEMORY_PER_BLOCK[gpu])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        assert launch.plan_launch(Form(), 64, torch.device("cuda:0")).precision == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_products_have_the_precision_that_the_backend_is_set_to(with_gpu):
    with_gpu(SHARED_MEMORY_PER_BLOCK["A100"])
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert launch.plan_launch(Form(), 64, torch.device("cuda:0")).precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_resident_heads_are_smaller_on_amd(with_gpu, monkeypatch):
    with_gpu(SHARED_MEMORY_PER_BLOCK["MI300X"])
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = [launch.plan_launch(Form(), size, torch.device("cuda:0")) for size in (32, 64)]
    assert [(plan.kind, plan.precision) for plan in found] == [("resident", "ieee"), ("streamed", "ieee")]


def test_a_gpu_without_an_opt_in_limit_reports_the_default_limit(with_gpu, monkeypatch):
    with_gpu(0)
    properties = types.SimpleNamespace(shared_memory_per_block=65536)  # as torch describes AMD GPUs
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert _gpu.shared_memory("cuda") == 65536
    assert _gpu.shared_memory("cuda:7") == _gpu.MIN_SHARED_MEMORY  # no such GPU


def explain(size: int = 8, form: Form = DEFAULT_FORM, **given) -> str | None:
    arguments = {"paired": False, "slow": False, "dtype": torch.float32, "device": "cuda:0", **given}
    return adpt_scan.explain_unsupported_gpu(form, size, **arguments)


def test_the_reason_for_a_fallback_is_one_line(with_gpu, monkeypatch):
    with_gpu(SHARED_MEMORY_PER_BLOCK["T4"])
    assert explain(2048) is None
    assert explain(paired=True, slow=True) is None
    assert explain(dtype=torch.float64) == "the Triton kernel supports float32, not torch.float64."
    assert explain(form=Form(dot=0.5, retraction=int(RetractionKind.TAYLOR_ONE))) is None
    assert explain(form=Form(retraction=9)) == "the Triton kernel does not support retraction=9."
    assert explain(form=Form(source=9)) == "the Triton kernel does not support source=9."
    reason = "the Triton kernel does not support a slow memory or a phase without a rotation."
    assert explain(form=Form(rotates=False), slow=True) == reason
    assert explain(form=Form(rotates=False, phased=True)) == reason
    assert explain(form=Form(linear=True, phased=True)) is None
    assert explain(device="mps") == "there is no kernel for mps."
    monkeypatch.setattr(_gpu, "_has_triton", lambda: False)
    assert "pip install 'adptnet[triton]'" in explain()
    assert explain(512, Form(linear=True)) is None  # a diagonal scan, which also exists in PyTorch
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    assert explain(512, Form(linear=True)) == "ADPTNET_BACKEND=reference."


def test_a_form_with_a_field_that_the_kernels_do_not_know_has_no_kernel(with_gpu, monkeypatch):
    """A new axis of the model runs the reference until the kernels, which would ignore it, support it."""
    with_gpu(SHARED_MEMORY_PER_BLOCK["T4"])
    fields = dict.fromkeys(Form._fields, object) | {"new": float}
    Wider = collections.namedtuple("Wider", fields, defaults=(*DEFAULT_FORM, 0.0))
    monkeypatch.setattr(launch, "DEFAULT_FORM", Wider())
    assert explain(form=Wider(new=0.0)) is None
    assert explain(form=Wider(new=2.0)) == "the Triton kernel does not support new=2.0."
    for form in (Wider(new=2.0, linear=True), Wider(new=2.0, rotates=False)):
        assert not diagonal.is_diagonal(form, slow=False)
        assert explain(form=form) is not None


def test_a_constant_that_the_kernels_do_not_know_is_an_error():
    fields = collections.namedtuple("Wider", (*Constants._fields, "new"))
    values = dict.fromkeys(fields._fields) | {"real": torch.ones(2)}
    assert launch.check_constants(fields(**values))[0] is values["real"]
    with pytest.raises(NotImplementedError, match="new"):
        launch.check_constants(fields(**values | {"new": torch.ones(2)}))


def test_the_operation_selects_a_kernel_or_logs_the_reason(with_gpu, monkeypatch, caplog):
    with_gpu(SHARED_MEMORY_PER_BLOCK["RTX 3090"])
    monkeypatch.setattr(_backends, "_logged", set())
    kernel = types.ModuleType("triton")
    monkeypatch.setitem(sys.modules, "adptnet.ops.adpt_scan.triton", kernel)
    monkeypatch.setattr(adpt_scan, "triton", kernel, raising=False)

    def chosen(size: int, form: Form = DEFAULT_FORM) -> object:
        with FakeTensorMode():
            drive = torch.empty(2, 3, size, dtype=torch.float32, device="cuda")
            return dispatch.select_gpu_kernel(drive, Constants(torch.empty(size)), form)

    assert chosen(128) is kernel
    assert chosen(512) is kernel
    assert chosen(1000, Form(linear=True)) is diagonal
    assert chosen(1000, Form(rotates=False)) is diagonal
    assert not caplog.messages
    with caplog.at_level(logging.WARNING, "adptnet"):
        for size in range(2049, 2052):
            assert chosen(size) is None
        chosen(2051)
    assert len(caplog.messages) == 3  # one for each state dimension, also for 2051, which was selected twice
    assert "\n" not in "".join(caplog.messages)


CELLS = {
    "plain": (ADPTSpec(64), True),
    "Cayley": (ADPTSpec(128, retraction=adptnet.retractions.Cayley()), True),
    "large": (ADPTSpec(512), True),
    "too large": (ADPTSpec(2052), False),
    "heads": (ADPTSpec(64, direction=directions.FromState(heads=2)), True),
    "complex": (ADPTSpec(64, spectrum=spectra.LRURing()), True),
    "ReLU": (ADPTSpec(64, direction=directions.FromState(relu=True)), True),
    "fixed dot product": (ADPTSpec(64, direction=directions.FromState(dot=0.5)), True),
    "from the input": (ADPTSpec(64, direction=directions.FromInput()), True),
    "Taylor": (ADPTSpec(64, conjugate=Taylor(1)), True),
    "slow memory": (ADPTSpec(64, memory=SlowMemory()), True),
    "two planes": (ADPTSpec(64, conjugate=Product(2)), False),
    "whole state": (ADPTSpec(64, direction=directions.FromWholeState(heads=8)), False),
    "phase": (ADPTSpec(64, phase=InputPhase()), True),
    "phase, diagonal": (ADPTSpec(64, beta=0.0, conjugate=Diagonal(), phase=InputPhase()), False),
    "beta = 0": (ADPTSpec(512, beta=0.0), True),
    "beta = 0, complex heads": (
        ADPTSpec(512, beta=0.0, spectrum=spectra.LRURing(), direction=directions.FromState(heads=4)),
        True,
    ),
    "diagonal": (ADPTSpec(512, beta=0.0, conjugate=Diagonal()), True),
    "trainable beta = 0": (ADPTSpec(512, beta=adptnet.TrainableBeta(0.0)), True),
    "beta = 0 with a slow memory": (ADPTSpec(64, beta=0.0, memory=SlowMemory()), True),
}


@pytest.mark.parametrize("name", CELLS)
def test_auto_knows_which_cells_a_gpu_runs_as_one_operation(with_gpu, name):
    spec, covered = CELLS[name]
    cell = spec.build(dtype=torch.float32)
    for shared in (SHARED_MEMORY_PER_BLOCK["RTX 3090"], SHARED_MEMORY_PER_BLOCK["A100"]):
        with_gpu(shared)
        assert cell.choose_scan("cuda").is_kernel == covered
        choice = solvers.Auto().choose(cell, 4, 1000, "cuda")
        assert isinstance(choice.solver, solvers.Sequential) == covered
        assert ("one compiled operation" in choice.reason) == covered


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"conjugate": Product(2)}, "planes=2 (Product of several planes)"),
        ({"direction": directions.FromWholeState(heads=8)}, "whole_state=True (FromWholeState)"),
    ],
    ids=["Product", "FromWholeState"],
)
def test_the_eager_loop_names_the_axis_that_has_no_kernel(with_gpu, axes, named):
    with_gpu(SHARED_MEMORY_PER_BLOCK["A100"])
    cell = ADPTSpec(64, **axes).build(dtype=torch.float32)
    backend = cell.choose_scan("cuda")
    assert backend.name == "reference"
    assert named in backend.reason
    assert backend.advice


LOOP = "eager loop"
# The networks that the paper trains at its sizes, then the axes of the model, each with the program of `Sequential`.
COVERAGE = {
    "Copy Memory": (ADPTSpec(128, projection=LowParam(factors=(32, 4), rank=32)), "streamed"),
    "Selective Copy": (ADPTSpec(256), "streamed"),
    "Selective Copy, from the input": (ADPTSpec(256, direction=directions.FromInput()), "given"),
    "word problem S5": (ADPTSpec(512, direction=directions.FromState(relu=True)), "streamed"),
    "sCIFAR, complex": (ADPTSpec(512, spectrum=spectra.LRURing()), "streamed"),
    "MAD, complex": (ADPTSpec(1024, spectrum=spectra.LRURing()), "streamed"),
    "SSC, 512": (
        ADPTSpec(512, direction=directions.FromState(spike=0.1, layer_norm=True), memory=SlowMemory()),
        "streamed",
    ),
    "SSC, 2048": (
        ADPTSpec(2048, direction=directions.FromState(spike=0.1, layer_norm=True), memory=SlowMemory()),
        "streamed",
    ),
    "plain": (ADPTSpec(64), "resident"),
    "heads, β per head": (
        ADPTSpec(256, direction=directions.FromState(heads=4), beta=(0.1, 0.2, 0.3, 0.4)),
        "resident",
    ),
    "trainable β": (ADPTSpec(64, beta=adptnet.TrainableBeta(0.5)), "resident"),
    "Cayley": (ADPTSpec(64, retraction=adptnet.retractions.Cayley()), "resident"),
    "Taylor": (ADPTSpec(64, conjugate=Taylor(2)), "resident"),
    "fixed dot product": (ADPTSpec(64, direction=directions.FromState(dot=0.5)), "resident"),
    "rotation-aware drive": (ADPTSpec(64, rotation_aware=True), "resident"),
    "K and V with bias": (ADPTSpec(64, projection=Dense(bias=True)), "resident"),
    "slow memory": (ADPTSpec(64, memory=SlowMemory()), "resident"),
    "β = 0": (ADPTSpec(64, beta=0.0), "linear_scan"),
    "`Diagonal`": (ADPTSpec(64, beta=0.0, conjugate=Diagonal()), "linear_scan"),
    "`Product` of several planes": (ADPTSpec(64, conjugate=Product(2)), LOOP),
    "directions from the whole state": (ADPTSpec(64, direction=directions.FromWholeState(heads=8)), LOOP),
    "phase from the input": (ADPTSpec(64, phase=InputPhase()), "resident"),
}


def find_programs(spec: ADPTSpec) -> list[str]:
    """Return the programs of Sequential, Conv-DEER and Forward-DEER on a faked GPU."""
    with torch.device("meta"):
        cell = spec.build(dtype=torch.float32)
    backend, recurrence = cell.choose_scan("cuda"), cell.recurrence
    programs = [LOOP if backend.name == "reference" else backend.name]
    if backend.name == "triton":
        programs = [launch.plan_launch(recurrence.form, spec.size, torch.device("cuda")).kind]
    for forward in (False, True):
        unsupported = cell_dispatch._explain_custom(spec) or launch.explain_unsupported_pass(
            recurrence.form, spec.size, paired=spec.spectrum.is_complex, slow=spec.memory is not None,
            diagonal=forward, dtype=torch.float32, device="cuda",
        )  # fmt: skip
        programs.append("fused" if unsupported is None else "eager")
    return programs


@pytest.mark.parametrize("name", COVERAGE)
def test_the_programs_of_a_network_are_those_of_the_documentation(with_gpu, name):
    spec, program = COVERAGE[name]
    page = (Path(__file__).parents[3] / "docs/explanation/gpu.md").read_text()
    found = {}
    for gpu, shared in SHARED_MEMORY_PER_BLOCK.items():
        with_gpu(shared)
        found[gpu] = find_programs(spec)
        # With torch for AMD GPUs, heads of 33 to 64 are streamed.
        assert found[gpu][0] in ((program, "streamed") if gpu == "MI300X" and program == "resident" else (program,))
        assert found[gpu][1:] == found["T4"][1:]
    row = f"| {name} | {spec.size} | {' | '.join(found['A100'])} |"
    assert row in page, f"docs/explanation/gpu.md needs the row {row}"


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 1), "mps", "xpu"])
@pytest.mark.parametrize("installed", [True, False])
def test_auto_chooses_for_a_device_that_is_not_present(with_gpu, monkeypatch, caplog, device, installed):
    with_gpu(None)
    monkeypatch.setattr(_backends, "_logged", set())
    monkeypatch.setattr(_gpu, "_has_triton", lambda: installed)
    cells = [spec.build(dtype=torch.float32) for spec, _ in CELLS.values()]
    cells += [cells[0].with_arguments(beta=torch.ones(1)), cells[0].with_arguments(dt=torch.ones(1, 100))]
    kinds = (adptnet.cells.GRU, adptnet.cells.LSTM, adptnet.cells.OrthogonalRNN, adptnet.cells.LIF)
    cells += [kind(4).build() for kind in (*kinds, adptnet.cells.LeakyIntegrator)]
    cells.append(adptnet.cells.SpikingADPT(ADPTSpec(4)).build())
    cells.append(adptnet.cells.from_function(lambda state, drive: (state + drive).tanh(), state_size=4))
    for cell in cells:
        choice = solvers.Auto().choose(cell, 2, 100, device)
        assert torch.device(device).type in choice.reason
    assert not caplog.messages  # fallbacks are logged only when an operation runs


def test_power_series_coefficients_are_copied_to_a_device_once(monkeypatch):
    rotation._cached_series.cache_clear()
    devices = []
    tensor = torch.tensor
    monkeypatch.setattr(
        torch, "tensor", lambda *args, **options: devices.append(options["device"].type) or tensor(*args, **options)
    )
    with torch.inference_mode():
        rotation.exponential(torch.empty(2, 1, device="meta"))
    angle = torch.empty(2, 1, device="meta", requires_grad=True)
    for _ in range(3):
        linear, _ = rotation.exponential(angle)
        linear.sum().backward()  # with the tensor created in inference mode
    assert devices == ["meta"]
    rotation._cached_series.cache_clear()


# Forms whose recurrence is diagonal. `linear=True` means that β is zero.
FORMS = {
    "no rotation": Form(rotates=False),
    "beta = 0": Form(linear=True),
    "heads": Form(linear=True, heads=2),
    "directions in drive": Form(linear=True, directions_in_drive=True),
    "rotation-aware": Form(linear=True, rotation_aware=True, retraction=int(RetractionKind.CAYLEY)),
    "LayerNorm": Form(linear=True, norm_epsilon=1e-5),
    "Taylor": Form(linear=True, retraction=int(RetractionKind.TAYLOR_TWO)),
}


@pytest.mark.parametrize("steps", [0, 1, 9])
@pytest.mark.parametrize("paired", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("name", FORMS)
def test_without_rotation_the_recurrence_is_a_diagonal_scan(name, paired, steps):
    form, batch, size = FORMS[name], 3, 4
    assert diagonal.is_diagonal(form, slow=False)
    assert not diagonal.is_diagonal(form, slow=True)
    real = torch.linspace(-0.9, 0.9, size // 2).repeat_interleave(2) if paired else torch.linspace(-0.9, 0.9, size)
    constants = Constants(real, torch.tensor([0.3, 0.3, -0.2, -0.2]) if paired else None)
    if form.rotates:
        m = size // form.heads
        weight = None if form.directions_in_drive else torch.randn(form.heads, 2, m, m)
        constants = constants._replace(weight=weight, beta=torch.zeros(form.heads))
    if form.norm_epsilon is not None:
        constants = constants._replace(norm_weight=torch.randn(2, size), norm_bias=torch.randn(2, size))
    drive, state = torch.randn(batch, steps, size * (3 if form.directions_in_drive else 1)), torch.randn(batch, size)
    upstream = torch.randn(batch, steps, size)
    reset_mask = torch.rand(batch, steps) < 0.3
    if steps:
        reset_mask[0, 0] = True
    for reset in (None, reset_mask):
        for lengths in (None, torch.tensor([steps, steps // 2, min(1, steps)])):
            leaves = [t.clone().requires_grad_() for t in (drive, state, *constants) if t is not None]
            remaining = iter(leaves[2:])
            leaf_constants = Constants(*(None if t is None else next(remaining) for t in constants))
            expected = reference.adpt_scan(leaves[0], leaves[1], leaf_constants, form, reset=reset, lengths=lengths)
            differentiable = [t for t in leaves if t is not leaf_constants.beta]
            gradients = torch.autograd.grad(
                expected, differentiable, upstream, allow_unused=True, materialize_grads=True
            )
            states, saved = diagonal.forward(drive, state, constants, form, reset, lengths, True)
            grad_drive, grad_state, grad_constants = diagonal.backward(
                upstream, states, saved, drive, state, constants, form, reset, lengths
            )
            actual = [grad_drive, grad_state, *(t for t in grad_constants._replace(beta=None) if t is not None)]
            torch.testing.assert_close(states, expected.detach())
            for gradient, expected_gradient in zip(actual, gradients, strict=True):
                torch.testing.assert_close(gradient, expected_gradient)
            assert grad_constants.beta is None or not grad_constants.beta.any()


def test_backends_have_a_line_for_gpus(with_gpu, monkeypatch):
    with_gpu(None)
    assert adptnet.backends()["gpu"] == "none: torch sees no GPU"
    with_gpu(SHARED_MEMORY_PER_BLOCK["T4"])
    assert adptnet.backends()["gpu"] == (
        "triton: linear_scan, adpt_scan for heads of up to 2048 state dimensions, on a fake GPU"
    )
    monkeypatch.setattr(_gpu, "_has_triton", lambda: False)
    assert adptnet.backends()["gpu"].startswith("reference: triton is not installed")
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    assert adptnet.backends()["gpu"] == "reference: ADPTNET_BACKEND=reference"
