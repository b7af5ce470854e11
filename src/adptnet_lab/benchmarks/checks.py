"""Check the operations on this machine against their reference implementations.

Values are compared, and gradients where the operation has a backward pass. The checks take a second and run before
anything is timed, because the time of a wrong result means nothing. They do not replace the tests of the library, which
are far more thorough.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from adptnet import solvers
from adptnet.errors import WrongResultError
from adptnet.nn import ADPTNet
from adptnet.ops import _backends, plane_rotation
from adptnet.ops._linalg import solve_linear
from adptnet.ops.adpt_scan import Constants, Form, RetractionKind, adpt_scan
from adptnet.ops.adpt_scan.reference import adpt_scan as reference_adpt_scan
from adptnet.ops.adpt_step import Jacobians, newton_pass
from adptnet.ops.adpt_step.reference import newton_pass as reference_newton_pass
from adptnet.ops.linear_scan import linear_scan
from adptnet.ops.linear_scan.reference import linear_scan as reference_linear_scan
from adptnet.ops.matrix_chain import matrix_chain
from adptnet.ops.matrix_chain.reference import matrix_chain as reference_matrix_chain
from adptnet.ops.tolerance import Tolerance

from .timing import use_threads

__all__ = ["CHECKS", "find_error", "find_missing_kernel"]

FLOAT64_TOLERANCE = 1e-10  # relative to the largest element, or absolute if that is below 1
SHAPES = [(1, 9, 13), (5, 7, 50), (33, 8, 64)]  # batch, steps, state; the last is large enough for two threads


def find_error(operation: str) -> str | None:
    """Return how an operation differs from its reference; None if it agrees.

    Args:
        operation: One of `CHECKS`.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            CHECKS[operation]()
    except WrongResultError as error:
        return str(error)
    return None


def find_missing_kernel(operation: str) -> str | None:
    """Return why there is no kernel to time; None if there is one, or none is needed.

    Args:
        operation: One of `CHECKS`.
    """
    backend = _backends.backends().get(operation, "cpu")
    return None if backend.startswith("cpu") else f"there is no compiled kernel here ({backend})"


def _check_adpt_scan() -> None:
    for dtype, batch, steps, size in _iterate_shapes():
        for retraction in (RetractionKind.EXPONENTIAL, RetractionKind.CAYLEY):
            drive, state, constants = _make_recurrence(dtype, batch, steps, size)
            form = Form(retraction=int(retraction))
            leaves = [drive, state, constants.real, constants.weight, constants.beta]
            names = ["states", *_name_gradients("drive", "state", "eigenvalues", "K and V", "beta")]
            slow = _values_and_gradients(partial(reference_adpt_scan, drive, state, constants, form), leaves)
            for lean in (False, True):
                fast = _values_and_gradients(partial(adpt_scan, drive, state, constants, form, lean=lean), leaves)
                _assert_agree(names[:3], fast[:3], slow[:3], _bound(dtype, steps))
                _assert_agree(names[3:], fast[3:], slow[3:], _bound(dtype, batch * steps))  # sums over all sequences


def _check_linear_scan() -> None:
    for dtype, batch, steps, size in _iterate_shapes():
        for pairs in (False, True):
            kind = {torch.float32: torch.complex64, torch.float64: torch.complex128}[dtype] if pairs else dtype
            constant = _leaf(torch.rand(size, dtype=kind) * 0.9)
            varying = _leaf(torch.rand(batch, steps, size, dtype=kind) * 0.9)
            offset, initial = (_leaf(torch.randn(*s, size, dtype=kind)) for s in ((batch, steps), (batch,)))
            names = ["states", *_name_gradients("transition", "offset", "initial")]
            for transition in (constant, varying):
                for reverse in (False, True):
                    leaves = [transition, offset, initial]
                    fast, slow = (
                        _values_and_gradients(partial(run, *leaves, reverse=reverse), leaves)
                        for run in (linear_scan, reference_linear_scan)
                    )
                    _assert_agree(names, fast, slow, _bound(dtype, batch * steps))


def _check_adpt_step() -> None:
    with torch.no_grad():
        for dtype, batch, steps, size in _iterate_shapes():
            drive, state, constants = _make_recurrence(dtype, batch, steps, size)
            states = reference_adpt_scan(drive, state, constants) + 0.1 * torch.randn(batch, steps, size, dtype=dtype)

            real = constants.real.detach()
            given, limits = (states, drive, state, torch.zeros_like(state), None), Tolerance(1.0, 1.0)
            fast = newton_pass(*given, constants, Form(), diagonal=False, tolerance=limits)
            slow = reference_newton_pass(*given, partial(_step, constants), _constant(real), real, tolerance=limits)
            _assert_agree(fast._fields[:5], fast[:5], slow[:5], _bound(dtype, steps))
            found = Jacobians(states, constants, Form())(0, steps)
            row, push = states[:, 0], drive[:, 0]
            expected = torch.func.vmap(torch.func.jacrev(partial(_step, constants)))(row, push)
            _assert_agree(["Jacobian"], [found[:, 0]], [expected], _bound(dtype, size))


def _step(constants: Constants, state: Tensor, drive: Tensor) -> Tensor:
    """Run one step of the reference on states and drives (..., n)."""
    size = state.shape[-1]
    return reference_adpt_scan(drive.reshape(-1, 1, size), state.reshape(-1, size), constants).reshape(state.shape)


def _constant(values: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda state, drive: values


def _check_plane_rotation() -> None:
    rows = plane_rotation.apply.MIN_ELEMENTS // 61 + 1
    names = ("x", "key", "offset", "skew_coefficient", "key_coefficient", "offset_coefficient")
    for threads, dtype in ((1, torch.float64), (2, torch.float64), (2, torch.float32)):
        leaves = [_leaf(torch.randn(rows, 61 if k < 3 else 1, dtype=dtype)) for k in range(6)]
        with use_threads(threads):
            fast, slow = (
                _values_and_gradients(partial(run, *leaves), leaves)
                for run in (plane_rotation.rotate, plane_rotation.reference.rotate)
            )
        _assert_agree(["rotated", *_name_gradients(*names)], fast, slow, _bound(dtype, 61))
    for size in (3, 50):
        key, value, x = (_leaf(torch.randn(4, size, dtype=torch.float64)) for _ in range(3))
        leaves = [key, value, x]
        for coefficients in (plane_rotation.exponential, plane_rotation.cayley):
            fast, slow = (
                _values_and_gradients(partial(rotate, coefficients, *leaves), leaves)
                for rotate in (_rotate_closed_form, _rotate_dense)
            )
            _assert_agree(["Q x", *_name_gradients("key", "value", "x")], fast, slow, FLOAT64_TOLERANCE)


Coefficients = Callable[[Tensor], tuple[Tensor, Tensor]]


def _rotate_closed_form(coefficients: Coefficients, key: Tensor, value: Tensor, x: Tensor) -> Tensor:
    return plane_rotation.plane_rotation(key, value, 0.1, coefficients).apply(x)


def _rotate_dense(coefficients: Coefficients, key: Tensor, value: Tensor, x: Tensor) -> Tensor:
    skew, eye = 0.1 * plane_rotation.skew(key, value), torch.eye(x.shape[-1], dtype=x.dtype)
    exact = coefficients is plane_rotation.exponential
    dense = torch.matrix_exp(skew) if exact else solve_linear(eye - skew / 2, eye + skew / 2)
    return (dense @ x.unsqueeze(-1)).squeeze(-1)


def _check_matrix_chain() -> None:
    for dtype, batch, steps, size in _iterate_shapes():
        matrices, frame = torch.randn(batch, steps, size, size, dtype=dtype) / size**0.5, torch.eye(size, dtype=dtype)
        slow = reference_matrix_chain(matrices, frame.expand(batch, -1, -1))
        _assert_agree(["frames"], [matrix_chain(matrices, frame.expand(batch, -1, -1))], [slow], _bound(dtype, steps))


def _check_solvers() -> None:
    layer = ADPTNet.paper(12, beta=0.5, dtype=torch.float64)
    x = torch.randn(3, 40, 12, dtype=torch.float64)
    leaves = [p for p in layer.parameters() if p.requires_grad]
    names = ["outputs", *_name_gradients(*(name for name, p in layer.named_parameters() if p.requires_grad))]

    def outputs(solver: solvers.Solver) -> Tensor:
        y: Tensor = layer(x, solver=solver)[0]
        return y

    exact = _values_and_gradients(partial(outputs, solvers.Sequential()), leaves)
    for solver in (solvers.ConvDEER(), solvers.ForwardDEER(), solvers.QuasiDEER(), solvers.KoopmanDEER()):
        found = _values_and_gradients(partial(outputs, solver), leaves)
        _assert_agree([f"{solver}: {name}" for name in names], found, exact, 1e-8)  # solvers stop at ε^⅚ per step


CHECKS: dict[str, Callable[[], None]] = {
    "adpt_scan": _check_adpt_scan,
    "linear_scan": _check_linear_scan,
    "adpt_step": _check_adpt_step,
    "matrix_chain": _check_matrix_chain,
    "plane_rotation": _check_plane_rotation,
    "solvers": _check_solvers,
}


def _iterate_shapes() -> Iterator[tuple[torch.dtype, int, int, int]]:
    """Yield (dtype, batch, steps, state): both precisions, every shape on one thread, the largest on two as well."""
    for threads, shapes in ((1, SHAPES), (2, SHAPES[-1:])):
        with use_threads(threads):
            for dtype in (torch.float64, torch.float32):
                for shape in shapes:
                    yield dtype, *shape


def _bound(dtype: torch.dtype, terms: int) -> float:
    """Return the allowed difference. In float32 it bounds the rounding errors of two sums of `terms` terms."""
    return FLOAT64_TOLERANCE if dtype == torch.float64 else 8 * terms * torch.finfo(dtype).eps


def _make_recurrence(dtype: torch.dtype, batch: int, steps: int, size: int) -> tuple[Tensor, Tensor, Constants]:
    real = _leaf(torch.linspace(0.3, 0.99, size, dtype=dtype))
    weight = _leaf((torch.rand(1, 2, size, size, dtype=dtype) * 2 - 1) / size**0.5)
    drive, state = _leaf(torch.randn(batch, steps, size, dtype=dtype)), _leaf(torch.randn(batch, size, dtype=dtype))
    return drive, state, Constants(real, weight=weight, beta=_leaf(torch.tensor([0.4], dtype=dtype)))


def _leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


def _name_gradients(*names: str) -> list[str]:
    return [f"gradient with respect to {name}" for name in names]


def _values_and_gradients(run: Callable[[], Tensor], leaves: Sequence[Tensor | None]) -> list[Tensor]:
    values = run()
    upstream = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(values)
    found = torch.autograd.grad(values, [leaf for leaf in leaves if leaf is not None], upstream)
    return [values.detach(), *found]


def _assert_agree(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    for name, fast, slow in zip(names, found, expected, strict=True):
        distance, scale = float((fast - slow).abs().max()), float(slow.abs().max())
        if not distance <= bound * max(1.0, scale):
            raise WrongResultError(
                f"{name}, {tuple(slow.shape)} of {slow.dtype}, differs from the reference by "
                f"{distance:.1e}; at most {bound * max(1.0, scale):.1e} is allowed."
            )
