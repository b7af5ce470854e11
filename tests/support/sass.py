"""A static estimate of the time of a GPU kernel, from its machine code: cycles of one pass through its largest loop.

One warp per scheduler issues in order. Stall counts, barriers and wait masks are read from the control bits of each
instruction; a pipe is busy for the cycles that an instruction occupies it, and a result of variable latency is ready
after that of its class. Times of FlashRNN's Triton kernel that its authors published (head sizes 16 to 128, H100) are
1.37 to 1.41 times those of this model, so multiply by 1.4 for a prediction. It compares programs; it measures nothing.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

CALIBRATION = 1.4
LATENCIES = {
    "LDS": 29, "LDSM": 33, "SHFL": 24, "MUFU": 22, "LDL": 38, "LDG": 600, "ATOM": 700, "RED": 50, "I2F": 14, "F2I": 14,
    "F2F": 14, "DMUL": 20, "DFMA": 20, "DADD": 20, "S2R": 20, "S2UR": 20, "R2UR": 10, "POPC": 14, "STS": 20, "STL": 20,
    "STG": 20, "HMMA": 26, "HGMMA": 60, "IMAD": 5, "LDC": 30, "ULDC": 10, "LDGSTS": 30, "CS2R": 8, "VOTE": 10,
    "REDUX": 20,
}  # fmt: skip
LEAST_LATENCY, READ_LATENCY, BARRIER = 14, 12, 30
SHARED_PIPE = {"LDS", "LDSM", "STS", "LDL", "STL", "LDG", "STG", "LDGSTS"}


class Instruction(NamedTuple):
    """An instruction with its control bits."""

    text: str
    stall: int
    writes: int  # the barrier that its result sets; 7 for none
    reads: int  # the barrier that the end of its reads sets
    waits: int  # mask of the barriers it waits for

    @property
    def name(self) -> str:
        """The operation with its modifiers, such as LDS.128."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]


class Estimate(NamedTuple):
    """The estimate of one pass through the largest loop."""

    cycles: float
    counts: Counter[str]  # instructions by operation


def disassemble(cubin: Path, tools: Path) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a kernel, and the position of each label.

    Args:
        cubin: The compiled kernel.
        tools: The folder of nvdisasm, which comes with Triton.
    """
    command = [str(tools / "nvdisasm"), "-c", "-hex", str(cubin)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    text = None
    for line in map(str.strip, shown.splitlines()):
        label = re.match(r"(\.L_x_\d+):", line)
        first = re.match(r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s*/\* 0x[0-9a-f]+ \*/", line)
        second = re.match(r"/\* (0x[0-9a-f]+) \*/", line)
        if label:
            labels[label[1]] = len(found)
        elif first:
            text = first[1].strip()
        elif second and text is not None:
            bits = int(second[1], 16)
            found.append(Instruction(text, bits >> 41 & 15, bits >> 46 & 7, bits >> 49 & 7, bits >> 52 & 63))
            text = None
    return found, labels


def find_largest_loop(code: list[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """Return the instructions of the largest loop, without the slow path of the sine.

    Args:
        code, labels: As `disassemble` returns them.
    """
    loops = []
    for position, instruction in enumerate(code):
        target = re.search(r"BRA.*?`\((\.L_x_\d+)\)", instruction.text)
        if target and labels.get(target[1], position + 1) <= position:
            loops.append((position - labels[target[1]], labels[target[1]], position + 1))
    _, start, stop = max(loops)
    body = code[start:stop]
    skipped: set[int] = set()
    for position, instruction in enumerate(body):
        if "LDG.E.CONSTANT" in instruction.text:  # reads the table for the reduction of large angles
            before, after = position, position
            while before > 0 and not body[before].name.startswith(("BSSY", "BRA")):
                before -= 1
            while after < len(body) - 1 and not body[after].name.startswith("BSYNC"):
                after += 1
            skipped.update(range(before + 1, after))
    return [instruction for position, instruction in enumerate(body) if position not in skipped]


def estimate_cycles(body: list[Instruction], capability: int, warps: int) -> Estimate:
    """Estimate the cycles of one pass through a loop.

    Args:
        body: Its instructions.
        capability: The compute capability, such as 80.
        warps: Warps of a program, of which one scheduler in four has a share.
    """
    share = max(1, warps // 4)
    counts: Counter[str] = Counter()
    ready, free, now = [0.0] * 6, Counter[str](), 0.0
    for instruction in body:
        name = instruction.name
        base = name.split(".")[0]
        counts[base] += 1
        now = max([now, *(ready[b] for b in range(6) if instruction.waits >> b & 1)])
        pipe, busy = find_pipe(name, base, capability, warps, share)
        now = issue = max(now, free[pipe])
        free[pipe] = issue + busy
        latency = LATENCIES.get(base, 0) + (3 if ".128" in name and base in ("LDS", "LDSM", "LDL") else 0)
        if instruction.writes < 6:
            ready[instruction.writes] = max(ready[instruction.writes], issue + max(latency, LEAST_LATENCY))
        if instruction.reads < 6:
            ready[instruction.reads] = max(ready[instruction.reads], issue + READ_LATENCY)
        now = max(issue + (BARRIER if base == "BAR" else 0), now) + max(1, instruction.stall)
    return Estimate(now, counts)


def find_pipe(name: str, base: str, capability: int, warps: int, share: int) -> tuple[str, float]:
    """Return the pipe of an operation, and for how many cycles it is busy with one of each warp of a scheduler."""
    if base in ("FFMA", "FMUL", "FADD"):
        return "float32", (2 if capability == 80 else 1) * share
    if base in ("MUFU", "I2F", "F2I", "F2F", "POPC"):
        return "special", 8 * share
    if base in SHARED_PIPE:
        return "memory", (4 if ".128" in name else 2 if ".64" in name else 1) * warps
    if base == "SHFL":
        return "memory", warps
    if base == "HMMA":
        return "matrix", (4 if "1684" in name else 8) * (0.55 if capability >= 90 else 1.0) * share
    if base in ("DMUL", "DFMA", "DADD"):
        return "float64", (4 if capability in (80, 90) else 32) * share
    return "integer", 2 * share
