"""Spoken digits of speakers never heard: SpikingADPTNet against SiLIF, LIF, adLIF and a GRU of as many parameters.

Needs `audiomnist_cochlea_frames.npz` (1800 digits of 60 speakers through the cochlea, frames of 4 ms) in the folder
that ADPTNET_DATA names, or its path. Two thresholds are tried for SiLIF and for SpikingADPTNet on 9 of the training
speakers 1 to 45, then β for the latter; rate, dropout and epochs are the same for all. Then every network learns from
all 45 and is tested on speakers 46 to 60. A row is written after every run, and runs that have a row are skipped, so
the same command goes on after a cut; the last one prints the table.

    python -m adptnet_lab.benchmarks.studies.spoken_digits                       # about 20 minutes of one core
    python -m adptnet_lab.benchmarks.studies.spoken_digits --minutes 10          # begin no run after ten minutes
"""

import argparse
import dataclasses
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from adptnet import analysis, cells, nn
from adptnet._io.files import write_whole
from adptnet.nn import SpikingModel, SpikingModelSpec
from adptnet_lab import tasks, training
from adptnet_lab.baselines.catalog import baseline, matched, parameter_count
from adptnet_lab.tasks.download import folders
from adptnet_lab.training.keepers import Nowhere

FILE = "audiomnist_cochlea_frames.npz"
MERGED = 5  # frames of 4 ms that are added together
DT = 0.004 * MERGED
WIDTH, RANK = 128, 10
BATCH = 54  # 1080 and 1350 recordings are 20 and 25 of them
BETAS = (0.0, 0.0125, 0.125, 0.5)
USUAL = {"rate": 5e-3, "dropout": 0.25, "epochs": 20}
CANDIDATES = [{**USUAL, "threshold": threshold} for threshold in (1.0, 0.5)]


def task_of(path: Path, stage: str) -> tasks.EventFrames:
    held = 0.2 if stage == "choose" else 0.0  # of 45 speakers
    return tasks.EventFrames(
        str(path), test_speakers=tuple(range(46, 61)), validation=held, merge=(MERGED, 1), masked=False
    )


def model_of(network: str, setting: dict[str, Any]) -> Any:
    """The spec of a network of SiLIF's number of parameters, or as near to it as widths go."""
    dropout = setting["dropout"]
    common = {"input_size": 140, "output_size": 10, "dropout": dropout}
    silif = nn.silif_for_speech(WIDTH, dt=DT, **common)
    if network == "silif":
        made = dataclasses.replace(silif, neuron=cells.SiLIF(WIDTH, dt=DT, threshold=setting["threshold"]))
    elif network == "spiking-adpt":
        chosen = {"beta": setting["beta"], "threshold": setting["threshold"]}
        made = nn.spiking_adpt_for_speech(WIDTH, rank=RANK, dt=DT, **chosen, **common)
    elif network == "gru":

        def block(width: int) -> Any:
            return nn.ModelSpec(nn.BlockSpec(baseline("gru", width), dropout=dropout), 2, None, 140, 10, "mean")

        return matched(block, parameter_count(silif))
    else:
        neuron = {"lif": cells.LIF, "adlif": cells.AdLIF}[network]
        made = matched(lambda width: SpikingModelSpec(neuron(width), 140, 10, dropout=dropout), parameter_count(silif))
    return dataclasses.replace(made, momentum=0.1)


class Curve(Nowhere):
    """Keeps the accuracies on validation data."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        if "validation" in numbers:
            self.accuracies += [each["accuracy"] for each in numbers["validation"].values()]


def run(path: Path, point: dict[str, Any]) -> dict[str, Any]:
    """Trains one network and returns its row."""
    task, setting, seed = task_of(path, point["stage"]), point["setting"], point["seed"]
    epoch = task.training_size // BATCH
    settings = training.TrainConfig(
        steps=epoch * setting["epochs"],
        batch_size=BATCH,
        learning_rate=setting["rate"],
        optimiser=training.Adam(),
        schedule=training.Cosine(warmup=0.1),
        clip=None,
        seed=seed,
        evaluate_every=5 * epoch if point["stage"] == "choose" else None,
        select="last",
    )
    torch.manual_seed(seed)
    spec, curve = model_of(point["network"], setting), Curve()
    model, begun, wall = spec.build(), time.process_time(), time.monotonic()
    losses = training.train(model, task, settings, keeper=curve).losses
    row = {**point, "parameters": parameter_count(spec), "loss": sum(losses[-epoch:]) / epoch}
    row["cpu_seconds_an_epoch"] = (time.process_time() - begun) / setting["epochs"]
    row["seconds"] = time.monotonic() - wall
    if point["stage"] == "choose":
        return {**row, "validation": curve.accuracies}
    row["accuracy"] = training.evaluate(model, task, (None,), size=450)[task.length]["accuracy"]
    if isinstance(model, SpikingModel):
        batch = next(task.evaluation("test", 450, 450))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", analysis.ActivityWarning)
            cost = analysis.efficiency(model, batch.inputs)
        row["rates"] = [layer.rate for layer in cost.layers]
        row["additions"] = sum(layer.synaptic_operations for layer in cost.layers) + cost.readout_operations
        row["direction_macs"] = sum(layer.direction_macs for layer in cost.layers)
        row["energy"] = cost.energy
    return row


def points(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is to be run, as far as the rows say it; those of the test when everything is chosen."""
    turning = [{**candidate, "beta": 0.125} for candidate in CANDIDATES]
    for network, settings in (("silif", CANDIDATES), ("spiking-adpt", turning)):
        yield from ({"stage": "choose", "network": network, "setting": each, "seed": 0} for each in settings)
    silif, best = chosen(rows, "silif", CANDIDATES), chosen(rows, "spiking-adpt", turning)
    if silif is None or best is None:
        return
    betas = [{**best, "beta": beta} for beta in BETAS]
    yield from ({"stage": "choose", "network": "spiking-adpt", "setting": each, "seed": 0} for each in betas)
    final = chosen(rows, "spiking-adpt", betas)
    if final is None:
        return
    tested = [("silif", silif, 5), *(("spiking-adpt", each, 5 if each == final else 2) for each in betas)]
    tested += [(network, USUAL, 2) for network in ("lif", "adlif", "gru")]
    for network, setting, seeds in sorted(tested, key=lambda each: -each[2]):  # those of five seeds first
        yield from ({"stage": "test", "network": network, "setting": setting, "seed": seed} for seed in range(seeds))


def chosen(rows: list[dict[str, Any]], network: str, settings: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The setting with the best accuracy on validation speakers at its end; None while some have not run."""
    ends = [found["validation"][-1] if (found := row_of(rows, "choose", network, s)) else None for s in settings]
    return None if None in ends else settings[ends.index(max(ends))]


def row_of(rows: list[dict[str, Any]], stage: str, network: str, setting: Any, seed: int = 0) -> Any:
    wanted = {"stage": stage, "network": network, "setting": setting, "seed": seed}
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)


def table(rows: list[dict[str, Any]]) -> None:
    print("| network | β | parameters | accuracy | seeds | spikes | additions | K, V MACs | CPU s an epoch |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["stage"] == "test":
            groups.setdefault(json.dumps([row["network"], row["setting"]]), []).append(row)
    for group in groups.values():
        scores = [row["accuracy"] for row in group]
        spread = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""

        def mean(name: str, group: list[dict[str, Any]] = group) -> float:
            return statistics.fmean(row[name] for row in group)

        spiking = "rates" in group[0]
        spikes = " / ".join(f"{statistics.fmean(r['rates'][i] for r in group):.3f}" for i in (0, 1)) if spiking else "—"
        work = f"{mean('additions'):,.0f} | {mean('direction_macs'):,.0f}" if spiking else "— | —"
        beta = group[0]["setting"].get("beta", "—")
        print(
            f"| {group[0]['network']} | {beta} | {group[0]['parameters']:,} | {mean('accuracy'):.3f}{spread} | "
            f"{len(group)} | {spikes} | {work} | {mean('cpu_seconds_an_epoch'):.1f} |"
        )


def main(data: Path | None, output: Path, minutes: float) -> None:
    torch.set_num_threads(1)
    path = data or next((folder / FILE for folder in folders() if (folder / FILE).exists()), None)
    if path is None:
        raise SystemExit(f"{FILE} is not in {' or '.join(map(str, folders()))}. Set ADPTNET_DATA, or pass --data FILE.")
    begun = time.monotonic()
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    while True:
        left = [p for p in points(rows) if row_of(rows, p["stage"], p["network"], p["setting"], p["seed"]) is None]
        if not left or time.monotonic() - begun > 60 * minutes:
            break
        row = run(path, left[0])
        rows.append(row)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, "".join(json.dumps(row) + "\n" for row in rows).encode())
        print(json.dumps(row), flush=True)
    print(f"{len(rows)} runs are done; {'all of them' if not left else 'start again to go on'}.")
    table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/spoken_digits.jsonl"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    given = parser.parse_args()
    main(given.data, given.output, given.minutes)
