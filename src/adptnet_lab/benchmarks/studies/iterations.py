"""Iterations of the DEER family at the paper's initialisation (table:baseline_deer_untrained_config).

    python -m adptnet_lab.benchmarks.studies.iterations   # half an hour on one core; resumes if interrupted
    python -m adptnet_lab.benchmarks.studies.iterations --samples 3 --longest 1024 --out runs/iterations

One run of the longest sequence gives the count for every shorter one, because no state depends on a later one and the
convergence of a step is tested by itself. Koopman-DEER, whose mean is over all time, is run at each length. Counts are
numbers of updates until every step of the new iterate has converged. A run that has not converged after `--most`
iterations, or is not finite, is censored. Means are over the samples where every method of the row converged, and the
number of those is given.
"""

import argparse
import json
import pathlib
import platform
import statistics
from typing import Any

import torch

import adptnet
from adptnet import solvers
from adptnet_lab.paper.settings.deer_networks import RTOL, build_network

WIDTH = 64
METHODS: dict[str, Any] = {
    "Quasi": solvers.QuasiDEER,
    "Forward": solvers.ForwardDEER,
    "Conv": solvers.ConvDEER,
    "Koopman": solvers.KoopmanDEER,
}


def count_iterations(
    method: str, layer: adptnet.ADPTNet, x: torch.Tensor, lengths: list[int], most: int
) -> dict[int, list[int]]:
    """Return the numbers of iterations of each sample, by length; -1 where censored.

    Args:
        method: A name in `METHODS`.
        layer: The layer.
        x: (samples, time, width).
        lengths: The lengths to solve, at most that of `x`.
        most: The maximum number of iterations.
    """
    solver = METHODS[method](rtol=RTOL, max_iterations=most, patience=None, on_failure=solvers.Return())
    found = {}
    with torch.no_grad():
        if method == "Koopman":
            for steps in lengths:
                solution = solver(layer.cell, x[:, :steps])
                converged = solution.results == solvers.Result.CONVERGED
                found[steps] = torch.where(converged, solution.iterations, -1).tolist()
        else:
            history = solver(layer.cell, x).history
            assert history is not None
            found = {steps: history.iterations_for(steps).tolist() for steps in lengths}
    return found


def main() -> None:
    """Run what is missing, and write the rows and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--most", type=int, default=100)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results/benchmarks/iterations"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [steps for steps in (512, 1024, 4096, 8192, 16384) if steps <= arguments.longest]
    plan = [(dt_min, beta, lengths[:2]) for dt_min in (1e-2, 1e-3) for beta in (0.0125, 0.125, 1.0, 4.0, 20.0, 100.0)]
    plan += [(1e-4, beta, lengths[:2]) for beta in (4.0, 20.0, 100.0)]
    plan += [(1e-4, beta, lengths) for beta in (0.0125, 0.125, 1.0)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    path = arguments.out.with_suffix(".jsonl")
    rows: list[dict[str, Any]] = []
    if path.exists():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    done = {(row["dt_min"], row["beta"], row["steps"]) for row in rows}
    with path.open("a") as lines:
        for dt_min, beta, planned in plan:
            if all((dt_min, beta, steps) in done for steps in planned):
                continue
            every: dict[str, dict[int, list[int]]] = {name: {steps: [] for steps in planned} for name in METHODS}
            for seed in range(3):  # one network for each third of the samples
                torch.manual_seed(seed)
                layer = build_network(WIDTH, beta, dt_min)
                batch = len(range(seed, arguments.samples, 3))
                if not batch:
                    continue
                x = torch.randn(batch, planned[-1], WIDTH, generator=torch.Generator().manual_seed(100 + seed))
                for name in METHODS:
                    for steps, values in count_iterations(name, layer, x, planned, arguments.most).items():
                        every[name][steps] += values
            for steps in planned:
                row = {"dt_min": dt_min, "beta": beta, "steps": steps, **{m: every[m][steps] for m in METHODS}}
                rows.append(row)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                print(format_row(row), flush=True)
            arguments.out.with_suffix(".md").write_text(render_page(rows, arguments))


def average(row: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Return the mean of each method over the samples where all converged, and the number of those samples.

    The means are empty if there is no such sample.

    Args:
        row: Numbers of iterations by method, one per sample; -1 where censored.
    """
    samples = zip(*(row[m] for m in METHODS), strict=True)
    converged = [sample for sample in samples if min(sample) > 0]
    if not converged:
        return {}, 0
    means = [statistics.mean(column) for column in zip(*converged, strict=True)]
    return dict(zip(METHODS, means, strict=True)), len(converged)


def format_row(row: dict[str, Any]) -> str:
    """Return the line of a table.

    Args:
        row: The settings and the numbers of iterations by method.
    """
    means, count = average(row)
    shown = [f"{means[m]:.1f}" if means else "–" for m in METHODS]
    censored = ["/".join(str(sum(value < 0 for value in row[m])) for m in METHODS)]
    most = ["/".join(str(max(row[m]) if min(row[m]) > 0 else "–") for m in METHODS)]
    cells = [f"{row['dt_min']:g}", f"{row['beta']:g}", str(row["steps"]), *shown, f"{count}", *most, *censored]
    return "| " + " | ".join(cells) + " |"


def render_page(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Return the page with the table of all rows.

    Args:
        rows: The rows of the table.
        arguments: The command line.
    """
    names = " | ".join(METHODS)
    order = "/".join(METHODS)
    head = f"| Δt_min | β | T | {names} | samples in the mean | most ({order}) | censored ({order}) |"
    ruler = "|" + " --- |" * (6 + len(METHODS))
    compared = [(average(row)[0], row) for row in rows if average(row)[1]]

    def count_true(holds: list[bool]) -> str:
        return f"{sum(holds)} of {len(holds)} rows"

    ordered = [m["Quasi"] <= m["Forward"] <= m["Conv"] for m, _ in compared]
    koopman = [m["Koopman"] <= m["Quasi"] for m, row in compared if row["beta"] >= 1]
    return "\n".join(
        [
            "# Iterations at the paper's initialisation",
            "",
            "`python -m adptnet_lab.benchmarks.studies.iterations` "
            f"(samples {arguments.samples}, at most {arguments.most} iterations), "
            f"adptnet {adptnet.__version__}, torch {torch.__version__}, {platform.machine()}, one thread, float32.",
            "",
            "ADPTNet of width 64, dense K and V, EMA gain, RoPE, decay 0.5, Δt spaced in the logarithm from Δt_min to "
            "0.1; inputs from N(0, 1); three networks, each with a third of the samples. Guess: the β = 0 scan. A step "
            f"of the new iterate is right at |f(s) - s| <= {RTOL:.1e} · max(|s before|, |f(s)|) + 1.2e-7 · the largest "
            "|s| so far, if the next iteration would not move it beyond four times as much, or 4ε√T of the scale; "
            "every step must be. Undamped, no sequence given up. Means are over the samples where all four methods "
            "converged; a method that did not within the limit, or was not finite, is counted as censored.",
            "",
            head,
            ruler,
            *[format_row(row) for row in rows],
            "",
            f"- Quasi <= Forward <= Conv in the mean: {count_true(ordered)}.",
            f"- Koopman <= Quasi in the mean, β >= 1: {count_true(koopman)}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
