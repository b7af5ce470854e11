"""Lyapunov exponents: of a layer against `torch.func.jacrev` with QR at every step, of Lorenz-63 against numpy."""

import numpy as np
import torch
from torch import Tensor

from adptnet import analysis
from adptnet.analysis.lyapunov import random_frame
from adptnet.cells.structure import make_step
from adptnet.nn import ADPTNet

from ..benchmark import Benchmark, Case, Size
from ..goals import Goal
from ..timing import Side

__all__ = ["EXPONENTS"]

STEPS = 64  # timed steps of the slow side; times of more steps are extrapolated
LOOPED = 1024  # timed steps of the loop in numpy
COMPARED = 512  # steps over which the exponents of both are compared
GOALS = {"float32": 29.0, "float64": 10.0}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def _compute_with_jacrev(layer: ADPTNet, x: Tensor, transient: int) -> Tensor:
    """Return the exponents, the largest first, from Jacobians by automatic differentiation and a QR at every step."""
    steps, size = x.shape
    step = make_step(layer.cell)
    drive = layer.cell.prepare(x.unsqueeze(0), torch.arange(steps).unsqueeze(0))[0]
    state, total = x.new_zeros(size), x.new_zeros(size)
    frame = random_frame(size, size).to(state)  # the same for both, because the frames align only over longer times
    for t in range(steps):
        matrix = torch.func.jacrev(step)(state, drive[t])
        state = step(state, drive[t])
        frame, upper = torch.linalg.qr(matrix @ frame)
        if t >= transient:
            total += upper.diagonal().abs().log()
    return (total / (steps - transient)).sort(descending=True).values


@torch.no_grad()
def _make_case(size: Size, fast: bool) -> Case:
    torch.manual_seed(0)
    n, few = size.state, min(STEPS, size.steps)
    exact = ADPTNet.paper(n, dtype=torch.float64)
    signal = torch.randn(size.steps, n, dtype=torch.float64)
    sides, goals, numbers = [], [], {}
    compared = signal[: min(COMPARED, size.steps)]
    found = analysis.lyapunov_exponents(exact, compared)
    expected = _compute_with_jacrev(exact, compared, found.window[0])
    for name, dtype in DTYPES.items():
        layer = ADPTNet.paper(n, dtype=dtype)
        layer.load_state_dict(exact.state_dict())
        x = signal.to(dtype)
        here = analysis.lyapunov_exponents(layer, compared.to(dtype)).exponents.double()
        numbers[f"largest difference, {name}"] = float((here - expected).abs().max())
        sides += _make_sides(name, layer, x, few)
        goals.append(
            Goal(
                f"jacrev and QR / ours, {name}",
                lambda f, name=name: f.cpu(f"jacrev and QR, {name}") / f.cpu(f"ours, {name}"),  # type: ignore[misc]
                at_least=GOALS[name],
            )
        )
    start = torch.tensor([1.0, 1.0, 25.0], dtype=torch.float64)
    sides.append(Side("Lorenz-63, ours", lambda: analysis.lyapunov_exponents(_lorenz, state=start, steps=size.steps)))
    looped = min(size.steps, LOOPED)
    sides.append(Side("Lorenz-63, numpy", lambda: _run_in_numpy(start.numpy(), looped), size.steps / looped))
    goals.append(
        Goal("Lorenz-63: ours / numpy", lambda f: f.cpu("Lorenz-63, ours") / f.cpu("Lorenz-63, numpy"), at_most=1.5)
    )
    ours = analysis.lyapunov_exponents(_lorenz, state=start, steps=looped, transient=0).exponents.sum()
    numbers["Lorenz-63: difference of the sums"] = abs(float(ours) - float(_run_in_numpy(start.numpy(), looped).sum()))
    goals.append(Goal("Lorenz-63: difference", lambda f: f.number("Lorenz-63: difference of the sums"), at_most=1e-8))
    goals.append(Goal("largest difference, float32", lambda f: f.number("largest difference, float32"), at_most=1e-6))
    return Case(sides, goals, numbers)


def _lorenz(state: Tensor, dt: float = 0.01) -> Tensor:
    """Run one step of Lorenz-63 by the classical Runge-Kutta method."""

    def field(at: Tensor) -> Tensor:
        x, y, z = at.unbind(-1)
        return torch.stack((10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z), -1)

    a = field(state)
    b = field(state + dt / 2 * a)
    c = field(state + dt / 2 * b)
    return state + dt / 6 * (a + 2 * b + 2 * c + field(state + dt * c))


def _run_in_numpy(state: np.ndarray, steps: int, dt: float = 0.01) -> np.ndarray:
    """Return the exponents of the same map: a loop over state and tangent vectors, with a QR at every step."""

    def field(at: np.ndarray) -> np.ndarray:
        x, y, z = at[:, 0]
        jacobian = np.array([[-10.0, 10.0, 0.0], [28 - z, -1.0, -x], [y, x, -8 / 3]])
        moved: np.ndarray = jacobian @ at
        moved[:, 0] = 10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z
        return moved

    at = np.concatenate((state[:, None], np.eye(3)), 1)  # the state, and the tangent vectors
    total: np.ndarray = np.zeros(3)
    for _ in range(steps):
        a = field(at)
        b = field(at + dt / 2 * a)
        c = field(at + dt / 2 * b)
        at = at + dt / 6 * (a + 2 * b + 2 * c + field(at + dt * c))
        at[:, 1:], upper = np.linalg.qr(at[:, 1:])
        total += np.log(np.abs(np.diagonal(upper)))
    mean: np.ndarray = total / steps
    return mean


def _make_sides(name: str, layer: ADPTNet, x: Tensor, few: int) -> list[Side]:
    matrix = torch.randn(1, x.shape[-1], x.shape[-1], dtype=x.dtype)
    frame = matrix.clone()
    scale = x.shape[0] / few

    def slow() -> None:
        with torch.no_grad():
            _compute_with_jacrev(layer, x[:few], few // 2)

    def ours() -> None:
        with torch.no_grad():
            analysis.lyapunov_exponents(layer, x)

    def products() -> None:
        for _ in range(few):
            torch.matmul(matrix, frame)

    return [
        Side(f"jacrev and QR, {name}", slow, scale),
        Side(f"ours, {name}", ours),
        Side(f"products of J with the frame alone, {name}", products, scale),
    ]


EXPONENTS = Benchmark(
    "All Lyapunov exponents of a layer, against jacrev with a QR at every step, and of Lorenz-63, against numpy.",
    (Size(1, 4096, 128),),
    (Size(1, 256, 16),),
    ("adpt_step", "matrix_chain"),
    _make_case,
    threads=(1,),
)
