"""Run one training step and print its peak memory in bytes, minus the memory in use just before it.

python -m adptnet_lab.benchmarks.suite.peak_memory lean 16 4096 64
"""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from adptnet import solvers
from adptnet.nn import ADPTNet
from adptnet.ops.adpt_scan.reference import adpt_scan as loop

from ..benchmark import Size
from .workload import RecurrenceWorkload

__all__ = ["KINDS", "main"]


def _train_with_conv_deer(size: Size) -> Callable[[], object]:
    layer, x = ADPTNet.paper(size.state), torch.randn(size)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return lambda: torch.autograd.grad(layer(x, solver=solvers.ConvDEER())[0].sum(), parameters)


KINDS: dict[str, Callable[[Size], Callable[[], object]]] = {
    "saving": lambda size: RecurrenceWorkload(size).training,
    "lean": lambda size: functools.partial(RecurrenceWorkload(size).training, lean=True),
    "loop in torch": lambda size: RecurrenceWorkload(size).first_steps(loop, size.steps)[1],
    "layer by Conv-DEER": _train_with_conv_deer,
}


def main(kind: str, batch: str, steps: str, state: str) -> None:
    """Print the peak memory of a training step.

    Args:
        kind: One of `KINDS`.
        batch: The number of sequences.
        steps: The number of steps.
        state: The state dimension.
    """
    torch.set_num_threads(1)
    size = Size(int(batch), int(steps), int(state))
    KINDS[kind](size._replace(steps=2))()  # compiles and loads everything that is needed
    run = KINDS[kind](size)
    _reset_peak()
    before = _read_kilobytes("VmRSS")
    run()
    print((_read_kilobytes("VmHWM") - before) * 1024)


def _reset_peak() -> None:
    """Reset the recorded peak memory of this process, where the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak is then that since the start of the process


def _read_kilobytes(name: str) -> int:
    """Return a memory size in kilobytes from /proc/self/status."""
    try:
        field = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        field = None
    if field is None:
        sys.exit("memory is read from /proc/self/status, which this system does not have")
    return int(field[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
