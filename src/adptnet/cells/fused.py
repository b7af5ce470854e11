"""Translation from cells to the fused kernels: which cells the kernels support, and their parameters."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import _backends, _build, adpt_step
from ..ops._torch_state import has_dispatch_mode, is_transformed
from ..ops.adpt_scan import (
    DENSE,
    Constants,
    Factors,
    Form,
    RetractionKind,
    Source,
    adpt_scan,
    explain_unsupported_gpu,
    has_cpu_kernel,
)
from ..recurrence.beta import Beta, is_zero
from ..recurrence.conjugates import ConjugateSpec, Diagonal, Exact, Product, Taylor
from ..recurrence.directions import LAYER_NORM_EPS, Directions, FromInput, FromState
from ..recurrence.projections import Projection
from ..recurrence.projections.base import Biased
from ..recurrence.projections.factored import KroneckerProjection, LowParamProjection, LowRankProjection
from ..recurrence.projections.heads import Heads
from ..recurrence.retractions import Cayley, Exponential, Retraction
from ..recurrence.spectra import BlockDiagonal
from .base import Cell
from .spec import ADPTSpec

__all__ = [
    "add_memory",
    "change_basis",
    "has_kernel",
    "has_step_kernel",
    "has_stock_directions",
    "has_stock_step",
    "make_constants",
    "make_factors",
    "make_form",
    "make_jacobians",
    "run_scan",
]

# K and V are applied by their factors only if that divides the number of multiplications by at least this. Products
# with factors are short and run at about half the speed of a product with a matrix.
MIN_SAVING = 3

# The methods that define the step of a cell. Not every cell has all of them.
_STEP = ("step", "stepper", "initial_state", "prepare", "bind", "prepare_with_arguments", "make_step")


def has_stock_step(cell: Cell, kind: type[Cell]) -> bool:
    """Return whether the methods that define the step are those of `kind`, neither overridden nor monkey-patched.

    Args:
        cell: The cell.
        kind: The class for which a kernel exists.
    """
    own = cell.__dict__
    return all(name not in own and getattr(type(cell), name, None) is getattr(kind, name, None) for name in _STEP)


def has_stock_directions(directions: nn.ModuleList, *, log: bool = False) -> bool:
    """Return whether a kernel may evaluate K and V without calling their modules.

    Args:
        directions: The directions of each plane.
        log: Log once the reason why not.
    """
    unmodified = all(isinstance(module, Directions) and module.is_stock() for module in directions)
    if log and not unmodified and _build.kernels_enabled():
        _backends.log_fallback("K or V has hooks, or is a module of another class, which is called at every step.")
    return unmodified


def has_kernel(
    spec: ADPTSpec,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    dt: bool = False,
    beta: bool = False,
    log: bool = False,
) -> bool:
    """Return whether a kernel runs all steps of a cell on a device, which need not be present.

    Args:
        spec: The spec of the cell.
        dtype: The dtype of its drive; None if unknown.
        device: The device of its drive.
        dt: Whether the length of each step is part of the drive.
        beta: Whether β is part of the drive.
        log: Log once the reason why not.
    """
    reason = _explain_unsupported(spec, dtype)
    if dt:
        reason = "the kernel does not support dt=."
    if beta and spec.heads > 1:
        reason = "the kernel does not support beta= with heads."
    if reason is None and dtype is not None and device.type not in ("cpu", "meta"):
        form, paired, slow = make_form(spec, beta_in_drive=beta), spec.spectrum.is_complex, spec.memory is not None
        reason = explain_unsupported_gpu(form, spec.size, paired=paired, slow=slow, dtype=dtype, device=str(device))
    if log and reason is not None and _build.kernels_enabled():
        _backends.log_fallback(reason)
    return reason is None and (device.type != "cpu" or (dtype is not None and has_cpu_kernel(dtype)))


def _explain_unsupported(spec: ADPTSpec, dtype: torch.dtype | None) -> str | None:
    """Return why the kernels do not support a cell, on any device; None if they do."""
    direction = spec.direction
    from_state = spec.conjugate.has_directions and isinstance(direction, FromState)
    if dtype not in (torch.float32, torch.float64):
        return f"there is no kernel for {dtype}."
    # Types are compared exactly: a subclass may define another model.
    if type(spec.conjugate) not in (Exact, Taylor, Diagonal) and spec.conjugate != Product(1):
        return f"the kernel does not support conjugate={spec.conjugate}."
    if spec.conjugate.has_rotation and type(spec.retraction) not in (Exponential, Cayley):
        return f"the kernel does not support retraction={spec.retraction}."
    if type(direction) not in (FromState, FromInput):
        return f"the kernel does not support direction={direction}."
    if from_state and direction.layer_norm and spec.heads > 1:
        return "the kernel does not support LayerNorm on key and value over several heads."
    needs_basis = isinstance(direction, FromState) and (direction.is_entrywise or direction.layer_norm)
    if spec.start and (spec.memory is not None or needs_basis):
        return "the kernel does not support a learned start with a slow memory, ReLU, spikes or LayerNorm."
    return None


def make_form(spec: ADPTSpec, *, beta_in_drive: bool = False) -> Form:
    """Return the form of the recurrence as the kernel takes it.

    Args:
        spec: The spec of the cell.
        beta_in_drive: Whether β is part of the drive.
    """
    direction = spec.direction
    source, spike, dot, norm = Source.STATE, 0.0, None, None
    if isinstance(direction, FromState):
        source = Source.RELU if direction.relu else Source.STATE
        if direction.spike is not None:
            source, spike = Source.SPIKES, direction.spike
        if spec.conjugate.has_directions:
            dot, norm = direction.dot, LAYER_NORM_EPS if direction.layer_norm else None
    return Form(
        heads=spec.heads,
        rotates=spec.conjugate.has_directions,
        directions_in_drive=spec.conjugate.has_directions and isinstance(direction, FromInput),
        beta_in_drive=beta_in_drive,
        source=int(source),
        spike_threshold=spike,
        retraction=int(_retraction_code(spec.conjugate, spec.retraction)),
        dot=dot,
        rotation_aware=spec.rotation_aware,
        norm_epsilon=norm,
        linear=spec.conjugate.has_directions and not beta_in_drive and is_zero(spec.beta),
    )


def _retraction_code(conjugate: ConjugateSpec, retraction: Retraction) -> RetractionKind:
    if isinstance(conjugate, Taylor):
        return RetractionKind.TAYLOR_ONE if conjugate.order == 1 else RetractionKind.TAYLOR_TWO
    return RetractionKind.CAYLEY if isinstance(retraction, Cayley) else RetractionKind.EXPONENTIAL


def make_constants(blocks: BlockDiagonal, directions: nn.ModuleList, beta: Beta | None, form: Form) -> Constants:
    """Return Λ̄, K, V and β as the kernel takes them. Factored projections become dense matrices, once per call.

    Args:
        blocks: Λ̄.
        directions: The directions of each plane, of which the kernel supports one.
        beta: β; None if it is part of the drive.
        form: The form of the recurrence.
    """
    real = blocks.real
    weight = bias = strengths = norm_weight = norm_bias = None
    if form.rotates and not form.directions_in_drive:
        module = directions[0]
        assert isinstance(module, Directions)
        both = [_stack_matrices(p, real.dtype) for p in (module.key_projection, module.value_projection)]
        weight = torch.stack([matrices for matrices, _ in both], 1)
        biases = [vectors for _, vectors in both if vectors is not None]
        bias = torch.stack(biases, 1) if biases else None
        if module.key_norm is not None and module.value_norm is not None:
            norms = (module.key_norm, module.value_norm)
            norm_weight, norm_bias = (
                torch.stack([getattr(n, name) for n in norms]).to(real.dtype) for name in ("weight", "bias")
            )
    if form.rotates and beta is not None:
        value = beta(real)
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=real.dtype, device=real.device)
        strengths = value.reshape(-1).expand(form.heads)
    constants = Constants(real, blocks.imag, weight, bias, strengths)
    return constants._replace(norm_weight=norm_weight, norm_bias=norm_bias)


def _stack_matrices(projection: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the matrices of all heads, (heads, m, m), and their biases, (heads, m), or None."""
    projection.refresh()
    parts = _split_heads(projection)
    biases = [part.bias.to(dtype) for part in parts if isinstance(part, Biased)]
    return torch.stack([part.dense().to(dtype) for part in parts]), torch.stack(biases) if biases else None


def _split_heads(projection: Projection) -> list[Projection]:
    """Return the projection of each head."""
    each = projection.projections if isinstance(projection, Heads) else [projection]
    return [part for part in each if isinstance(part, Projection)]


def make_factors(directions: nn.ModuleList, form: Form, dtype: torch.dtype) -> Factors:
    """Return the factors of K and V if products with them cost much less, detached from autograd; `DENSE` otherwise.

    Args:
        directions: The directions of each plane, of which the kernel supports one.
        form: The form of the recurrence.
        dtype: The dtype of the drive.
    """
    module = directions[0] if form.rotates and not form.directions_in_drive else None
    if not isinstance(module, Directions):
        return DENSE
    halves = [_split_heads(p) for p in (module.key_projection, module.value_projection)]
    if any(MIN_SAVING * part.macs > part.in_features * part.out_features for half in halves for part in half):
        return DENSE
    factors = [[_factors(part) for part in half] for half in halves]
    if any(found is DENSE for half in factors for found in half):
        return DENSE

    def stack(name: str) -> Tensor | None:
        if getattr(factors[0][0], name) is None:
            return None
        return torch.stack([torch.stack([getattr(f, name) for f in half]) for half in factors], 1).detach().to(dtype)

    return Factors(*(stack(name) for name in Factors._fields))


def _factors(projection: Projection) -> Factors:
    """Return the factors of a projection; `DENSE` if it is not factored."""
    if isinstance(projection, Biased):
        return _factors(projection.projection)
    if isinstance(projection, LowParamProjection) and _has_methods_of(projection, LowParamProjection):
        low_rank, kronecker = _factors(projection.low_rank), _factors(projection.kronecker)
        return DENSE if low_rank is DENSE or kronecker is DENSE else Factors(*low_rank[:2], *kronecker[2:])
    if isinstance(projection, LowRankProjection) and _has_methods_of(projection, LowRankProjection):
        return Factors(left=projection.left, right=projection.right)
    if isinstance(projection, KroneckerProjection) and _has_methods_of(projection, KroneckerProjection):
        return Factors(outer=projection.outer, inner=projection.inner)
    return DENSE


def _has_methods_of(projection: Projection, kind: type[Projection]) -> bool:
    """Return whether a projection is the map of `kind`. Its type may differ: a parametrized module has its own."""
    return type(projection).dense is kind.dense and type(projection).bind is kind.bind


def add_memory(constants: Constants, gain: BlockDiagonal, feedback: Tensor, decay: Tensor, charge: Tensor) -> Constants:
    """Return `constants` with a slow memory added; `gain` and `feedback` are combined into one operator.

    Args:
        constants: The parameters of the fast state.
        gain: γ.
        feedback: (n,).
        decay: Γ, (n,).
        charge: 1 - Γ, (n,).
    """
    feed_imag = None
    if gain.imag is not None:
        feed_imag = gain.imag * feedback.unflatten(-1, (-1, 2)).flip(-1).flatten()
    elif constants.imag is not None:
        feed_imag = torch.zeros_like(constants.imag)
    return constants._replace(feed_real=gain.real * feedback, feed_imag=feed_imag, decay=decay, charge=charge)


class RotatedProblem(NamedTuple):
    """A recurrence in the basis of a learned start Q₀, where Q₀ Λ̄ Q₀' becomes Λ̄. Its states are x Q₀ (row vectors)."""

    constants: Constants
    drive: Tensor
    state: Tensor


def change_basis(start: Tensor, constants: Constants, form: Form, drive: Tensor, state: Tensor) -> RotatedProblem:
    """Return a recurrence in the basis of a learned start.

    Args:
        start: Q₀, (n, n).
        constants: The parameters.
        form: The form of the recurrence.
        drive: (batch, time, features).
        state: (batch, n).
    """
    weight = None if constants.weight is None else start.mT @ constants.weight @ start
    bias = None if constants.bias is None else constants.bias @ start
    size = state.shape[-1]
    end = size * (3 if form.directions_in_drive else 1)
    vectors = (drive[..., :end].unflatten(-1, (-1, size)) @ start).flatten(-2)
    drive = torch.cat((vectors, drive[..., end:]), -1)
    return RotatedProblem(constants._replace(weight=weight, bias=bias), drive, state @ start)


def run_scan(
    constants: Constants,
    form: Form,
    drive: Tensor,
    state: Tensor,
    reset: Tensor | None,
    lengths: Tensor | None,
    lean: bool,
    factors: Factors = DENSE,
) -> Tensor | None:
    """Run all steps by the kernel. Arguments as for `Cell.scan` and `adpt_scan`.

    Returns:
        The states, (batch, time, n); None inside a `torch.func` transform.
    """
    if is_transformed(drive, state, *constants):
        _backends.log_fallback("torch.func transforms and forward-mode derivatives run the eager loop.")
        return None
    return adpt_scan(drive, state, constants, form, reset=reset, lengths=lengths, factors=factors, lean=lean)


def has_step_kernel(spec: ADPTSpec, states: Tensor, drive: Tensor, constants: Constants, form: Form) -> bool:
    """Return whether there is a kernel for one step at many given states, without autograd; log once if there is none.

    Args:
        spec: The spec of the cell.
        states: (batch, time, n).
        drive: (batch, time, features).
        constants: The parameters.
        form: The form of the recurrence.
    """
    tensors = (states, drive, *constants)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if states.device.type != "cpu" or recorded or spec.start or has_dispatch_mode() or is_transformed(*tensors):
        return False
    if _explain_unsupported(spec, drive.dtype) is not None or not adpt_step.is_supported(constants, form):
        if _build.kernels_enabled():
            _backends.log_fallback(
                "the kernel for Jacobians and Newton passes supports one head, a real spectrum, and K and V of x."
            )
        return False
    return adpt_step.has_kernel(states.dtype)


def make_jacobians(
    spec: ADPTSpec, constants: Constants, form: Form, states: Tensor, drive: Tensor
) -> adpt_step.Jacobians | None:
    """Return a function that computes Jacobians for a range of steps; None if there is no kernel.

    Args:
        spec: The spec of the cell.
        constants: The parameters.
        form: The form of the recurrence.
        states: (batch, time, n).
        drive: (batch, time, features).
    """
    if not has_step_kernel(spec, states, drive, constants, form):
        return None
    return adpt_step.Jacobians(states.detach(), constants, form)
