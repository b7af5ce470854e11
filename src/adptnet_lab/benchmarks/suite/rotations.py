"""Cost and rounding error of the paper's ways to compute the rotation Q, against the closed form that adptnet uses.

All of them compute Q Λ̄ Q' x for many pairs of key and value at once, in torch operations.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from adptnet.ops._linalg import solve_linear
from adptnet.ops.plane_rotation import cayley, exponential, plane_rotation, skew

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side

__all__ = ["ROTATIONS"]

DENSE_ROWS = 64  # pairs for which the dense routes are timed; the time of more is extrapolated
BETA, NARROW = 1.0, 16  # β of the timed runs; the width with which the rounding of wider states is compared
CLOSED, CLOSED_CAYLEY = "closed form", "closed form of the Cayley map"
CORE, WOODBURY, DENSE, EXPM = "2 x 2 core", "Cayley map by Woodbury", "Cayley map, dense", "matrix_exp, dense"

Pairs = tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, states, eigenvalues
Route = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def _use_closed_form(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    rotation = plane_rotation(key, value, beta, exponential)
    return rotation.apply(eigenvalues * rotation.apply_transposed(x))


def _use_closed_cayley(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    rotation = plane_rotation(key, value, beta, cayley)
    return rotation.apply(eigenvalues * rotation.apply_transposed(x))


def _use_core(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    """Compute eq:eff_exp with eq:core_exp, as printed in the paper."""
    left, right, core = _factors(key, value, beta)
    eye = torch.eye(2, dtype=x.dtype)
    determinant = torch.linalg.det(core)[..., None, None]
    angle = determinant.sqrt()
    middle = -core / determinant @ (angle.cos() * eye + angle.sin() / angle * core - eye)
    turned = x.unsqueeze(-1) + right @ (middle.mT @ (left.mT @ x.unsqueeze(-1)))
    kept = eigenvalues.unsqueeze(-1) * turned
    found: Tensor = kept + left @ (middle @ (right.mT @ kept))
    return found.squeeze(-1)


def _use_woodbury(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    """Compute eq:cayley_map_rec with the Woodbury identity: (I - EF'/2)⁻¹ = I + E (I - F'E/2)⁻¹ F' / 2."""
    left, right, core = _factors(key, value, beta)
    eye = torch.eye(2, dtype=x.dtype)

    def apply_map(y: Tensor, sign: float) -> Tensor:
        moved = y + sign / 2 * left @ (right.mT @ y)
        back: Tensor = moved + sign / 2 * left @ (torch.linalg.inv(eye - sign / 2 * core) @ (right.mT @ moved))
        return back

    return apply_map(eigenvalues.unsqueeze(-1) * apply_map(x.unsqueeze(-1), -1.0), 1.0).squeeze(-1)


def _use_dense_cayley(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    half = beta / 2 * skew(key, value)
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    return _conjugate(solve_linear(eye - half, eye + half), x, eigenvalues)


def _use_matrix_exp(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    return _conjugate(torch.matrix_exp(beta * skew(key, value)), x, eigenvalues)


def _factors(key: Tensor, value: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return E, F and C of eq:core_matrix, with √β in key and value each."""
    key, value = beta**0.5 * key, beta**0.5 * value
    left, right = torch.stack((key, -value), -1), torch.stack((value, key), -1)
    return left, right, right.mT @ left


def _conjugate(rotation: Tensor, x: Tensor, eigenvalues: Tensor) -> Tensor:
    turned = rotation.mT @ x.unsqueeze(-1)
    return (rotation @ (eigenvalues.unsqueeze(-1) * turned)).squeeze(-1)


ROUTES: dict[str, Route] = {
    CLOSED: _use_closed_form,
    CORE: _use_core,
    CLOSED_CAYLEY: _use_closed_cayley,
    WOODBURY: _use_woodbury,
    DENSE: _use_dense_cayley,
    EXPM: _use_matrix_exp,
}
DEFINED_BY = {name: _use_matrix_exp if name in (CLOSED, CORE, EXPM) else _use_dense_cayley for name in ROUTES}


def _make_pairs(rows: int, n: int, angle: float | None = None) -> Pairs:
    """Return unit keys, unit values (at `angle` to the keys if it is given), states and eigenvalues, in float64."""
    key, other = (torch.randn(rows, n, dtype=torch.float64) for _ in range(2))
    key = key / key.norm(dim=-1, keepdim=True)
    if angle is not None:
        other = other - (other * key).sum(-1, keepdim=True) * key
        other = other / other.norm(dim=-1, keepdim=True) * torch.tensor(angle).tan() + key
    value = other / other.norm(dim=-1, keepdim=True)
    return key, value, torch.randn(rows, n, dtype=torch.float64), torch.linspace(0.1, 0.999, n, dtype=torch.float64)


def _measure_error(name: str, rows: int, n: int, beta: float, angle: float | None = None) -> float:
    """Return the largest error in float32 relative to the largest element; 1e9 if it is larger or not a number."""
    torch.manual_seed(0)
    pairs = _make_pairs(rows, n, angle)
    exact = DEFINED_BY[name](*pairs, beta)
    key, value, x, eigenvalues = (t.float() for t in pairs)
    found = ROUTES[name](key, value, x, eigenvalues, beta).double()
    distance = float(((found - exact).abs().amax() / exact.abs().amax()).nan_to_num(nan=1e9))
    return min(distance, 1e9)


@torch.no_grad()
def _make_case(size: Size, fast: bool) -> Case:
    rows = size.batch * size.steps
    torch.manual_seed(0)
    few = min(rows, DENSE_ROWS)
    key, value, x, eigenvalues = (t.float() for t in _make_pairs(rows, size.state))
    sides = []
    for name, route in ROUTES.items():
        dense = name in (DENSE, EXPM)

        def run(route: Route = route, count: int = few if dense else rows) -> Tensor:
            with torch.no_grad():
                return route(key[:count], value[:count], x[:count], eigenvalues, BETA)

        sides.append(Side(name, run, rows / few if dense else 1.0))
    numbers = {}
    for name in ROUTES:
        numbers[f"error of {name}"] = _measure_error(name, few, size.state, BETA)
        numbers[f"error of {name}, β = 100"] = _measure_error(name, few, size.state, 100.0)
        numbers[f"error of {name}, key and value 0.001 apart"] = _measure_error(name, few, size.state, BETA, 1e-3)
    narrow = _measure_error(WOODBURY, few, NARROW, BETA)
    goals = [
        Goal(
            "the 2 x 2 core is cheaper than the dense Cayley map: time over its",
            lambda f: f.cpu(CORE) / f.cpu(DENSE),
            at_most=1.0,
            claim="sec:efficient_exp",
        ),
        Goal(
            "the dense Cayley map is prohibitively expensive: time over the 2 x 2 core's",
            lambda f: f.cpu(DENSE) / f.cpu(CORE),
            at_least=10.0,
            claim="fig:cayley_ablation",
        ),
        Goal(
            "the Cayley map as such is expensive: its closed form over the exponential's",
            lambda f: f.cpu(CLOSED_CAYLEY) / f.cpu(CLOSED),
            at_least=2.0,
            claim="fig:cayley_ablation",
        ),
        Goal(
            "Woodbury is conditioned worse than plain inversion: error over the dense map's",
            lambda f: f.number(f"error of {WOODBURY}") / f.number(f"error of {DENSE}"),
            at_least=2.0,
            claim="sec:efficient_exp",
        ),
        Goal(
            f"Woodbury degrades with width: error over that at n = {NARROW}",
            lambda f: f.number(f"error of {WOODBURY}") / narrow,
            at_least=2.0,
            claim="sec:efficient_exp",
        ),
        Goal(
            "the 2 x 2 core is as exact as any where key and value are 0.001 apart: error",
            lambda f: f.number(f"error of {CORE}, key and value 0.001 apart"),
            at_most=1e-5,
            claim="sec:efficient_exp",
        ),
        Goal("closed form / 2 x 2 core", lambda f: f.cpu(CLOSED) / f.cpu(CORE), at_most=1.0),
        Goal(
            "error of the closed form, the worst of three",
            lambda f: max(value for name, value in f.numbers.items() if name.startswith(f"error of {CLOSED}")),
            at_most=1e-5,
        ),
    ]
    return Case(sides, goals, numbers)


ROTATIONS = Benchmark(
    "The paper's ways to compute Q Λ̄ Q' x (2 x 2 core, Woodbury, dense Cayley, matrix_exp): cost and rounding error.",
    tuple(Size(1, 1024, n) for n in (16, 64, 256)),
    (Size(1, 128, 32),),
    ("plane_rotation",),
    _make_case,
    threads=(1,),
)
