"""BanaanKiamanesh/Para-Seq beside our solvers on one GRU.

    git clone https://github.com/BanaanKiamanesh/Para-Seq
    python -m adptnet_lab.benchmarks.peers.para_seq --repository Para-Seq --size 1 1024 16

It is no package: its folder is named by --repository or by the environment variable PARA_SEQ. Its gradients are those
of the iterations, kept and differentiated one after another. Run here with its newest public commit of June 2026.
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from .side_by_side import Peer, Problem, compare


def found_in(arguments: list[str]) -> Path:
    """Takes --repository from the arguments; says what to do where there is none."""
    folder = os.environ.get("PARA_SEQ")
    if "--repository" in arguments[:-1]:
        place = arguments.index("--repository")
        folder = arguments[place + 1]
        del arguments[place : place + 2]
    if folder is None or not (Path(folder) / "src" / "algos" / "DEER.py").is_file():
        if not {"-h", "--help"} & set(arguments):
            sys.exit(
                f"{folder or 'no folder'} given, and Para-Seq is needed. Run: git clone "
                "https://github.com/BanaanKiamanesh/Para-Seq, and pass --repository Para-Seq"
            )
        folder = "."
    return Path(folder)


def peers(problem: Problem) -> list[Peer]:
    from src.algos import deer_alg_batched

    into, inside, bias_in, bias_inside = problem.weights
    start = torch.zeros(problem.x.shape[0], problem.x.shape[-1])

    def step(state: Tensor, x: Tensor) -> Tensor:
        reset, update, new = (into @ x + bias_in).chunk(3, -1)
        reset_inner, update_inner, new_inner = (inside @ state + bias_inside).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_inner) * new_inner)
        update = torch.sigmoid(update + update_inner)
        return (1 - update) * new + update * state

    found = []
    for name, quasi in (("DEER", False), ("quasi-DEER", True)):
        told = {}

        def run(x: Tensor, quasi=quasi, told=told) -> Tensor:
            states, info = deer_alg_batched(
                step, start, torch.zeros_like(x), x, num_iters=x.shape[1], tol=1e-6, quasi=quasi, strict_tol=True
            )
            told["iterations"] = info["num_iters"]
            return states

        peer = problem.of_torch(f"Para-Seq {name}", run)
        peer.iterations = lambda told=told: told.get("iterations")
        found.append(peer)
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(found_in(sys.argv).resolve()))
    compare(peers, __doc__)
