"""Measure the effect of one change of the layer on state tracking: the table at the end of docs/how-to/choose.md.

Trains the quickstart's model on the S3 word problem at length 8, with β = 1, an S4D-Real spectrum with half of the
eigenvalues negated, the LRU gain and a gate, and each variant with one choice changed. Prints the accuracy in % at 1, 2
and 4 times that length. Half a minute to a minute per variant on one core:

    python examples/state_tracking.py                          # all variants
    python examples/state_tracking.py --only product relu      # some of them
"""

import argparse

import torch

from adptnet import cells, conjugates, directions, drive, nn, projections, retractions, spectra
from adptnet_lab.tasks import WordProblem
from adptnet_lab.training import TrainConfig, evaluate, train

BASE = {
    "beta": 1.0,
    "spectrum": spectra.Negative(spectra.S4DReal(), 0.5),
    "gain": drive.LRU(),
    "gate": drive.SoftplusGate(),
}
CHANGES = {
    "none": {},
    "product": {"conjugate": conjugates.Product(steps=2)},
    "beta0.125": {"beta": 0.125},
    "beta4": {"beta": 4.0},
    "cayley4": {"beta": 4.0, "retraction": retractions.Cayley()},
    "taylor": {"conjugate": conjugates.Taylor()},
    "relu": {"direction": directions.FromState(relu=True)},
    "layer_norm": {"direction": directions.FromState(layer_norm=True)},
    "dot": {"direction": directions.FromState(dot=0.5)},
    "heads": {"direction": directions.FromState(heads=8)},
    "input": {"direction": directions.FromInput()},
    "input4": {"direction": directions.FromInput(), "beta": 4.0},
    "orthogonal": {"projection": projections.Orthogonal()},
    "low_param": {"projection": projections.LowParam(factors=(8, 8), rank=8)},
    "low_rank": {"projection": projections.LowRank(rank=8)},
    "kronecker": {"projection": projections.Kronecker(factors=(8, 8))},
    "ema": {"gain": drive.EMA()},
    "linspace": {"spectrum": spectra.Linspace()},
    "plus_minus": {"spectrum": spectra.ContinuousPM()},
    "sparse": {"spectrum": spectra.Negative(spectra.Sparse(spectra.S4DReal(), 0.75), 0.5)},
    "complex": {"spectrum": spectra.S4DInv()},
    "rope": {"rope": drive.RoPE()},
    "rotation_aware": {"rotation_aware": True},
}


def main(names: list[str], seed: int = 0, steps: int = 1500, size: int = 2048) -> dict[str, list[float]]:
    """Train the named variants and return their accuracies in %, on `size` new sequences of each length."""
    task = WordProblem("S3", length=8)
    accuracies = {}
    for name in names:
        layer = nn.LayerSpec(cells.ADPTSpec(64, **{**BASE, **CHANGES[name]}))
        torch.manual_seed(seed)
        model = nn.ModelSpec(nn.BlockSpec(layer, norm="batch", dropout=0.05), vocabulary=task.vocabulary).build()
        train(model, task, TrainConfig(seed=seed, steps=steps))
        scores = evaluate(model, task, [8, 16, 32], size=size)
        accuracies[name] = [100 * float(score["accuracy"]) for score in scores.values()]
        print(f"{name:<15}" + "".join(f"{accuracy:7.1f}" for accuracy in accuracies[name]), flush=True)
    return accuracies


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="Measure the effect of one change of the layer on state tracking.")
    parser.add_argument("--only", nargs="+", choices=list(CHANGES), default=list(CHANGES), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.only, arguments.seed)
