"""The GPU kernels compiled ahead of time: shared memory and spilled registers as the compilers report them."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from adptnet.ops import _gpu
from adptnet.ops.adpt_scan import launch
from support import compiled_kernels
from support.compiled_kernels import CASES, EVERY_FLAG, PASSES, RECURRENCES, SCAN, TARGETS
from support.kernels import run_python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'adptnet[triton]'"
)
RECORD = json.loads(compiled_kernels.RECORD.read_text())

COMPILE = """
import json, sys
sys.path.insert(0, {tests!r})
from support.compiled_kernels import compile_in_process
print(json.dumps(compile_in_process({name!r}, {cases!r}, with_cycles={with_cycles!r})))
"""
KNOWN_SPILLS = {("gfx942", "SSC, 2048", "streamed_backward"): 600}  # see docs/known-limits.md
SINE = 32  # bytes of stack that the reduction of large angles needs in libdevice's sine; not a spill


def compile_cases(name, cases, folder, *, with_cycles=False):
    code = COMPILE.format(tests=str(Path(__file__).parents[2]), name=name, cases=cases, with_cycles=with_cycles)
    shown, _ = run_python(code, timeout=2400, TRITON_CACHE_DIR=str(folder), TRITON_DEFAULT_FP_FUSION="1")
    found = json.loads(shown)
    assert list(found) == cases
    return found


def assert_within_limits(name, case, found):
    """Assert the limits of shared memory by which a kernel is chosen, and the goals for spilled registers."""
    available = TARGETS[name].shared
    for kernel, figures in found.items():
        shared, stack = available * 8 // 9, 256 + SINE
        if kernel.startswith("streamed"):
            shared = launch.STREAMED
        elif kernel.startswith("given"):
            shared = 2048
        elif kernel.startswith("resident"):
            size, heads, _ = RECURRENCES[case]
            shared = launch.RESIDENT[size // heads][TARGETS[name].precision]
        elif case == SCAN:
            shared, stack = 8192, 0
        is_plain = case in RECURRENCES and not RECURRENCES[case][2]
        if name in ("8.0", "9.0") and (is_plain or (case in PASSES and PASSES[case][0] <= 256)):
            stack = SINE
        stack = KNOWN_SPILLS.get((name, case, kernel), stack)
        assert figures["shared"] <= shared <= available * 8 // 9, (name, case, kernel, figures)
        assert figures["stack"] <= stack, (name, case, kernel, figures)


@pytest.mark.parametrize("name", RECORD["figures"])
def test_recorded_figures_are_within_the_limits(name):
    assert list(RECORD["figures"][name]) == list(CASES)
    for case, found in RECORD["figures"][name].items():
        assert len(found) >= 2
        assert_within_limits(name, case, found)


def test_the_page_of_compiler_figures_is_that_of_the_record():
    assert compiled_kernels.PAGE.read_text() == compiled_kernels.render(RECORD), f"run {compiled_kernels.__file__}"


@needs_triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "cases"), [("8.0", ["heads of 16", SCAN]), ("gfx942", ["heads of 16"])])
def test_kernels_compile_ahead_of_time_and_fit(name, cases, tmp_path):
    for case, found in compile_cases(name, cases, tmp_path).items():
        assert_within_limits(name, case, found)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TARGETS)
def test_no_kernel_needs_more_than_recorded(name, case, tmp_path):
    import triton

    found = compile_cases(name, [case], tmp_path)[case]
    assert_within_limits(name, case, found)
    recorded = RECORD["figures"][name][case]
    assert found.keys() == recorded.keys()
    if triton.__version__ == RECORD["triton"]:
        for kernel, figures in found.items():
            assert figures["shared"] <= recorded[kernel]["shared"], kernel
            assert figures["stack"] <= recorded[kernel]["stack"], kernel


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("case", EVERY_FLAG)
def test_kernels_compile_with_every_flag(case, tmp_path):
    for kernel, figures in compile_cases("8.0", [case], tmp_path)[case].items():
        assert figures["shared"] <= {"given": 2048, "resident": launch.RESIDENT[32]["tf32x3"]}.get(
            kernel.split("_")[0], launch.STREAMED
        )


# Cycles per step of the resident kernels by the static model on 8.0, at most; and the instructions that spill.
CYCLES = {16: (2810, 8360), 32: (4280, 11340), 64: (8480, 19840)}


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("size", CYCLES)
def test_the_loop_over_time_does_not_become_slower(size, tmp_path):
    """A tenth above the figures of Triton 3.9.0; see `support.sass` for what they mean."""
    case = f"heads of {size}"
    found = compile_cases("8.0", [case], tmp_path, with_cycles=True)[case]
    for figures, limit in zip(found.values(), CYCLES[size], strict=True):
        assert 0 < figures["cycles"] <= limit, figures
        assert figures["counts"]["HMMA"] > 0
        assert not {"LDL", "STL"} & figures["counts"].keys(), figures


def test_neither_batch_size_nor_length_is_compiled_in():
    """Triton compiles a kernel anew for integers that are 1 or divisible by 16, unless it is told not to."""
    sizes = {"batch", "steps", "chunks", "count", "iteration", "record", "least", "most", "patience"}
    kernels = {}
    for path in Path(_gpu.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith(("_kernel", "_forward", "_backward")):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "triton.jit":
                        kernels[path, node.name] = sizes & {a.arg for a in node.args.args}, ast.unparse(decorator)
    assert len(kernels) == 6 + 6 + 3
    for name, (found, decorator) in kernels.items():
        assert found
        assert all(f"'{size}'" in decorator for size in found), name


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
