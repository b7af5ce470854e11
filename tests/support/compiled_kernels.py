"""Compile the GPU kernels ahead of time, for GPUs that need not be present, and record what the compilers report.

    python tests/support/compiled_kernels.py                  # all GPUs: half an hour on two busy cores
    python tests/support/compiled_kernels.py "8.0" "gfx942"   # some

It needs Triton, and no GPU. It writes compiled_kernels.json beside this file and docs/reference/gpu-compiler.md.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs/reference/gpu-compiler.md"


class Target(NamedTuple):
    """A GPU to compile for."""

    backend: str
    architecture: int | str
    warp: int
    precision: str  # of the products, as `_gpu.matmul_precision` returns it on this GPU
    shared: int  # bytes of shared memory per block
    cards: str


TARGETS = {
    "7.5": Target("cuda", 75, 32, "ieee", 65536, "T4, RTX 20"),
    "8.0": Target("cuda", 80, 32, "tf32x3", 166912, "A100"),
    "8.6": Target("cuda", 86, 32, "tf32x3", 101376, "RTX 30, A10"),
    "8.9": Target("cuda", 89, 32, "tf32x3", 101376, "RTX 40, L4"),
    "9.0": Target("cuda", 90, 32, "tf32x3", 232448, "H100"),
    "10.0": Target("cuda", 100, 32, "tf32x3", 232448, "B200"),
    "12.0": Target("cuda", 120, 32, "tf32x3", 101376, "RTX 50"),
    "gfx942": Target("hip", "gfx942", 64, "ieee", 65536, "MI300X"),
}

# A recurrence: (state dimension, heads, flags). GIVEN: the directions come with the drive.
SPEECH = {"BIASED": True, "SLOW": True, "NORM": True, "SOURCE": 2}
RECURRENCES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "heads of 16": (16, 1, {}),
    "heads of 32": (32, 1, {}),
    "heads of 64": (64, 1, {}),
    "heads of 64, bias, resets, lengths": (256, 4, {"RESETS": True, "RAGGED": True, "BIASED": True}),
    "phase, 64": (64, 1, {"PHASED": True}),
    "Copy Memory, 128": (128, 1, {}),
    "Selective Copy, 256": (256, 1, {}),
    "Selective Copy, from the input": (256, 1, {"GIVEN": True}),
    "word problem S5, 512": (512, 1, {"SOURCE": 1}),
    "sCIFAR, complex, 512": (512, 1, {"PAIRS": True}),
    "MAD, complex, 1024": (1024, 1, {"PAIRS": True}),
    "SSC, 512": (512, 1, SPEECH),
    "SSC, 2048": (2048, 1, SPEECH),
}
# Nearly all flags at once; not recorded. Triton's interpreter accepts code that does not compile.
FLAGS = {"RESETS": True, "RAGGED": True, "PAIRS": True, "PHASED": True, "SLOW": True, "ROW_BETA": True}
EVERY_FLAG: dict[str, tuple[int, int, dict[str, Any]]] = {
    "given, every flag": (32, 1, FLAGS | {"GIVEN": True, "AWARE": True}),
    "resident, every flag": (32, 1, FLAGS | {"BIASED": True, "SOURCE": 1, "AWARE": True, "NORM": True, "DOT": True}),
    "streamed, every flag": (128, 1, FLAGS | {"BIASED": True, "SOURCE": 2, "NORM": True, "RETRACTION": 3}),
}
SCAN = "diagonal scan"
# A Newton pass: (state dimension, heads).
PASSES = {f"Newton pass, {size}": (size, 1) for size in (64, 256, 512, 1024, 2048)}
PASSES["Newton pass, 4 heads of 1024"] = (4096, 4)
CASES = (*RECURRENCES, SCAN, *PASSES)

_FLAGS = ("BIASED", "RESETS", "RAGGED", "PAIRS", "PHASED", "ROW_BETA", "AWARE", "SLOW", "NORM", "DOT")
_INTEGERS = "batch steps chunks size transition_batch transition_time iteration record least most patience count"
_FLOATS = "epsilon threshold dot sine decay relative floor slack rounding rate_limit"
_TYPES = dict.fromkeys(_INTEGERS.split(), "i32") | dict.fromkeys(_FLOATS.split(), "fp32")
_TYPES |= {"reset": "*u8", "cuts": "*u8", "sure": "*u8", "lengths": "*i64", "prefixes": "*i64"}
_TYPES |= {"stopped": "*i32", "integers": "*i32"}


def compile_case(name: str, case: str, *, with_cycles: bool = False) -> dict[str, dict[str, Any]]:
    """Compile the kernels of a case; return for each its shared memory, registers and stack in bytes per thread.

    The stack holds spilled registers, and 32 bytes for the slow path of the sine. Triton must not be in its
    interpreter.

    Args:
        name: The GPU, of `TARGETS`.
        case: One of `CASES` or `EVERY_FLAG`.
        with_cycles: Whether to estimate the cycles of a step; see `support.sass`.
    """
    import torch

    from adptnet.ops import _gpu
    from adptnet.ops.adpt_scan import Form, launch
    from adptnet.ops.adpt_scan import triton as scan
    from adptnet.ops.adpt_step import triton as step
    from adptnet.ops.linear_scan import triton as linear

    target, device = TARGETS[name], torch.device("cuda:0")
    _gpu.shared_memory = lambda _: target.shared
    _gpu.matmul_precision = lambda _: target.precision
    _gpu.is_amd = lambda: target.backend == "hip"

    def build(kernel: Any, options: dict[str, Any], **launched: int) -> dict[str, dict[str, Any]]:
        known = {key: value for key, value in options.items() if key in kernel.arg_names}
        return {kernel.__name__: _measure(kernel, known, target, with_cycles=with_cycles, **launched)}

    recurrences = RECURRENCES | EVERY_FLAG
    if case in recurrences:
        size, heads, flags = recurrences[case]
        form = Form(heads=heads, directions_in_drive=flags.get("GIVEN", False))
        plan = launch.plan_launch(form, size, device)
        assert plan is not None
        options = dict.fromkeys(_FLAGS, False) | {"SOURCE": 0, "RETRACTION": 0, "SAVE": True} | flags
        options |= {"HEADS": heads, "SIZE": size // heads, "PAD": plan.pad, "ROWS": plan.rows}
        options |= {"PRECISION": plan.precision, "SOME": plan.some, "BLOCK": plan.block, "INNER": plan.inner}
        pair = [getattr(scan, f"{plan.kind}_{direction}") for direction in ("forward", "backward")]
        built = [build(kernel, options, num_warps=plan.warps, num_stages=plan.stages) for kernel in pair]
    elif case == SCAN:
        options = {"RESETS": True, "REVERSE": True, "PAIRS": True, "LENGTH": linear.LENGTH, "COLUMNS": linear.COLUMNS}
        options |= {"VARIES": True, "SHARED": False, "ADJOINT": True, "STARTS": True, "NEEDED": True}
        kernels = (linear.summarize_kernel, linear.apply_kernel, linear.apply_backward_kernel)
        built = [build(kernel, options, **linear.OPTIONS) for kernel in kernels]
    else:
        size, heads = PASSES[case]
        options = step.find_options(Form(heads=heads), size, device)
        launched = {key: options.pop(key) for key in ("num_warps", "num_stages")}
        options |= {"RESETS": True, "PAIRS": False, "STATUS": 8, "BIASED": True, "DIAGONAL": True, "RECENT": True}
        options |= {"TOTAL": size, "LENGTH": step.LENGTH, "COLUMNS": step.COLUMNS, "DOUBLINGS": 6, "FIRST": False}
        built = [
            build(step.evaluate_kernel, options, **launched),
            build(step.pull_back_kernel, options | {"SOME": step.count_at_once(options["PAD"])}, **launched),
        ]
        applied = step.find_apply_options(size)
        launched = {key: applied.pop(key) for key in ("num_warps", "num_stages")}
        built.append(build(step.apply_kernel, options | applied, **launched))
        if case == next(iter(PASSES)):  # these do not depend on the size
            built += [build(k, options, num_warps=2, num_stages=1) for k in (step.summarize_kernel, step.carry_kernel)]
            built.append(build(step.converge_kernel, options | {"BLOCK": step.BLOCK}, num_warps=4))
    return {kernel: figures for each in built for kernel, figures in each.items()}


def _measure(
    kernel: Any, constants: dict[str, Any], target: Target, *, with_cycles: bool, **launched: int
) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = _TYPES | ({"decay": "*fp32"} if "charge" in kernel.arg_names else {})  # of a slow memory, not of a peak
    signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget(*target[:3]), options=launched)
    if "cubin" not in made.asm:
        text = made.asm["amdgcn"]
        registers, stack = (
            int(re.search(rf"\.{field}:\s+(\d+)", text)[1]) for field in ("vgpr_count", "private_segment_fixed_size")
        )
        return {"shared": made.metadata.shared, "registers": registers, "stack": stack}
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {"shared": made.metadata.shared}
        found |= {name: int(re.search(rf"{field}:(\d+)", shown)[1]) for name, field in FIELDS.items()}
        if with_cycles:
            from support import sass

            body = sass.find_largest_loop(*sass.disassemble(Path(file.name), tools))
            found["cycles"], found["counts"] = sass.estimate_cycles(body, target.architecture, launched["num_warps"])
    return found


FIELDS = {"registers": "REG", "stack": "STACK"}


def compile_in_process(name: str, cases: list[str], *, with_cycles: bool = False) -> dict[str, dict[str, Any]]:
    """Return the figures of the kernels of each case."""
    found = {}
    for case in cases:
        start = time.perf_counter()
        found[case] = compile_case(name, case, with_cycles=with_cycles)
        print(f"{name} {case}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def render(record: dict[str, Any]) -> str:
    """Return the page of the documentation."""
    lines = [
        "# Compiler figures of the GPU kernels",
        "",
        "What the compilers report for each kernel: KiB of shared memory per block / registers per thread / bytes of",
        "stack per thread. The stack holds spilled registers, and 32 bytes that the sine of a large angle needs.",
        f"Compiled ahead of time by Triton {record['triton']} ({record['ptxas']}), without a GPU:",
        "",
        "```",
        "python tests/support/compiled_kernels.py",
        "```",
        "",
        "Columns are compute capabilities of NVIDIA GPUs, and gfx942 of AMD:",
        "",
        *(f"- {name}: {t.cards}; {t.shared / 1024:g} KiB of shared memory per block" for name, t in TARGETS.items()),
        "",
        "[GPUs](../explanation/gpu.md) describes the kernels; `tests/adptnet/ops/test_triton.py` has the limits.",
    ]
    figures = record["figures"]
    names = [name for name in TARGETS if name in figures]
    for case in CASES:
        lines += ["", f"## {case}", "", f"| kernel | {' | '.join(names)} |"]
        lines.append("| --- |" + " --- |" * len(names))
        kernels = list(dict.fromkeys(kernel for name in names for kernel in figures[name].get(case, {})))
        for kernel in kernels:
            cells = [figures[name].get(case, {}).get(kernel) for name in names]
            shown = ["–" if c is None else f"{c['shared'] / 1024:g} / {c['registers']} / {c['stack']}" for c in cells]
            lines.append(f"| `{kernel}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    """Compile for these GPUs, and write the record and the page."""
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}  # the defaults; Triton warns without
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    versions = []
    for tool in ("ptxas", "ptxas-blackwell"):  # the second for compute capabilities from 10.0
        shown = subprocess.run([tools / tool, "--version"], capture_output=True, text=True, check=True).stdout
        versions.append(f"{tool} {re.search('release ([0-9.]+)', shown)[1]}")
    for name in names or TARGETS:
        found = compile_in_process(name, list(CASES))
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {"figures": {}}
        record |= {"triton": triton.__version__, "ptxas": ", ".join(versions)}
        record["figures"][name] = found
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(render(record))


if __name__ == "__main__":
    main(sys.argv[1:])
