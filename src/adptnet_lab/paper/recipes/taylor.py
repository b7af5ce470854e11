"""The first-order form of M = Q Λ̄ Q': its sign, its diagonal, and Conv- against Forward-DEER (sec:taylor_ADPTNet)."""

import torch

from adptnet import conjugates, solvers, spectra
from adptnet.nn import ADPTNet

from ..recipe import Check, GridPoint, Recipe, Rows, RunOutput, Scale, Table
from ..verdicts import ClaimVerdict, decide

BETAS = (0.02, 0.01)  # a first-order error falls by two from one to the next, a second-order error by four
ITERATIONS = (1, 2, 4)
SEEDS = {"smoke": 1, "laptop": 3, "paper": 8}


def _make_points(scale: Scale) -> list[GridPoint]:
    sizes = {"size": 8, "steps": 16} if scale == "smoke" else {"size": 32, "steps": 256}
    return [GridPoint(sizes, seed) for seed in range(SEEDS[scale])]


@torch.no_grad()
def _run(point: GridPoint) -> RunOutput:
    """Compute the error of both signs from dense matrices, and the iterates of both solvers."""
    size, steps = point.settings["size"], point.settings["steps"]
    eigenvalues = torch.diag(torch.rand(size))
    key, value = torch.nn.functional.normalize(torch.randn(2, size), dim=-1)
    skew = torch.outer(key, value) - torch.outer(value, key)
    commutator = eigenvalues @ skew - skew @ eigenvalues
    errors: dict[str, list[float]] = {"printed": [], "opposite": []}
    for beta in BETAS:
        rotation = torch.linalg.matrix_exp(beta * skew)
        exact = rotation @ eigenvalues @ rotation.mT
        for name, sign in (("printed", 1), ("opposite", -1)):
            errors[name].append(float((eigenvalues + sign * beta * commutator - exact).norm()))
    layer = ADPTNet.paper(size, beta=0.01, conjugate=conjugates.Taylor(1), spectrum=spectra.Linspace(0.02, 1.0))
    x = torch.randn(1, steps, size)
    gap = 0.0
    for count in ITERATIONS:
        pair = [
            kind(fixed_iterations=count, on_failure=solvers.Return())(layer.cell, x).states
            for kind in (solvers.ConvDEER, solvers.ForwardDEER)
        ]
        gap = max(gap, float((pair[0] - pair[1]).abs().max() / pair[0].abs().max()))
    return RunOutput({"errors": errors, "diagonal": float(commutator.diagonal().abs().max()), "gap": gap}, layer.spec)


def _order(rows: Rows, name: str) -> list[float]:
    """Return the factor by which the error falls when β is halved, network by network."""
    return [errors[name][0] / errors[name][1] for errors in rows.numbers("errors")]


def _check_sign(rows: Rows) -> ClaimVerdict:
    """The error of the printed formula falls by more than three if β is halved, as a second-order error does, in every
    network. With the opposite sign it does."""
    printed, opposite = _order(rows, "printed"), _order(rows, "opposite")
    ranges = [f"{min(factors):.2f} to {max(factors):.2f}" for factors in (printed, opposite)]
    text = f"the error falls by {ranges[0]}; with the opposite sign by {ranges[1]}"
    return decide(min(printed) > 3, text, runs=len(rows))


def _check_diagonal(rows: Rows) -> ClaimVerdict:
    """The diagonal of Λ̄S - SΛ̄ is below 10⁻¹⁵ in every network."""
    largest = max(rows.numbers("diagonal"))
    return decide(largest < 1e-15, f"at most {largest:.0e}", runs=len(rows))


def _check_identical(rows: Rows) -> ClaimVerdict:
    """The iterates of both methods agree to 10⁻¹² after 1, 2 and 4 iterations, in every network."""
    largest = max(rows.numbers("gap"))
    return decide(largest < 1e-12, f"relative difference at most {largest:.0e}", runs=len(rows))


def _make_table(rows: Rows) -> Table:
    lines = [
        [row.seed, *(f"{factor:.3f}" for factor in factors), f"{row.numbers['gap']:.1e}"]
        for row, factors in zip(rows, zip(_order(rows, "printed"), _order(rows, "opposite"), strict=True), strict=True)
    ]
    return Table(["network", "printed sign", "opposite sign", "Conv − Forward"], lines)


RECIPES = {
    "sec:taylor_ADPTNet": Recipe(
        version=1,
        points=_make_points,
        run=_run,
        checks={
            "sign": Check(_check_sign),
            "diagonal": Check(_check_diagonal),
            "identical": Check(_check_identical),
        },
        table=_make_table,
        cost={"smoke": "1 s", "laptop": "1 s", "paper": "2 s"},
    ),
}
