"""The kernels for GPUs: run by Triton's interpreter on tiny sizes, and compiled ahead of time. No GPU is needed."""

import importlib.util

import pytest

from adptnet.ops import gpu
from test_native import python

installed = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'adptnet[triton]'"
)
QUIET = {"TRITON_DEFAULT_FP_FUSION": "1"}  # what it is anyway, but unset it warns

LINEAR = """
import torch
from adptnet.ops.linear_scan import reference, triton
torch.manual_seed(0)
for dtype, shape, reverse, resets, starts in (
    (torch.float32, (5,), False, True, True),
    (torch.float32, (2, 3, 5), True, False, False),
    (torch.complex64, (5,), True, True, True),
    (torch.complex64, (2, 3, 5), False, False, False),
):
    transition, offset, initial = (torch.randn(s, dtype=dtype) / 2 for s in (shape, (2, 3, 5), (2, 5)))
    reset = torch.tensor([[False, True, False], [False, False, True]]) if resets else None
    leaves = [t.requires_grad_() for t in (transition, offset, initial)[: 3 if starts else 2]]
    expected = reference.linear_scan(*leaves, reset=reset, reverse=reverse)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    start = initial if starts else None
    with torch.no_grad():
        found = triton.forward(transition, offset, start, reset, reverse)
        back = triton.backward(upstream, found, transition, start, reset, reverse, to_transition=True)
        over = offset.clone()
        triton.forward(transition, over, start, reset, reverse, over=True)
    torch.testing.assert_close(over, found)
    for a, b in zip((found, *back), (expected.detach(), *gradients), strict=False):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
print("right")
"""

ADPT = """
import math, torch
from adptnet.ops.adpt_scan import Constants, Form, Retracted, reference, triton
torch.manual_seed(0)
batch, steps, size = 2, 3, 5
def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)
for retracted, plain, beta in ((0, True, 0.7), (1, False, 3.0), (0, False, 3.0)):
    bias = None if plain else randn(1, 2, size)
    constants = Constants(0.9 * randn(size).tanh(), weight=randn(1, 2, size, size) / math.sqrt(size), bias=bias)
    constants = constants._replace(beta=torch.tensor([beta], dtype=torch.float64))
    drive, state, form = randn(batch, steps, size), randn(batch, size), Form(retracted=retracted)
    if plain:
        drive[1, :2], state[1] = 0, 0  # where there is no state there is no turn
    reset = None if plain else torch.tensor([[False, True, False], [False, False, False]])
    lengths = None if plain else torch.tensor([3, 2])
    leaves = [t.requires_grad_() for t in (drive, state, *constants) if t is not None]
    expected = reference.adpt_scan(drive, state, constants, form, reset=reset, lengths=lengths)
    upstream = randn(batch, steps, size)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    narrow = [None if t is None else t.detach().float() for t in (drive, state, *constants)]
    given = Constants(*narrow[2:])
    assert triton.covers(given, form)
    states = triton.forward(narrow[0], narrow[1], given, form, reset, lengths)
    found = triton.backward(upstream.float(), states, narrow[1], given, form, reset, lengths)
    found = [states, *found[:2], *(t for t in found[2] if t is not None)]
    for a, b in zip(found, (expected.detach(), *gradients), strict=True):
        bound = 16 * steps * torch.finfo(torch.float32).eps * max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a.double(), b, atol=bound, rtol=0)
print("right")
"""


@installed
@pytest.mark.parametrize("code", [LINEAR, ADPT], ids=["linear_scan", "adpt_scan"])
def test_in_the_interpreter_values_and_gradients_are_those_of_the_reference(code):
    assert python(code, TRITON_INTERPRET="1", **QUIET)[0] == "right"


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from adptnet.ops.adpt_scan import triton as adpt
from adptnet.ops.linear_scan import triton as linear

target = GPUTarget({target})
others = dict.fromkeys(("batch", "steps", "size", "transition_batch", "transition_time"), "i32")
others |= dict(reset="*u8", lengths="*i64")
recurrence = dict(BIASED=True, RESETS=True, RAGGED=True, CAYLEY=False, ROWS=16, PAD=32)
scan = dict(STARTS=True, RESETS=True, REVERSE=True, PAIRS=True, COLUMNS=64)
for kernel, constants in (
    (adpt.forward_kernel, recurrence),
    (adpt.backward_kernel, recurrence),
    (linear.forward_kernel, scan),
    (linear.backward_kernel, scan | dict(VARIES=True)),
):
    signature = {{n: "constexpr" if n in constants else others.get(n, "*fp32") for n in kernel.arg_names}}
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=target)
    assert {binary!r} in made.asm
print("compiled")
"""


@installed
@pytest.mark.parametrize(
    ("target", "binary"),
    [("'cuda', 80, 32", "cubin"), ("'cuda', 90, 32", "cubin"), ("'hip', 'gfx942', 64", "hsaco")],
    ids=["cuda 80", "cuda 90", "hip gfx942"],
)
def test_kernels_compile_ahead_of_time(target, binary, tmp_path):
    code = COMPILED.format(target=target, binary=binary)
    assert python(code, TRITON_CACHE_DIR=str(tmp_path), **QUIET)[0] == "compiled"


def test_a_device_without_a_kernel_is_named(monkeypatch):
    monkeypatch.setenv("ADPTNET_BACKEND", "auto")
    assert gpu.why_not("mps") == "there is no kernel for mps."
    monkeypatch.setattr(gpu, "_installed", lambda: False)
    assert "pip install 'adptnet[triton]'" in gpu.why_not("cuda")
    monkeypatch.setattr(gpu, "_installed", lambda: True)
    assert gpu.ready("cuda")
    monkeypatch.setenv("ADPTNET_BACKEND", "reference")
    assert not gpu.ready("cuda")


def test_an_import_does_not_touch_the_kernels_for_gpus():
    code = "import sys, adptnet, torch; adptnet.ADPTNet(3)(torch.randn(1, 2, 3)); "
    shown, _ = python(code + "print([name for name in sys.modules if name.startswith('adptnet') and 'triton' in name])")
    assert shown == "[]"
