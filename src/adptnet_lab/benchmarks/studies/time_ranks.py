"""Two ranks over time against one process a rank: the cost of splitting a solve.

    python -m adptnet_lab.benchmarks.studies.time_ranks [--repeats 9]

Both processes run at once in either case: each solves its own half of the sequence alone, or both solve the whole
sequence with `TimeParallel`. So the work per process is the same, and the ratio of the wall times is what sending,
waiting and the second scan cost. The two cases alternate. It also prints how often the ranks send tensors, and the
iterations.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adptnet import ADPTNet, cells, solvers
from adptnet.solvers.base import Solution, Solver
from adptnet.solvers.distributed import TimeParallel
from adptnet.solvers.newton import Newton
from adptnet.solvers.ranks import Ranks

BATCH, STEPS, WIDTH = 8, 2048, 32  # of the whole sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of each case, alternating")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure, (folder, options.repeats), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]


def _cases() -> Iterator[tuple[str, nn.Module, Newton]]:
    layer = ADPTNet.paper(WIDTH, beta=0.0125)
    yield "ADPT, ConvDEER", layer.cell, solvers.ConvDEER()
    yield "ADPT, QuasiDEER", layer.cell, solvers.QuasiDEER()
    yield "GRU, QuasiDEER", cells.from_torch(nn.GRUCell(WIDTH, WIDTH)), solvers.QuasiDEER()


def _measure(rank: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    sent = [0]
    Ranks.all_gather = functools.partialmethod(_gather_and_count, Ranks.all_gather, sent)  # type: ignore[assignment, method-assign]
    if rank == 0:
        print(f"{'case':<26} alone    split  ratio (least, most)  sent  iterations")
    for name, cell, newton in _cases():
        inputs = torch.randn(BATCH, STEPS, WIDTH).chunk(2, 1)[rank].contiguous()
        for training in (False, True):
            times: list[tuple[float, float]] = []
            for _ in range(repeats + 1):
                alone, _ = _time(newton, cell, inputs, training)
                sent[0] = 0
                split, solution = _time(TimeParallel(newton), cell, inputs, training)
                times.append((alone, split))
            ratios = [split / alone for alone, split in times[1:]]
            alone, split = (1e3 * statistics.median(column) for column in zip(*times[1:], strict=True))
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
            if rank == 0:
                what = f"{name}, {'training' if training else 'forward'}"
                print(
                    f"{what:<26} {alone:4.0f} ms {split:4.0f} ms {spread}  {sent[0]}  {int(solution.iterations.max())}"
                )
    dist.destroy_process_group()


def _time(solver: Solver, cell: nn.Module, inputs: Tensor, training: bool) -> tuple[float, Solution]:
    """Return the seconds of a solve, with its backward pass in training, and the solution."""
    dist.barrier()
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        solution = solver(cell, inputs)
        if training:
            solution.states.square().mean().backward()
    return time.perf_counter() - start, solution


def _gather_and_count(ranks: Ranks, gather: object, sent: list[int], values: Tensor) -> list[Tensor]:
    sent[0] += 1
    every: list[Tensor] = gather(ranks, values)  # type: ignore[operator]
    return every


if __name__ == "__main__":
    main()
