"""Two ranks over time against one process a rank: the cost of splitting a solve.

    python -m adptnet_lab.benchmarks.studies.time_ranks [--repeats 9]

Both processes run at once in either case: each solves its own half of the sequence alone, or both solve the whole
sequence with `TimeParallel`. So a process has as many steps and threads (one) in both, and the ratio of the wall times
is what sending, waiting and the second scan cost. The two cases alternate, and times are those of the slower rank. The
ratio of the processor times is what a split solve computes more, and depends less on what else the machine runs. It
also prints how often the ranks send tensors, and the iterations of both cases.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adptnet import ADPTNet, cells, solvers
from adptnet.solvers.base import Solver
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
        print(f"{'case':<26} alone    split  ratio (least, most)  processor  sent  iterations alone, split")
    for name, cell, newton in _cases():
        inputs = torch.randn(BATCH, STEPS, WIDTH).chunk(2, 1)[rank].contiguous()
        for training in (False, True):
            times: list[tuple[Cost, Cost]] = []
            for _ in range(repeats + 1):
                alone = _time(newton, cell, inputs, training)
                sent[0] = 0
                times.append((alone, _time(TimeParallel(newton), cell, inputs, training)))
                count = sent[0]
            ratios = [split.wall / alone.wall for alone, split in times[1:]]
            processor = statistics.median(split.processor / alone.processor for alone, split in times[1:])
            alone_ms, split_ms = (
                1e3 * statistics.median(cost.wall for cost in case) for case in zip(*times[1:], strict=True)
            )
            if rank == 0:
                what = f"{name}, {'training' if training else 'forward'}"
                print(
                    f"{what:<26} {alone_ms:4.0f} ms {split_ms:4.0f} ms "
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})  {processor:.2f}  "
                    f"{count}  {times[-1][0].iterations:.0f}, {times[-1][1].iterations:.0f}"
                )
    dist.destroy_process_group()


class Cost(NamedTuple):
    """The cost of a solve on the rank where it is largest."""

    wall: float  # seconds
    processor: float  # seconds of all threads
    iterations: float


def _time(solver: Solver, cell: nn.Module, inputs: Tensor, training: bool) -> Cost:
    """Return the cost of a solve, with its backward pass in training."""
    dist.barrier()
    start, processor_start = time.perf_counter(), time.process_time()
    with torch.set_grad_enabled(training):
        solution = solver(cell, inputs)
        if training:
            solution.states.square().mean().backward()
    wall, processor = time.perf_counter() - start, time.process_time() - processor_start
    cost = torch.tensor([wall, processor, float(solution.iterations.max())], dtype=torch.float64)
    dist.all_reduce(cost, dist.ReduceOp.MAX)
    return Cost(*cost.tolist())


def _gather_and_count(ranks: Ranks, gather: object, sent: list[int], values: Tensor) -> list[Tensor]:
    sent[0] += 1
    every: list[Tensor] = gather(ranks, values)  # type: ignore[operator]
    return every


if __name__ == "__main__":
    main()
