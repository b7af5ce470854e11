"""The diagonal scan against `copy_` of the same bytes, one read and one written, which is what memory allows.

Single thread, CPU time, the smallest of interleaved repeats, all sides in one process:

    python benchmarks/linear_scan.py [--repeats 7]
"""

import argparse
import os
import platform
import time
from collections.abc import Callable

import torch

import adptnet
from adptnet.ops.linear_scan import chunked, linear_scan

SIZES = [(64, 4096, 128), (512, 1024, 64), (1, 524288, 64), (16, 8192, 256), (1000, 335, 100), (8, 1024, 128)]


@torch.no_grad()
def sides(batch: int, steps: int, size: int) -> dict[str, Callable[[], object]]:
    offset, out, transition = torch.randn(batch, steps, size), torch.empty(batch, steps, size), torch.rand(size) * 0.9
    return {
        "copy": lambda: out.copy_(offset),
        "scan": lambda: linear_scan(transition, offset),
        "in place": lambda: linear_scan(transition, offset, overwrite=True),
        "torch program": lambda: chunked.linear_scan(transition, offset),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{platform.machine()}, {platform.processor() or platform.system()}, {os.cpu_count()} cores, load {load:.1f}")
    print(f"torch {torch.__version__}, adptnet {adptnet.__version__}, {adptnet.backends()['linear_scan']}")
    for shape in SIZES:
        torch.manual_seed(0)
        runs = sides(*shape)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats + 1):  # the first warms up
            for name, run in runs.items():
                start = time.process_time()
                run()
                times[name].append(time.process_time() - start)
        least = {name: min(each[1:]) for name, each in times.items()}
        shown = "  ".join(f"{name} {1e3 * value:.2f} ms ({value / least['copy']:.2f})" for name, value in least.items())
        print(f"batch {shape[0]}, steps {shape[1]}, size {shape[2]}: {shown}")


if __name__ == "__main__":
    main()
