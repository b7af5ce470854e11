"""One training step in a process of its own: prints the bytes that it took beyond what was there before.

python -m adptnet_lab.benchmarks.subjects.peak lean 16 4096 64
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

from ..subject import Size
from .problem import Problem

__all__ = ["KINDS", "main"]


def _conv(size: Size) -> Callable[[], object]:
    layer, x = ADPTNet(size.state), torch.randn(size)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return lambda: torch.autograd.grad(layer(x, solver=solvers.ConvDEER())[0].sum(), parameters)


KINDS: dict[str, Callable[[Size], Callable[[], object]]] = {
    "saving": lambda size: Problem(size).training,
    "lean": lambda size: functools.partial(Problem(size).training, lean=True),
    "loop in torch": lambda size: Problem(size).some_steps(loop, size.steps)[1],
    "layer by Conv-DEER": _conv,
}


def main(kind: str, batch: str, steps: str, state: str) -> None:
    torch.set_num_threads(1)
    size = Size(int(batch), int(steps), int(state))
    KINDS[kind](size._replace(steps=2))()  # builds and loads what is needed
    run = KINDS[kind](size)
    _forget_peak()
    before = _kilobytes("VmRSS")
    run()
    print((_kilobytes("VmHWM") - before) * 1024)


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak is then that since the start, if that was higher


def _kilobytes(name: str) -> int:
    try:
        told = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        told = None
    if told is None:
        sys.exit("memory is read from /proc/self/status, which this system does not have")
    return int(told[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
