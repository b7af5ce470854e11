"""Time of the diagonal scan, compared with `copy_` of the same bytes (the limit set by memory) and other libraries."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from adptnet.ops.linear_scan import chunked, linear_scan
from adptnet.ops.lti_convolution import lti_convolution

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from ..machine import last_cache_size
from ..timing import Side

__all__ = ["SCANS"]


@torch.no_grad()
def _make_case(size: Size, fast: bool) -> Case:
    torch.manual_seed(0)
    offset, out = torch.randn(size), torch.empty(size)
    constant = torch.rand(size.state) * 0.9
    varying = constant.expand(size).contiguous()
    expected = linear_scan(constant, offset)
    skipped: dict[str, str] = {}
    others = {
        "torch program": lambda: chunked.linear_scan(constant, offset),
        "convolution by FFT": lambda: lti_convolution(constant, offset),
        "associative_scan of torch": _make_associative_scan(varying, offset, skipped),
        "accelerated_scan.ref": _make_accelerated_scan(varying, offset, skipped),
    }
    sides = [
        Side("copy_", lambda: out.copy_(offset)),
        Side("scan, constant", lambda: linear_scan(constant, offset)),
        Side("scan, constant, in place", lambda: linear_scan(constant, out, overwrite=True)),
        Side("scan, varying", lambda: linear_scan(varying, offset)),
    ]
    numbers = {}
    for name, run in others.items():
        if run is None:
            continue
        numbers[f"{name}: distance from ours"] = float((run() - expected).abs().max())
        sides.append(Side(name, _disable_gradients(run), threads=1))
    goals = []
    cache = last_cache_size()
    if cache is not None and 4 * size.elements >= 4 * cache:  # bytes: four caches, so that copy_ is limited by memory
        goals.append(Goal("constant scan / copy_", lambda f: f.cpu("scan, constant") / f.cpu("copy_"), at_most=1.5))
    return Case(sides, goals, numbers, skipped)


def _disable_gradients(run: Any) -> Any:
    def run_without_gradients() -> None:
        with torch.no_grad():
            run()

    return run_without_gradients


def _make_associative_scan(transition: Tensor, offset: Tensor, skipped: dict[str, str]) -> Any:
    try:
        from torch._higher_order_ops import associative_scan
    except ImportError as error:
        skipped["associative_scan of torch"] = f"this torch has none ({error})"
        return None

    def combine(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return before[0] * after[0], after[0] * before[1] + after[1]

    def run() -> Tensor:
        states: Tensor = associative_scan(combine, (transition, offset), dim=1, combine_mode="generic")[1]
        return states

    return run


def _make_accelerated_scan(transition: Tensor, offset: Tensor, skipped: dict[str, str]) -> Any:
    if importlib.util.find_spec("accelerated_scan") is None:
        skipped["accelerated_scan.ref"] = "accelerated-scan is not installed: pip install accelerated-scan"
        return None
    from accelerated_scan.ref import scan

    gates, tokens = (t.mT.contiguous() for t in (transition, offset))  # it takes time as the last dimension

    def run() -> Tensor:
        states: Tensor = scan(gates, tokens)
        return states.mT

    return run


SCANS = Benchmark(
    "The diagonal scan compared with copy_ of the same bytes and with other implementations of the same recurrence.",
    tuple(Size(*s) for s in [(64, 4096, 128), (512, 1024, 64), (1, 524288, 64), (1000, 335, 100), (8, 1024, 128)]),
    (Size(8, 256, 64),),
    ("linear_scan",),
    _make_case,
)
