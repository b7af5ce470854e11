"""The measurements of one card as a JSON file, and as a row for the documentation."""

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adptnet._io.files import write_atomic
from adptnet.errors import AdptnetError, WrongResultError
from adptnet.ops import _gpu

from ..._runtime import describe_environment
from . import kernel_checks, timings
from .kernel_checks import Check, check_kernels
from .timings import Time, time_device

__all__ = ["describe_card", "format_row", "run_gpu"]


def run_gpu(
    folder: Path,
    minutes: float,
    *,
    device: torch.device | None = None,
    checked: kernel_checks.Sizes = kernel_checks.SIZES,
    timed: Sequence[tuple[int, int, int]] = timings.SIZES,
) -> Path:
    """Check all kernels on a GPU, time them if every check passes, and write `gpu.json`.

    Args:
        folder: Where to write it.
        minutes: No measurement starts after this time.
        device: The GPU; the current one if not given.
        checked: Sizes of the checks.
        timed: Sizes of the measurements.

    Raises:
        AdptnetError: There is no GPU, or no Triton.
        WrongResultError: A kernel disagrees with its reference. The file was written, without times.
    """
    if device is None and not torch.cuda.is_available():
        raise AdptnetError("adptnet bench gpu needs a GPU: torch.cuda.is_available() is False. See `adptnet kernels`.")
    device = device or torch.device("cuda", torch.cuda.current_device())
    missing = _gpu.explain_unavailable(device.type)
    if missing is not None:
        raise AdptnetError(f"adptnet bench gpu needs the Triton kernels: {missing}")
    until = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**describe_card(device), "checks": [], "times": []}
    path, failed = folder / "gpu.json", []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for check in check_kernels(device, checked):
            result["checks"].append({**check._asdict(), "passed": check.passed})
            print(_format_check(check), flush=True)
            failed += [] if check.passed else [check]
        for measured in [] if failed else time_device(device, until, timed):
            result["times"].append(measured._asdict())
            print(_format_time(measured), flush=True)
    write_atomic(path, (json.dumps(result, indent=1, allow_nan=True) + "\n").encode())
    print(f"wrote {path}\n{format_row(result)}")
    if failed:
        shown = "; ".join(_format_check(check) for check in failed)
        raise WrongResultError(f"not timed, because {len(failed)} checks failed: {shown}. Please report {path}.")
    return path


def describe_card(device: torch.device) -> dict[str, Any]:
    """Return the card, the driver and the versions.

    Args:
        device: The device.
    """
    found: dict[str, Any] = {"versions": describe_environment(), "card": str(device), "driver": None}
    try:
        import triton

        found["versions"]["triton"] = triton.__version__
    except ImportError:
        pass
    found["versions"]["cuda"] = torch.version.cuda or torch.version.hip
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "shared_memory": _gpu.shared_memory(str(device)),
            "driver": _find_driver(),
        }
    return found


def format_row(result: dict[str, Any]) -> str:
    """Return the row of a card for the table in docs/explanation/gpu.md.

    Args:
        result: The content of `gpu.json`.
    """
    versions, checks = result["versions"], result["checks"]
    times = {(row["side"], *row["size"]): row["training"] for row in result["times"]}
    sides = ("ADPTNet", "ADPTNet, Conv-DEER", "nn.GRU")
    size = next((tuple(row["size"]) for row in result["times"]), None)
    shown = [times.get((side, *(size or ()))) for side in sides]
    cells = [
        result["card"],
        f"{result['driver'] or '-'}, torch {versions['torch']}, Triton {versions.get('triton', '-')}",
        f"{sum(check['passed'] for check in checks)} of {len(checks)}",
        " x ".join(map(str, size)) if size else "-",
        *("-" if value is None else f"{value:.3g}" for value in shown),
    ]
    return "| " + " | ".join(cells) + " |"


def _format_check(check: Check) -> str:
    verdict = "ok" if check.passed else "WRONG"
    where = " x ".join(map(str, check.size))
    return (
        f"{verdict}: {check.kernel}, {check.what}, {where}: {check.quantity} has an error of {check.error:.1e}, "
        f"{check.allowed:.1e} allowed"
    )


def _format_time(measured: Time) -> str:
    where = f"{measured.side}, {' x '.join(map(str, measured.size))}"
    if measured.forward is None or measured.training is None:
        return f"{where}: not measured, {measured.skipped}"
    return f"{where}: forward {measured.forward:.3g} ms, training {measured.training:.3g} ms"


def _find_driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return found.splitlines()[0].strip() if found.strip() else None
