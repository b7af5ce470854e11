"""Spoken digits of unseen speakers: SpikingADPTNet against SiLIF, LIF, adLIF and a GRU of equal parameter count.

Needs `audiomnist_cochlea_frames.npz` (1800 digits of 60 speakers through the cochlea, frames of 4 ms) in the folder
that ADPTNET_DATA names, or --data FILE. Two thresholds are compared for SiLIF and SpikingADPTNet on 9 of the training
speakers 1 to 45, then β for the latter; learning rate, dropout and epochs are the same for all. Then every network is
trained on all 45 and tested on speakers 46 to 60. A row is written after every run, and runs that have a row are
skipped, so the same command resumes an interrupted study. The table is printed at the end.

    python -m adptnet_lab.benchmarks.studies.spoken_digits                       # about 20 minutes on one core
    python -m adptnet_lab.benchmarks.studies.spoken_digits --minutes 10          # start no run after ten minutes
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
from adptnet._io.files import write_atomic
from adptnet.nn import SpikingModel, SpikingModelSpec
from adptnet_lab import tasks, training
from adptnet_lab.baselines.catalog import baseline, count_parameters, match_parameters
from adptnet_lab.tasks.download import data_folders
from adptnet_lab.training.recorder import NullRecorder

FILE = "audiomnist_cochlea_frames.npz"
MERGED = 5  # consecutive frames of 4 ms that are summed
DT = 0.004 * MERGED
WIDTH, RANK = 128, 10
BATCH = 54  # 1080 and 1350 recordings are 20 and 25 batches
BETAS = (0.0, 0.0125, 0.125, 0.5)
COMMON = {"rate": 5e-3, "dropout": 0.25, "epochs": 20}
CANDIDATES = [{**COMMON, "threshold": threshold} for threshold in (1.0, 0.5)]


def make_task(path: Path, stage: str) -> tasks.EventFrames:
    """Return the task of a stage, "choose" or "test"; only the first one has validation data.

    Args:
        path: The file of recordings.
        stage: "choose" or "test".
    """
    validation = 0.2 if stage == "choose" else 0.0  # of 45 speakers
    return tasks.EventFrames(
        str(path), test_speakers=tuple(range(46, 61)), validation=validation, merge=(MERGED, 1), masked=False
    )


def make_model(network: str, setting: dict[str, Any]) -> Any:
    """Return the spec of a network with the parameter count of SiLIF, or the closest that its width allows.

    Args:
        network: "silif", "spiking-adpt", "gru", "lif" or "adlif".
        setting: Hyperparameters by name.
    """
    dropout = setting["dropout"]
    common = {"input_size": 140, "output_size": 10, "dropout": dropout}
    silif = nn.silif_for_speech(WIDTH, dt=DT, **common)
    if network == "silif":
        model = dataclasses.replace(silif, neuron=cells.SiLIF(WIDTH, dt=DT, threshold=setting["threshold"]))
    elif network == "spiking-adpt":
        chosen = {"beta": setting["beta"], "threshold": setting["threshold"]}
        model = nn.spiking_adpt_for_speech(WIDTH, rank=RANK, dt=DT, **chosen, **common)
    elif network == "gru":

        def block(width: int) -> Any:
            return nn.ModelSpec(nn.BlockSpec(baseline("gru", width), dropout=dropout), 2, None, 140, 10, "mean")

        return match_parameters(block, count_parameters(silif))
    else:
        neuron = {"lif": cells.LIF, "adlif": cells.AdLIF}[network]

        def make_network(width: int) -> Any:
            return SpikingModelSpec(neuron(width), 140, 10, dropout=dropout)

        model = match_parameters(make_network, count_parameters(silif))
    return dataclasses.replace(model, momentum=0.1)


class ValidationCurve(NullRecorder):
    """Records the accuracies on validation data."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        if "validation" in numbers:
            self.accuracies += [each["accuracy"] for each in numbers["validation"].values()]


def run(path: Path, point: dict[str, Any]) -> dict[str, Any]:
    """Train one network and return its row.

    Args:
        path: The file of recordings.
        point: Stage, network, setting and seed.
    """
    task, setting, seed = make_task(path, point["stage"]), point["setting"], point["seed"]
    epoch = task.training_size // BATCH
    settings = training.TrainConfig(
        steps=epoch * setting["epochs"],
        batch_size=BATCH,
        learning_rate=setting["rate"],
        optimizer=training.Adam(),
        schedule=training.Cosine(warmup=0.1),
        clip=None,
        seed=seed,
        evaluate_every=5 * epoch if point["stage"] == "choose" else None,
        select="last",
    )
    torch.manual_seed(seed)
    spec, curve = make_model(point["network"], setting), ValidationCurve()
    model, cpu, wall = spec.build(), time.process_time(), time.monotonic()
    losses = training.train(model, task, settings, recorder=curve).losses
    row = {**point, "parameters": count_parameters(spec), "loss": sum(losses[-epoch:]) / epoch}
    row["cpu_seconds_an_epoch"] = (time.process_time() - cpu) / setting["epochs"]
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


def list_points(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the points, run or not, that the rows determine; those of the test only once all settings are chosen.

    Args:
        rows: The rows so far.
    """
    rotating = [{**candidate, "beta": 0.125} for candidate in CANDIDATES]
    for network, settings in (("silif", CANDIDATES), ("spiking-adpt", rotating)):
        yield from ({"stage": "choose", "network": network, "setting": each, "seed": 0} for each in settings)
    silif, best = choose_setting(rows, "silif", CANDIDATES), choose_setting(rows, "spiking-adpt", rotating)
    if silif is None or best is None:
        return
    betas = [{**best, "beta": beta} for beta in BETAS]
    yield from ({"stage": "choose", "network": "spiking-adpt", "setting": each, "seed": 0} for each in betas)
    final = choose_setting(rows, "spiking-adpt", betas)
    if final is None:
        return
    tested = [("silif", silif, 5), *(("spiking-adpt", each, 5 if each == final else 2) for each in betas)]
    tested += [(network, COMMON, 2) for network in ("lif", "adlif", "gru")]
    for network, setting, seeds in sorted(tested, key=lambda each: -each[2]):  # those with five seeds first
        yield from ({"stage": "test", "network": network, "setting": setting, "seed": seed} for seed in range(seeds))


def choose_setting(rows: list[dict[str, Any]], network: str, settings: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the setting with the best final accuracy on validation speakers; None if some have not run yet.

    Args:
        rows: The rows so far.
        network: Name of the network.
        settings: The settings to choose from.
    """
    found = [find_row(rows, "choose", network, setting) for setting in settings]
    if None in found:
        return None
    return max(zip(found, settings, strict=True), key=lambda pair: pair[0]["validation"][-1])[1]


def find_row(rows: list[dict[str, Any]], stage: str, network: str, setting: Any, seed: int = 0) -> Any:
    """Return the row of a point; None if it has not run yet.

    Args:
        rows: The rows so far.
        stage: "choose" or "test".
        network: Name of the network.
        setting: Hyperparameters by name.
        seed: Seed of the run.
    """
    point = {"stage": stage, "network": network, "setting": setting, "seed": seed}
    return next((row for row in rows if all(row[name] == value for name, value in point.items())), None)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the table of the test results.

    Args:
        rows: The rows so far.
    """
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
    """Run the points that have no row, and print the table.

    Args:
        data: The npz file; looked for in the data folders if None.
        output: The file of the rows.
        minutes: Start no run after this time.
    """
    torch.set_num_threads(1)
    path = data or next((folder / FILE for folder in data_folders() if (folder / FILE).exists()), None)
    if path is None:
        raise SystemExit(
            f"{FILE} is not in {' or '.join(map(str, data_folders()))}. Set ADPTNET_DATA, or pass --data FILE."
        )
    start = time.monotonic()
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    while True:
        left = [
            p for p in list_points(rows) if find_row(rows, p["stage"], p["network"], p["setting"], p["seed"]) is None
        ]
        if not left or time.monotonic() - start > 60 * minutes:
            break
        row = run(path, left[0])
        rows.append(row)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, "".join(json.dumps(row) + "\n" for row in rows).encode())
        print(json.dumps(row), flush=True)
    print(f"{len(rows)} runs are done; {'all of them' if not left else 'start again to resume'}.")
    print_table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/spoken_digits.jsonl"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    options = parser.parse_args()
    main(options.data, options.output, options.minutes)
