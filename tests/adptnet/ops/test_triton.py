"""The GPU kernels: run by Triton's interpreter at tiny sizes, and compiled ahead of time. No GPU is needed."""

import importlib.util

import pytest

from adptnet.ops import _gpu
from support.kernels import SHARED_MEMORY_PER_BLOCK, run_python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'adptnet[triton]'"
)
QUIET = {"TRITON_DEFAULT_FP_FUSION": "1"}  # the default, but Triton warns if it is unset

ADPT = """
import math, torch
from adptnet.ops import _gpu
from adptnet.ops.adpt_scan import Constants, Form, RetractionKind, launch, reference, triton
torch.manual_seed(0)
torch.utils.deterministic.fill_uninitialized_memory = True  # memory that is not written is NaN
torch.use_deterministic_algorithms(True)
batch, steps = 2, 3
def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)
for size, shared, retraction, plain, beta in (
    (5, 65536, 0, True, 0.7), (5, 65536, 1, False, 3.0), (5, 65536, 0, False, 3.0),
    (65, 101376, 0, False, 0.7), (128, 232448, 0, True, 0.7),
):
    _gpu.shared_memory = lambda device: shared
    resident = launch.plan_launch(size, "cuda:0").resident
    assert resident == (size != 65)
    bias = None if plain else randn(1, 2, size)
    constants = Constants(0.9 * randn(size).tanh(), weight=randn(1, 2, size, size) / math.sqrt(size), bias=bias)
    constants = constants._replace(beta=torch.tensor([beta], dtype=torch.float64))
    drive, state, form = randn(batch, steps, size), randn(batch, size), Form(retraction=retraction)
    if plain:
        drive[1, :2], state[1] = 0, 0  # a zero state is not rotated
    reset = None if plain else torch.tensor([[False, True, False], [False, False, False]])
    lengths = None if plain else torch.tensor([3, 2])
    leaves = [t.requires_grad_() for t in (drive, state, *constants) if t is not None]
    expected = reference.adpt_scan(drive, state, constants, form, reset=reset, lengths=lengths)
    upstream = randn(batch, steps, size)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    narrow = [None if t is None else t.detach().float() for t in (drive, state, *constants)]
    given = Constants(*narrow[2:])
    states = triton.forward(narrow[0], narrow[1], given, form, reset, lengths)
    found = triton.backward(upstream.float(), states, narrow[1], given, form, reset, lengths)
    found = [states, *found[:2], *(t for t in found[2] if t is not None)]
    for a, b in zip(found, (expected.detach(), *gradients), strict=True):
        bound = 16 * steps * torch.finfo(torch.float32).eps * max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a.double(), b, atol=bound, rtol=0)
print("right")
"""


@needs_triton
def test_in_the_interpreter_values_and_gradients_equal_those_of_the_reference():
    assert run_python(ADPT, TRITON_INTERPRET="1", **QUIET)[0] == "right"


GUARDED = """
import torch
from adptnet.ops.adpt_scan import Constants, Form, triton as adpt
from adptnet.ops.linear_scan import triton as linear

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
torch.cuda.device_of = Guard
adpt.forward_kernel = adpt.backward_kernel = Kernel()
linear.apply_kernel = linear.apply_backward_kernel = Kernel()
drive, state = torch.randn(2, 3, 4), torch.randn(2, 4)
constants = Constants(torch.rand(4), weight=torch.randn(1, 2, 4, 4), beta=torch.ones(1))
adpt.forward(drive, state, constants, Form(), None, None)
adpt.backward(drive, drive, state, constants, Form(), None, None)
linear.forward(constants.real, drive, None, None, False)
linear.backward(drive, drive, constants.real, None, None, False, needs_transition_grad=True)
assert events == [("enter", "cpu"), "launch", "leave"] * 4, events
print("guarded")
"""


@needs_triton
def test_every_launch_is_on_the_device_of_its_tensors():
    assert run_python(GUARDED, **QUIET)[0] == "guarded"


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from adptnet.ops import _gpu
from adptnet.ops.adpt_scan import launch
from adptnet.ops.adpt_scan import triton as adpt
from adptnet.ops.linear_scan import triton as linear

target, there = GPUTarget({target}), {shared}
_gpu.shared_memory = lambda device: there
others = dict.fromkeys(("batch", "steps", "chunks", "size", "transition_batch", "transition_time"), "i32")
others |= dict(reset="*u8", cuts="*u8", lengths="*i64")
same = triton.__version__ == "3.9.0" and target.backend == "cuda"  # the version of the table

def shared(kernel, constants, **how):
    signature = {{n: "constexpr" if n in constants else others.get(n, "*fp32") for n in kernel.arg_names}}
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=target, options=how)
    assert {binary!r} in made.asm
    return made.metadata.shared

scan = dict(RESETS=True, REVERSE=True, PAIRS=True, LENGTH=linear.LENGTH, COLUMNS=linear.COLUMNS)
for kernel, options in (
    (linear.summarize_kernel, dict(VARIES=True, SHARED=False, ADJOINT=True)),
    (linear.apply_kernel, dict(STARTS=True)),
    (linear.apply_backward_kernel, dict(STARTS=True, VARIES=True, NEEDED=True)),
):
    assert shared(kernel, scan | options, **linear.OPTIONS) <= 8192
for size in {sizes}:
    found = launch.plan_launch(size, "cuda:0")
    assert (found is None) == (size > 128 or (size > 64 and there < 82944))
    if found is None:
        continue
    needed = launch.SHARED_MEMORY[found.pad]
    how = dict(num_warps=found.warps, num_stages=launch.STAGES)
    for chosen in {options}:
        every = dict(zip(("BIASED", "RESETS", "RAGGED", "CAYLEY"), chosen), ROWS=adpt.ROWS, PAD=found.pad)
        forward = shared(adpt.forward_kernel, every | dict(RESIDENT=found.resident), **how)
        backward = shared(adpt.backward_kernel, every, **how)
        table = (needed.resident if found.resident else needed.streamed, needed.backward)
        assert max(forward, backward) <= there
        assert (forward, backward) == table if same else max(forward, backward) <= max(table) * 9 // 8, (size, chosen)
print("compiled")
"""

TARGETS = {
    "cuda 80": ("'cuda', 80, 32", "cubin", SHARED_MEMORY_PER_BLOCK["A100"]),
    "cuda 86": ("'cuda', 86, 32", "cubin", SHARED_MEMORY_PER_BLOCK["RTX 3090"]),
    "cuda 89": ("'cuda', 89, 32", "cubin", SHARED_MEMORY_PER_BLOCK["L4"]),
    "cuda 90": ("'cuda', 90, 32", "cubin", SHARED_MEMORY_PER_BLOCK["H100"]),
    "cuda 100": ("'cuda', 100, 32", "cubin", SHARED_MEMORY_PER_BLOCK["B200"]),
    "cuda 120": ("'cuda', 120, 32", "cubin", SHARED_MEMORY_PER_BLOCK["RTX 3090"]),
    "hip gfx942": ("'hip', 'gfx942', 64", "hsaco", SHARED_MEMORY_PER_BLOCK["MI300X"]),
}


def compile_for(name, folder, sizes, options):
    target, binary, shared = TARGETS[name]
    code = COMPILED.format(target=target, binary=binary, shared=shared, sizes=sizes, options=options)
    assert run_python(code, TRITON_CACHE_DIR=str(folder), **QUIET)[0] == "compiled"


@needs_triton
@pytest.mark.parametrize("name", ["cuda 80", "cuda 86", "cuda 90", "hip gfx942"])
def test_kernels_compile_ahead_of_time_and_fit(name, tmp_path):
    compile_for(name, tmp_path, [32, 65, 129], [(True, True, True, False)])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[16, 32], [64], [128, 256]], ids=["up to 32", "64", "from 128"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_shared_memory_table_equals_the_report_of_the_compiler(name, biased, sizes, tmp_path):
    compile_for(name, tmp_path, sizes, [(biased, False, False, False), (biased, True, True, True)])


def test_a_device_without_a_kernel_is_named(monkeypatch):
    monkeypatch.setenv("ADPTNET_BACKEND", "auto")
    assert _gpu.explain_unavailable("mps") == "there is no kernel for mps."
    monkeypatch.setattr(_gpu, "_has_triton", lambda: False)
    assert "pip install 'adptnet[triton]'" in _gpu.explain_unavailable("cuda")
    monkeypatch.setattr(_gpu, "_has_triton", lambda: True)
    assert _gpu.is_available("cuda")
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    assert not _gpu.is_available("cuda")


def test_an_import_does_not_load_the_gpu_kernels():
    code = "import sys, adptnet, torch; adptnet.ADPTNet(3)(torch.randn(1, 2, 3)); "
    shown, _ = run_python(
        code + "print([name for name in sys.modules if name.startswith('adptnet') and 'triton' in name])"
    )
    assert shown == "[]"
