"""The GPU kernels compiled ahead of time: shared memory and spilled registers as the compiler reports them."""

import importlib.util
import json
from pathlib import Path

import pytest

from adptnet.ops import _gpu
from adptnet.ops.adpt_scan import launch
from support.kernels import SHARED_MEMORY_PER_BLOCK, run_python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'adptnet[triton]'"
)
QUIET = {"TRITON_DEFAULT_FP_FUSION": "1"}  # the default, but Triton warns if it is unset

COMPILED = """
import json, pathlib, re, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from adptnet.ops import _gpu
from adptnet.ops.adpt_scan import Form, launch
from adptnet.ops.adpt_scan import triton as adpt
from adptnet.ops.adpt_step import triton as step
from adptnet.ops.linear_scan import triton as linear

given = json.loads({given!r})
sys.path.insert(0, given["tests"])
from support import sass

target = GPUTarget(*given["target"])
_gpu.shared_memory = lambda device: given["shared"]
_gpu.matmul_precision = lambda device: given["precision"]
integers = "batch steps chunks size transition_batch transition_time iteration record least most patience count"
floats = "epsilon threshold dot sine decay relative floor slack rounding rate_limit"
types = dict.fromkeys(integers.split(), "i32") | dict.fromkeys(floats.split(), "fp32")
types |= dict(reset="*u8", cuts="*u8", sure="*u8", lengths="*i64", prefixes="*i64", stopped="*i32", integers="*i32")

def measure(kernel, constants, **options):
    signature = {{n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=target, options=options)
    stack, cycles = 0, None
    if "cubin" in made.asm:
        tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
            stack = int(re.search("STACK:([0-9]+)", shown)[1])
            if given["cycles"]:
                body = sass.find_largest_loop(*sass.disassemble(pathlib.Path(file.name), tool.parent))
                cycles = sass.estimate_cycles(body, given["target"][1], options["num_warps"])
    return dict(kernel=kernel.__name__, shared=made.metadata.shared, stack=stack, cycles=cycles)

found = []
if given["pass"]:
    shared = dict(RESETS=True, PAIRS=False, STATUS=8)
    for pad in given["pass"]:
        options = step.find_options(Form(), pad, torch.device("cuda:0")) | shared | dict(BIASED=True, DIAGONAL=True)
        launched = dict(num_warps=options.pop("num_warps"), num_stages=options.pop("num_stages"))
        found.append(measure(step.evaluate_kernel, options, **launched) | dict(pad=pad))
        pulled = {{name: value for name, value in options.items() if name in step.pull_back_kernel.arg_names}}
        pulled["SOME"] = max(1, min(step.ROWS, 512 // pad))
        made = measure(step.pull_back_kernel, pulled, num_warps=min(8, launched["num_warps"]), num_stages=1)
        found.append(made | dict(pad=pad))
        applied = shared | dict(TOTAL=pad, PAD=pad, LENGTH=step.LENGTH, DIAGONAL=True)
        launched = dict(num_warps=max(1, min(8, pad // 128)), num_stages=1)
        found.append(measure(step.apply_kernel, applied, **launched) | dict(pad=pad))
    scan = shared | dict(TOTAL=128, COLUMNS=step.COLUMNS, DIAGONAL=True)
    launched = dict(num_warps=2, num_stages=1)
    found.append(measure(step.summarize_kernel, scan | dict(LENGTH=step.LENGTH), **launched) | dict(pad=16))
    found.append(measure(step.carry_kernel, scan | dict(DOUBLINGS=6, RECENT=True), **launched) | dict(pad=16))
    tested = dict(STATUS=8, BLOCK=step.BLOCK, FIRST=False)
    found.append(measure(step.converge_kernel, tested, num_warps=4) | dict(pad=16))
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
        found.append(result | dict(table=table, size=size, plain=not any(flags.values())))
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
KNOWN_SPILLS = {("cuda 80", 2048): 352}  # bytes above the goal of 256; see docs/known-limits.md
SINE = 32  # bytes of stack that the reduction of large angles needs in libdevice's sine; not a spill


def compile_for(name, folder, cases=(), *, scan=False, passes=(), cycles=False):
    target, precision, shared = TARGETS[name]
    given = {"target": target, "precision": precision, "shared": shared, "cases": cases, "scan": scan}
    given |= {"pass": passes, "cycles": cycles, "tests": str(Path(__file__).parents[2])}
    code = COMPILED.format(given=json.dumps(given))
    found = json.loads(run_python(code, timeout=2400, TRITON_CACHE_DIR=str(folder), **QUIET)[0])
    assert len(found) == 2 * len(cases) + 3 * scan + (3 * len(passes) + 3 if passes else 0)
    for result in found:
        if "pad" in result:  # a Newton pass
            assert result["shared"] <= launch.PASS_BYTES * result["pad"] + 4096, result
            assert result["stack"] <= (SINE if result["pad"] <= 256 else 256 + SINE), result
            continue
        if "table" not in result:  # the diagonal scan
            assert result["shared"] <= 8192
            assert result["stack"] == 0
            continue
        assert result["shared"] <= result["table"] <= shared * 8 / 9, result
        spilled = 0 if result["plain"] else KNOWN_SPILLS.get((name, result["size"]), 256)
        assert result["stack"] <= spilled + SINE, result
    return found


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["cuda 80", "hip gfx942"])
def test_kernels_compile_ahead_of_time_and_fit(name, tmp_path):
    compile_for(name, tmp_path, [(16, 1, {})], scan=name == "cuda 80")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("name", TARGETS)
def test_networks_of_the_paper_compile_and_fit(name, cases, tmp_path):
    compile_for(name, tmp_path, CASES[cases], scan=True)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("name", TARGETS)
def test_newton_passes_compile_and_fit(name, tmp_path):
    sizes = [pad for pad in (64, 128, 256, 512) if launch.PASS_BYTES * pad * 9 // 8 <= TARGETS[name][2]]
    assert len(sizes) >= 3
    compile_for(name, tmp_path, passes=sizes)


# Cycles per step of the resident kernels by the static model on sm_80, at most; and the instructions that spill.
CYCLES = {16: (2900, 8400), 32: (4200, 11400), 64: (8500, 19900)}


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("size", CYCLES)
def test_the_loop_over_time_does_not_become_slower(size, tmp_path):
    """A tenth above the figures of Triton 3.9.0; see `support.sass` for what they mean."""
    found = compile_for("cuda 80", tmp_path, [(size, 1, {})], cycles=True)
    for result, limit in zip(found, CYCLES[size], strict=True):
        cycles, counts = result["cycles"]
        assert 0 < cycles <= limit, result
        assert counts["HMMA"] > 0
        assert not {"LDL", "STL"} & counts.keys(), result


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
