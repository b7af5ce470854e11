"""The paper's own routes to the rotation Q, their cost and their rounding, against the closed form that is used here.

All of them compute Q Λ̄ Q' x for many pairs of key and value at once, in torch operations.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from adptnet.ops._linalg import solve
from adptnet.ops.plane_rotation import cayley, exponential, plane_rotation, skew

from ..goals import Goal
from ..subject import Case, Size, Subject
from ..timing import Side

__all__ = ["ROTATIONS"]

DENSE_ROWS = 64  # pairs that the dense routes are timed for; more are in proportion
BETA, NARROW = 1.0, 16  # β of the times; the width that the rounding of a wider state is compared with
CLOSED, CLOSED_CAYLEY = "closed form", "closed form of the Cayley map"
CORE, WOODBURY, DENSE, EXPM = "2 x 2 core", "Cayley map by Woodbury", "Cayley map, dense", "matrix_exp, dense"

Pairs = tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, states, eigenvalues
Route = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def _closed(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    rotation = plane_rotation(key, value, beta, exponential)
    return rotation.apply(eigenvalues * rotation.apply_transposed(x))


def _closed_cayley(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    rotation = plane_rotation(key, value, beta, cayley)
    return rotation.apply(eigenvalues * rotation.apply_transposed(x))


def _core(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    """eq:eff_exp with eq:core_exp, as printed."""
    left, right, core = _factors(key, value, beta)
    eye = torch.eye(2, dtype=x.dtype)
    determinant = torch.linalg.det(core)[..., None, None]
    angle = determinant.sqrt()
    middle = -core / determinant @ (angle.cos() * eye + angle.sin() / angle * core - eye)
    turned = x.unsqueeze(-1) + right @ (middle.mT @ (left.mT @ x.unsqueeze(-1)))
    kept = eigenvalues.unsqueeze(-1) * turned
    found: Tensor = kept + left @ (middle @ (right.mT @ kept))
    return found.squeeze(-1)


def _woodbury(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    """eq:cayley_map_rec, its inverse by the Woodbury identity: (I - EF'/2)⁻¹ = I + E (I - F'E/2)⁻¹ F' / 2."""
    left, right, core = _factors(key, value, beta)
    eye = torch.eye(2, dtype=x.dtype)

    def mapped(y: Tensor, sign: float) -> Tensor:
        moved = y + sign / 2 * left @ (right.mT @ y)
        back: Tensor = moved + sign / 2 * left @ (torch.linalg.inv(eye - sign / 2 * core) @ (right.mT @ moved))
        return back

    return mapped(eigenvalues.unsqueeze(-1) * mapped(x.unsqueeze(-1), -1.0), 1.0).squeeze(-1)


def _dense_cayley(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    half = beta / 2 * skew(key, value)
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    return _conjugated(solve(eye - half, eye + half), x, eigenvalues)


def _matrix_exp(key: Tensor, value: Tensor, x: Tensor, eigenvalues: Tensor, beta: float) -> Tensor:
    return _conjugated(torch.matrix_exp(beta * skew(key, value)), x, eigenvalues)


def _factors(key: Tensor, value: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """E, F and C of eq:core_matrix: β goes into key and value, half to each."""
    key, value = beta**0.5 * key, beta**0.5 * value
    left, right = torch.stack((key, -value), -1), torch.stack((value, key), -1)
    return left, right, right.mT @ left


def _conjugated(rotation: Tensor, x: Tensor, eigenvalues: Tensor) -> Tensor:
    turned = rotation.mT @ x.unsqueeze(-1)
    return (rotation @ (eigenvalues.unsqueeze(-1) * turned)).squeeze(-1)


ROUTES: dict[str, Route] = {
    CLOSED: _closed,
    CORE: _core,
    CLOSED_CAYLEY: _closed_cayley,
    WOODBURY: _woodbury,
    DENSE: _dense_cayley,
    EXPM: _matrix_exp,
}
DEFINED_BY = {name: _matrix_exp if name in (CLOSED, CORE, EXPM) else _dense_cayley for name in ROUTES}


def _pairs(rows: int, n: int, angle: float | None = None) -> Pairs:
    """Unit keys, unit values (at a given angle to the keys if there is one), states and eigenvalues, in float64."""
    key, other = (torch.randn(rows, n, dtype=torch.float64) for _ in range(2))
    key = key / key.norm(dim=-1, keepdim=True)
    if angle is not None:
        other = other - (other * key).sum(-1, keepdim=True) * key
        other = other / other.norm(dim=-1, keepdim=True) * torch.tensor(angle).tan() + key
    value = other / other.norm(dim=-1, keepdim=True)
    return key, value, torch.randn(rows, n, dtype=torch.float64), torch.linspace(0.1, 0.999, n, dtype=torch.float64)


def _error(name: str, rows: int, n: int, beta: float, angle: float | None = None) -> float:
    """The largest distance in float32 from the definition in float64, over the largest number; 1e9 if it is not one."""
    torch.manual_seed(0)
    given = _pairs(rows, n, angle)
    exact = DEFINED_BY[name](*given, beta)
    key, value, x, eigenvalues = (t.float() for t in given)
    found = ROUTES[name](key, value, x, eigenvalues, beta).double()
    distance = float(((found - exact).abs().amax() / exact.abs().amax()).nan_to_num(nan=1e9))
    return min(distance, 1e9)


@torch.no_grad()
def _case(size: Size, fast: bool) -> Case:
    rows = size.batch * size.steps
    torch.manual_seed(0)
    few = min(rows, DENSE_ROWS)
    key, value, x, eigenvalues = (t.float() for t in _pairs(rows, size.state))
    sides = []
    for name, route in ROUTES.items():
        dense = name in (DENSE, EXPM)

        def run(route: Route = route, count: int = few if dense else rows) -> Tensor:
            with torch.no_grad():
                return route(key[:count], value[:count], x[:count], eigenvalues, BETA)

        sides.append(Side(name, run, rows / few if dense else 1.0))
    numbers = {}
    for name in ROUTES:
        numbers[f"error of {name}"] = _error(name, few, size.state, BETA)
        numbers[f"error of {name}, β = 100"] = _error(name, few, size.state, 100.0)
        numbers[f"error of {name}, key and value 0.001 apart"] = _error(name, few, size.state, BETA, 1e-3)
    narrow = _error(WOODBURY, few, NARROW, BETA)
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


ROTATIONS = Subject(
    "The paper's routes to Q Λ̄ Q' x (2 x 2 core, Woodbury, dense Cayley, matrix_exp), their cost and rounding.",
    tuple(Size(1, 1024, n) for n in (16, 64, 256)),
    (Size(1, 128, 32),),
    ("plane_rotation",),
    _case,
    threads=(1,),
)
