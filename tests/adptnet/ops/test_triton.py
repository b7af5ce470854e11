"""The GPU kernels compiled ahead of time: shared memory and spilled registers as the compiler reports them."""

import importlib.util
import json

import pytest

from adptnet.ops import _gpu
from support.kernels import SHARED_MEMORY_PER_BLOCK, run_python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'adptnet[triton]'"
)
QUIET = {"TRITON_DEFAULT_FP_FUSION": "1"}  # the default, but Triton warns if it is unset

COMPILED = """
import json, pathlib, re, subprocess, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from adptnet.ops import _gpu
from adptnet.ops.adpt_scan import Form, launch
from adptnet.ops.adpt_scan import triton as adpt
from adptnet.ops.linear_scan import triton as linear

given = json.loads({given!r})
target = GPUTarget(*given["target"])
_gpu.shared_memory = lambda device: given["shared"]
_gpu.matmul_precision = lambda device: given["precision"]
integers = ("batch", "steps", "chunks", "size", "transition_batch", "transition_time")
types = dict.fromkeys(integers, "i32") | dict.fromkeys(("epsilon", "threshold", "dot", "sine"), "fp32")
types |= dict(reset="*u8", cuts="*u8", lengths="*i64")

def measure(kernel, constants, **options):
    signature = {{n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=target, options=options)
    stack = 0
    if "cubin" in made.asm:
        tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        stack = int(re.search("STACK:([0-9]+)", shown)[1])
    return dict(kernel=kernel.__name__, shared=made.metadata.shared, stack=stack)

found = []
if given["scan"]:
    scan = dict(RESETS=True, REVERSE=True, PAIRS=True, LENGTH=linear.LENGTH, COLUMNS=linear.COLUMNS)
    summary = dict(VARIES=True, SHARED=False, ADJOINT=True)
    found.append(measure(linear.summarize_kernel, scan | summary, **linear.OPTIONS))
    found.append(measure(linear.apply_kernel, scan | dict(STARTS=True), **linear.OPTIONS))
    options = dict(STARTS=True, VARIES=True, NEEDED=True)
    found.append(measure(linear.apply_backward_kernel, scan | options, **linear.OPTIONS))
for size, heads, flags in given["cases"]:
    every = dict.fromkeys("BIASED RESETS RAGGED PAIRS ROW_BETA AWARE SLOW NORM DOT".split(), False)
    given_directions = flags.pop("GIVEN", False)
    every |= dict(SOURCE=0, RETRACTION=0) | flags
    plan = launch.plan_launch(Form(heads=heads, directions_in_drive=given_directions), size, torch.device("cuda:0"))
    every |= dict(HEADS=heads, SIZE=size // heads, PAD=plan.pad, ROWS=plan.rows, PRECISION=plan.precision)
    if plan.kind == "streamed":
        every |= dict(SOME=plan.some, BLOCK=plan.block, INNER=plan.inner)
    options = dict(num_warps=plan.warps, num_stages=plan.stages)
    for direction, extra in (("forward", dict(SAVE=True)), ("backward", dict())):
        result = measure(getattr(adpt, plan.kind + "_" + direction), every | extra, **options)
        table = launch.STREAMED if plan.kind == "streamed" else 1024
        if plan.kind == "resident":
            table = launch.RESIDENT[plan.pad][plan.precision]
        found.append(result | dict(table=table, plain=not any(flags.values())))
print(json.dumps(found))
"""

TARGETS = {
    "cuda 75": (["cuda", 75, 32], "ieee", SHARED_MEMORY_PER_BLOCK["T4"]),
    "cuda 80": (["cuda", 80, 32], "tf32x3", SHARED_MEMORY_PER_BLOCK["A100"]),
    "cuda 86": (["cuda", 86, 32], "tf32x3", SHARED_MEMORY_PER_BLOCK["RTX 3090"]),
    "cuda 89": (["cuda", 89, 32], "tf32x3", SHARED_MEMORY_PER_BLOCK["L4"]),
    "cuda 90": (["cuda", 90, 32], "tf32x3", SHARED_MEMORY_PER_BLOCK["H100"]),
    "cuda 100": (["cuda", 100, 32], "tf32x3", SHARED_MEMORY_PER_BLOCK["B200"]),
    "cuda 120": (["cuda", 120, 32], "tf32x3", SHARED_MEMORY_PER_BLOCK["RTX 3090"]),
    "hip gfx942": (["hip", "gfx942", 64], "ieee", SHARED_MEMORY_PER_BLOCK["MI300X"]),
}
# (state dimension, heads, flags): small and middle heads, then the networks of the paper at their sizes.
SPEECH = {"BIASED": True, "SLOW": True, "NORM": True, "SOURCE": 2}
CASES = {
    "heads of 16 and 64": [(16, 1, {}), (256, 4, {"RESETS": True, "RAGGED": True, "BIASED": True})],
    "64, Copy Memory": [(64, 1, {}), (128, 1, {})],
    "Selective Copy": [(256, 1, {}), (256, 1, {"GIVEN": True})],
    "word problem S5": [(512, 1, {"SOURCE": 1})],
    "sCIFAR, MAD": [(512, 1, {"PAIRS": True}), (1024, 1, {"PAIRS": True})],
    "SSC": [(512, 1, SPEECH), (2048, 1, SPEECH)],
}
SINE = 32  # bytes of stack that the reduction of large angles needs in libdevice's sine; not a spill


def compile_for(name, folder, cases, *, scan=False):
    target, precision, shared = TARGETS[name]
    given = {"target": target, "precision": precision, "shared": shared, "cases": cases, "scan": scan}
    code = COMPILED.format(given=json.dumps(given))
    found = json.loads(run_python(code, timeout=600, TRITON_CACHE_DIR=str(folder), **QUIET)[0])
    assert len(found) == 2 * len(cases) + 3 * scan
    for result in found:
        if "table" not in result:  # the diagonal scan
            assert result["shared"] <= 8192
            assert result["stack"] == 0
            continue
        assert result["shared"] <= result["table"] <= shared * 8 / 9, result
        assert result["stack"] <= (SINE if result["plain"] else 256 + SINE), result
    return found


@needs_triton
@pytest.mark.parametrize("name", ["cuda 80", "hip gfx942"])
def test_kernels_compile_ahead_of_time_and_fit(name, tmp_path):
    compile_for(name, tmp_path, [(16, 1, {})], scan=name == "cuda 80")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("name", TARGETS)
def test_networks_of_the_paper_compile_and_fit(name, cases, tmp_path):
    compile_for(name, tmp_path, CASES[cases], scan=True)


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
    code = "import sys, adptnet, torch; adptnet.ADPTNet.paper(3)(torch.randn(1, 2, 3)); "
    shown, _ = run_python(
        code + "print([name for name in sys.modules if name.startswith('adptnet') and 'triton' in name])"
    )
    assert shown == "[]"
