"""`ADPTNet(width)` in the place of `nn.GRU`: one recurrent layer between two linear maps, with default arguments.

    python -m adptnet_lab.benchmarks.studies.drop_in --data JapaneseVowels=FOLDER fashion=FOLDER   # runs, prints tables
    python -m adptnet_lab.benchmarks.studies.drop_in --tables                                      # the rows so far
    python -m adptnet_lab.benchmarks.studies.drop_in --scales       # standard deviation of outputs before training

Linear → layer → last step → linear, all of one width, Adam with torch's defaults and gradients clipped at 1: what
somebody would write who replaces a GRU. No layer is tuned; every learning rate is a row of the table. A run takes
seconds, and rows are appended, so that the same command continues an interrupted study.

The committed rows are of JapaneseVowels, BasicMotions and ItalyPowerDemand from the UCR and UEA archives (folders of
these names are in the Python package aeon) and of Fashion-MNIST (in Debian's package dataset-fashion-mnist).

A folder holds either the files NAME_TRAIN.ts and NAME_TEST.ts of an archive of time series, whose shorter sequences are
extended by their last value, or images in the four IDX files of the MNIST family, read row by row.
"""

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from adptnet import ADPTNet
from adptnet._io.files import append_lines
from adptnet.errors import DataError
from adptnet_lab.benchmarks.studies.comparison import format_interval, read_rows

ROWS = Path("results/benchmarks/drop_in.jsonl")
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)
WIDTH, STEPS, BATCH_SIZE = 64, 600, 32
IMAGES = 4000, 2000  # the first images of the two parts that are used

LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "ADPTNet": ADPTNet,
    "GRU": lambda width: nn.GRU(width, width, batch_first=True),
    "LSTM": lambda width: nn.LSTM(width, width, batch_first=True),
    "ADPTNet.paper": ADPTNet.paper,
}


class Data(NamedTuple):
    """Sequences (sequences, steps, features), standardized by the training part, and their classes."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


class Classifier(nn.Module):
    """One recurrent layer between two linear maps; the class is read off at the last step.

    Args:
        layer: Makes the layer from its width.
        features: Features of the input.
        width: Width of the layer.
        classes: Number of classes.
    """

    def __init__(self, layer: Callable[[int], nn.Module], features: int, width: int, classes: int):
        super().__init__()
        self.encoder, self.layer, self.head = nn.Linear(features, width), layer(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (sequences, classes) of sequences x (sequences, steps, features)."""
        logits: Tensor = self.head(self.layer(self.encoder(x))[0][:, -1])
        return logits


def read_data(folder: Path) -> Data:
    """Read the data of a folder.

    Args:
        folder: A folder with the files of a time series, or of images.

    Raises:
        DataError: It has neither.
    """
    series = sorted(folder.glob("*_TRAIN.ts"))
    if series:
        name = series[0].name.removesuffix("_TRAIN.ts")
        parts = [_read_series(folder / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")]
        steps = max(len(x) for sequences, _ in parts for x in sequences)
        labels = sorted(set(parts[0][1]))
        x_train, x_test = (
            numpy.stack([numpy.pad(x, ((0, steps - len(x)), (0, 0)), mode="edge") for x in sequences])
            for sequences, _ in parts
        )
        y_train, y_test = ([labels.index(label) for label in shown] for _, shown in parts)
        return _standardize(x_train, y_train, x_test, y_test, per_feature=True)
    if (folder / "train-images-idx3-ubyte.gz").exists():
        names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
        x_train, y_train, x_test, y_test = (_read_idx(folder / name) for name in names)
        training, test = IMAGES
        return _standardize(x_train[:training], y_train[:training], x_test[:test], y_test[:test], per_feature=False)
    raise DataError(
        f"{folder} has neither *_TRAIN.ts nor train-images-idx3-ubyte.gz. Pass NAME=FOLDER with one of them."
    )


def _read_series(path: Path) -> tuple[list[Any], list[str]]:
    """Return the sequences (steps, features) of a .ts file and their labels."""
    lines = path.read_text("utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip().lower() == "@data"), None)
    if start is None:
        raise DataError(f"{path} has no line @data. It must be a .ts file of a time series classification archive.")
    sequences, labels = [], []
    for line in filter(str.strip, lines[start + 1 :]):
        *channels, label = line.strip().split(":")
        sequences.append(numpy.array([[float(value) for value in channel.split(",")] for channel in channels]).T)
        labels.append(label)
    return sequences, labels


def _read_idx(path: Path) -> Any:
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = numpy.frombuffer(content, ">i4", dimensions, offset=4)
    return numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _standardize(x_train: Any, y_train: Any, x_test: Any, y_test: Any, *, per_feature: bool) -> Data:
    axes = (0, 1) if per_feature else None
    mean, deviation = x_train.mean(axes), x_train.std(axes)
    x = [
        torch.tensor((part - mean) / numpy.maximum(deviation, 1e-8), dtype=torch.float32) for part in (x_train, x_test)
    ]
    y = [torch.tensor(numpy.asarray(part), dtype=torch.long) for part in (y_train, y_test)]
    return Data(x[0], y[0], x[1], y[1])


def run(data: Data, layer: str, rate: float, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Train one classifier and return its test accuracy after the last step.

    Args:
        data: The data.
        layer: A key of `LAYERS`.
        rate: The learning rate.
        seed: Seed of the parameters and of the batches.
        steps: Number of training steps.
    """
    torch.manual_seed(seed)
    model = Classifier(LAYERS[layer], data.x_train.shape[2], WIDTH, int(data.y_train.amax()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    generator, start = torch.Generator().manual_seed(seed), time.process_time()
    for _ in range(steps):
        chosen = torch.randint(len(data.x_train), (BATCH_SIZE,), generator=generator)
        loss = nn.functional.cross_entropy(model(data.x_train[chosen]), data.y_train[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        shown = torch.cat([model(part).argmax(-1) for part in data.x_test.split(256)])
    accuracy = (shown == data.y_test).double().mean().item()
    row = {"layer": layer, "rate": rate, "seed": seed, "steps": steps, "width": WIDTH, "accuracy": accuracy}
    return {**row, "step_ms": 1e3 * seconds / steps, "parameters": sum(p.numel() for p in model.parameters())}


def measure_scales() -> str:
    """Return a table: standard deviation of the outputs of untrained layers on white noise of unit variance."""
    lines = ["| width | steps | " + " | ".join(LAYERS) + " |", "| --- | --- |" + " --- |" * len(LAYERS)]
    for width in (32, 64, 256):
        for steps in (10, 100, 2000):
            scales = []
            for make in LAYERS.values():
                torch.manual_seed(0)
                with torch.no_grad():
                    scales.append(make(width)(torch.randn(8, steps, width))[0].std().item())
            lines.append(f"| {width} | {steps} | " + " | ".join(f"{scale:.2f}" for scale in scales) + " |")
    return "\n".join(lines)


def format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for each data set: test accuracy in percent by rate, mean and 95 % interval over the seeds.

    Args:
        rows: The rows.
    """
    lines: list[str] = []
    for name in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == name]
        rates = sorted({row["rate"] for row in own})
        lines += [
            f"### {name}",
            "",
            "| layer | parameters | " + " | ".join(f"{rate:g}" for rate in rates) + " | ms a step |",
        ]
        lines.append("| --- | --- |" + " --- |" * (len(rates) + 1))
        for layer in dict.fromkeys(row["layer"] for row in own):
            same = [row for row in own if row["layer"] == layer]
            scores = [[row["accuracy"] for row in same if row["rate"] == rate] for rate in rates]
            cells = [format_interval(values, 100) if values else "" for values in scores]
            time_of_step = statistics.median(row["step_ms"] for row in same)
            lines.append(f"| {layer} | {same[0]['parameters']:,} | {' | '.join(cells)} | {time_of_step:.1f} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the points that have no row, and print the tables.

    Args:
        arguments: Those of the command line by default.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=FOLDER", help="data sets, each with its folder")
    parser.add_argument("--layer", nargs="+", choices=LAYERS, default=list(LAYERS), help="these layers alone")
    parser.add_argument("--rate", nargs="+", type=float, default=RATES, help="these learning rates")
    parser.add_argument("--seed", nargs="+", type=int, default=SEEDS, help="these seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of a run")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of the rows")
    parser.add_argument("--tables", action="store_true", help="print the tables of the rows so far")
    parser.add_argument("--scales", action="store_true", help="print the scale of the outputs before training")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.scales:
        print(measure_scales())
        return
    columns = ("data", "layer", "rate", "seed", "steps")
    for name, folder in (each.partition("=")[::2] for each in ([] if options.tables else options.data)):
        data = read_data(Path(folder))
        done = {tuple(row[column] for column in columns) for row in read_rows(options.rows)}
        points = [(layer, rate, seed) for layer in options.layer for rate in options.rate for seed in options.seed]
        for layer, rate, seed in points:
            if (name, layer, rate, seed, options.steps) in done:
                continue
            row = {"data": name, **run(data, layer, rate, seed, options.steps)}
            options.rows.parent.mkdir(parents=True, exist_ok=True)
            with options.rows.open("ab+", buffering=0) as file:
                append_lines(file, (json.dumps(row) + "\n").encode())
            print(row, flush=True)
    print(format_tables(read_rows(options.rows)))


if __name__ == "__main__":
    main()
