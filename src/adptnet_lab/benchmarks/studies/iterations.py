"""Iterations of the DEER family at the paper's initialisation (table:baseline_deer_untrained_config).

    python -m adptnet_lab.benchmarks.studies.iterations   # half an hour on one core; resumes
    python -m adptnet_lab.benchmarks.studies.iterations --samples 3 --longest 1024 --out runs/iterations

One run of the longest sequence gives the count for every shorter one, since no state depends on a later one and a step
is judged by itself; Koopman-DEER, whose mean is over all time, is run at each length. Counts are of updates until every
step of the new iterate is right. A run that has not converged after `--most` iterations, or is not finite, is censored;
means are over the samples where every method of the row converged, and the number of those is given.
"""

import argparse
import json
import pathlib
import platform
import statistics

import torch

import adptnet
from adptnet import solvers
from adptnet_lab.paper.recipes.deer_iterations import RTOL, network

WIDTH = 64
METHODS = {
    "Quasi": solvers.QuasiDEER,
    "Forward": solvers.ForwardDEER,
    "Conv": solvers.ConvDEER,
    "Koopman": solvers.KoopmanDEER,
}


def counts(method: str, layer: adptnet.ADPTNet, x: torch.Tensor, lengths: list[int], most: int) -> dict[int, list[int]]:
    """Iterations for each length and sample; -1 where censored."""
    solver = METHODS[method](rtol=RTOL, max_iterations=most, patience=None, on_failure=solvers.Return())
    found = {}
    with torch.no_grad():
        if method == "Koopman":
            for steps in lengths:
                solution = solver(layer.cell, x[:, :steps])
                right = solution.results == solvers.Result.CONVERGED
                found[steps] = torch.where(right, solution.iterations, -1).tolist()
        else:
            history = solver(layer.cell, x).history
            found = {steps: history.iterations_for(steps).tolist() for steps in lengths}
    return found


def main() -> None:
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
    kept = arguments.out.with_suffix(".jsonl")
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(row["dt_min"], row["beta"], row["steps"]) for row in rows}
    with kept.open("a") as lines:
        for dt_min, beta, wanted in plan:
            if all((dt_min, beta, steps) in done for steps in wanted):
                continue
            every: dict[str, dict[int, list[int]]] = {name: {steps: [] for steps in wanted} for name in METHODS}
            for seed in range(3):  # a network for each third of the samples
                torch.manual_seed(seed)
                layer = network(WIDTH, beta, dt_min)
                batch = len(range(seed, arguments.samples, 3))
                if not batch:
                    continue
                x = torch.randn(batch, wanted[-1], WIDTH, generator=torch.Generator().manual_seed(100 + seed))
                for name in METHODS:
                    for steps, values in counts(name, layer, x, wanted, arguments.most).items():
                        every[name][steps] += values
            for steps in wanted:
                row = {"dt_min": dt_min, "beta": beta, "steps": steps, **{m: every[m][steps] for m in METHODS}}
                rows.append(row)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                print(table_row(row), flush=True)
            arguments.out.with_suffix(".md").write_text(page(rows, arguments))


def summary(row: dict) -> tuple[dict[str, float | None], int]:
    """The mean of each method over the samples where all converged, and how many those are."""
    samples = zip(*(row[m] for m in METHODS), strict=True)
    whole = [sample for sample in samples if min(sample) > 0]
    means = [statistics.mean(column) for column in zip(*whole, strict=True)] if whole else [None] * len(METHODS)
    return dict(zip(METHODS, means, strict=True)), len(whole)


def table_row(row: dict) -> str:
    means, count = summary(row)
    shown = ["–" if mean is None else f"{mean:.1f}" for mean in means.values()]
    censored = ["/".join(str(sum(value < 0 for value in row[m])) for m in METHODS)]
    most = ["/".join(str(max(row[m]) if min(row[m]) > 0 else "–") for m in METHODS)]
    cells = [f"{row['dt_min']:g}", f"{row['beta']:g}", str(row["steps"]), *shown, f"{count}", *most, *censored]
    return "| " + " | ".join(cells) + " |"


def page(rows: list[dict], arguments: argparse.Namespace) -> str:
    names = " | ".join(METHODS)
    order = "/".join(METHODS)
    head = f"| Δt_min | β | T | {names} | samples in the mean | most ({order}) | censored ({order}) |"
    ruler = "|" + " --- |" * (6 + len(METHODS))
    compared = [(summary(row)[0], row) for row in rows if summary(row)[1]]

    def share(holds: list[bool]) -> str:
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
            *[table_row(row) for row in rows],
            "",
            f"- Quasi <= Forward <= Conv in the mean: {share(ordered)}.",
            f"- Koopman <= Quasi in the mean, β >= 1: {share(koopman)}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
