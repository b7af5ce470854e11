"""BanaanKiamanesh/Para-Seq against the solvers of adptnet on one GRU.

    git clone https://github.com/BanaanKiamanesh/Para-Seq
    python -m adptnet_lab.benchmarks.peers.para_seq --repository Para-Seq --size 1 1024 16

It is not a package: --repository or the environment variable PARA_SEQ names its folder. Its gradients are those of the
unrolled iterations. Tested with its newest public commit of June 2026.
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from .gru_comparison import GRUProblem, Implementation, compare


def take_repository(arguments: list[str]) -> Path:
    """Return the folder of Para-Seq and remove --repository from the arguments; exit with a hint if there is none.

    Args:
        arguments: The command line; changed in place.
    """
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


def make_implementations(problem: GRUProblem) -> list[Implementation]:
    """Return its DEER and its quasi-DEER.

    Args:
        problem: The GRU and its input.
    """
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
        counts: list[int] = []

        def run(x: Tensor, quasi: bool = quasi, counts: list[int] = counts) -> Tensor:
            states: Tensor
            states, info = deer_alg_batched(
                step, start, torch.zeros_like(x), x, num_iters=x.shape[1], tol=1e-6, quasi=quasi, strict_tol=True
            )
            counts.append(info["num_iters"])
            return states

        found.append(problem.from_torch(f"Para-Seq {name}", run, lambda counts=counts: counts[-1]))  # type: ignore[misc]
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(take_repository(sys.argv).resolve()))
    compare(make_implementations, __doc__)
