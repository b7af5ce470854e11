"""Which cells the fused operation covers, and their parameters as it takes them."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import _build, adpt_step
from ..ops._torch_state import transformed, watched
from ..ops.adpt_scan import DENSE, Constants, Factors, Form, Retracted, Source, adpt_scan, ready, why_not
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
    "constants_of",
    "coupled",
    "covers",
    "factors_of",
    "form_of",
    "in_basis",
    "jacobians",
    "own_directions",
    "own_steps",
    "scan",
    "steps_known",
]

# Products with factors are short and run at about half the speed of those with a matrix.
CHEAPER = 3


def own_steps(cell: Cell, kind: type[Cell]) -> bool:
    """Whether a cell steps as its class does: a step that was replaced is the one that must run."""
    names = ("step", "stepper", "initial_state", "prepare")
    return all(name not in cell.__dict__ and getattr(type(cell), name) is getattr(kind, name) for name in names)


def own_directions(directions: nn.ModuleList, *, log: bool = False) -> bool:
    """Return whether the operation may evaluate K and V itself; with `log`, log once why not."""
    own = all(isinstance(found, Directions) and found.is_stock() for found in directions)
    if log and not own and _build.wanted():
        _build.notice("K or V has hooks, or is a module of another kind, which is called at every step.")
    return own


def covers(
    spec: ADPTSpec,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    dt: bool = False,
    beta: bool = False,
    log: bool = False,
) -> bool:
    """Whether one operation runs all steps of such a cell on a device, which need not be here.

    Args:
        spec: Of the cell.
        dtype: Of its drive.
        device: Where its drive would be.
        dt, beta: Whether they come with the drive.
        log: Log once why not: the steps are about to be run.
    """
    reason = _uncovered(spec, dtype)
    if dt:
        reason = "the kernel has no dt=."
    if beta and spec.heads > 1:
        reason = "the kernel has no beta= with heads."
    if reason is None and dtype is not None and device.type not in ("cpu", "meta"):
        form, paired, slow = form_of(spec, beta_given=beta), spec.spectrum.is_complex, spec.memory is not None
        reason = why_not(form, spec.size, paired=paired, slow=slow, dtype=dtype, device=str(device))
    if log and reason is not None and _build.wanted():
        _build.notice(reason)
    return reason is None and (device.type != "cpu" or (dtype is not None and ready(dtype)))


def _uncovered(spec: ADPTSpec, dtype: torch.dtype | None) -> str | None:
    direction = spec.direction
    from_state = spec.conjugate.turns and isinstance(direction, FromState)
    if dtype not in (torch.float32, torch.float64):
        return f"there is no kernel for {dtype}."
    if not isinstance(spec.conjugate, (Exact, Taylor, Diagonal)) and spec.conjugate != Product(1):
        return f"the kernel has no conjugate={spec.conjugate}."
    if spec.conjugate.rotates and not isinstance(spec.retraction, (Exponential, Cayley)):
        return f"the kernel has no retraction={spec.retraction}."
    if not isinstance(direction, (FromState, FromInput)):
        return f"the kernel has no direction={direction}."
    if from_state and direction.layer_norm and spec.heads > 1:
        return "the kernel has no LayerNorm on key and value over several heads."
    told_apart = isinstance(direction, FromState) and (direction.entrywise or direction.layer_norm)
    if spec.start and (spec.memory is not None or told_apart):
        return "the kernel has no learned start with a slow memory, ReLU, spikes or LayerNorm."
    return None


def form_of(spec: ADPTSpec, *, beta_given: bool = False) -> Form:
    """The kind of recurrence a cell is."""
    direction = spec.direction
    source, spike, dot, norm = Source.STATE, 0.0, None, None
    if isinstance(direction, FromState):
        source = Source.RELU if direction.relu else Source.STATE
        if direction.spike is not None:
            source, spike = Source.SPIKES, direction.spike
        if spec.conjugate.turns:
            dot, norm = direction.dot, LAYER_NORM_EPS if direction.layer_norm else None
    return Form(
        heads=spec.heads,
        turns=spec.conjugate.turns,
        given=spec.conjugate.turns and isinstance(direction, FromInput),
        beta_given=beta_given,
        source=int(source),
        spike=spike,
        retracted=int(_retracted(spec.conjugate, spec.retraction)),
        dot=dot,
        aware=spec.rotation_aware,
        norm=norm,
        linear=spec.conjugate.turns and not beta_given and is_zero(spec.beta),
    )


def _retracted(conjugate: ConjugateSpec, retraction: Retraction) -> Retracted:
    if isinstance(conjugate, Taylor):
        return Retracted.TAYLOR_ONE if conjugate.order == 1 else Retracted.TAYLOR_TWO
    return Retracted.CAYLEY if isinstance(retraction, Cayley) else Retracted.EXPONENTIAL


def constants_of(blocks: BlockDiagonal, directions: nn.ModuleList, beta: Beta | None, form: Form) -> Constants:
    """Λ̄, K, V and β. Factored projections become dense matrices here, once a call."""
    real = blocks.real
    weight = bias = number = norm_weight = norm_bias = None
    if form.turns and not form.given:
        found = directions[0]
        assert isinstance(found, Directions)
        both = [_matrices(p, real.dtype) for p in (found.key_projection, found.value_projection)]
        weight = torch.stack([matrices for matrices, _ in both], 1)
        biases = [vectors for _, vectors in both if vectors is not None]
        bias = torch.stack(biases, 1) if biases else None
        if found.key_norm is not None and found.value_norm is not None:
            norms = (found.key_norm, found.value_norm)
            norm_weight, norm_bias = (
                torch.stack([getattr(n, name) for n in norms]).to(real.dtype) for name in ("weight", "bias")
            )
    if form.turns and beta is not None:
        value = beta(real)
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=real.dtype, device=real.device)
        number = value.reshape(-1).expand(form.heads)
    constants = Constants(real, blocks.imag, weight, bias, number)
    return constants._replace(norm_weight=norm_weight, norm_bias=norm_bias)


def _matrices(projection: Projection, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(heads, m, m), and the biases (heads, m) if there are any."""
    projection.refresh()
    parts = _parts(projection)
    biases = [part.bias.to(dtype) for part in parts if isinstance(part, Biased)]
    return torch.stack([part.dense().to(dtype) for part in parts]), torch.stack(biases) if biases else None


def _parts(projection: Projection) -> list[Projection]:
    """The projection of each head."""
    each = projection.projections if isinstance(projection, Heads) else [projection]
    return [part for part in each if isinstance(part, Projection)]


def factors_of(directions: nn.ModuleList, form: Form, dtype: torch.dtype) -> Factors:
    """K and V by their factors, where products with those take much less; without derivatives."""
    found = directions[0] if form.turns and not form.given else None
    if not isinstance(found, Directions):
        return DENSE
    halves = [_parts(p) for p in (found.key_projection, found.value_projection)]
    if any(CHEAPER * part.macs > part.in_features * part.out_features for half in halves for part in half):
        return DENSE
    factors = [[_factors(part) for part in half] for half in halves]

    def stacked(name: str) -> Tensor | None:
        if getattr(factors[0][0], name) is None:
            return None
        return torch.stack([torch.stack([getattr(f, name) for f in half]) for half in factors], 1).detach().to(dtype)

    return Factors(*(stacked(name) for name in Factors._fields))


def _factors(projection: Projection) -> Factors:
    if isinstance(projection, Biased):
        return _factors(projection.projection)
    if isinstance(projection, LowParamProjection):
        low_rank, kronecker = projection.low_rank, projection.kronecker
        return Factors(low_rank.left, low_rank.right, kronecker.outer, kronecker.inner)
    if isinstance(projection, LowRankProjection):
        return Factors(left=projection.left, right=projection.right)
    if isinstance(projection, KroneckerProjection):
        return Factors(outer=projection.outer, inner=projection.inner)
    return DENSE


def coupled(constants: Constants, gain: BlockDiagonal, feedback: Tensor, decay: Tensor, charge: Tensor) -> Constants:
    """The same with a slow memory: `gain` of `feedback` times the memory is one operator on it."""
    feed_imag = None
    if gain.imag is not None:
        feed_imag = gain.imag * feedback.unflatten(-1, (-1, 2)).flip(-1).flatten()
    elif constants.imag is not None:
        feed_imag = torch.zeros_like(constants.imag)
    return constants._replace(feed_real=gain.real * feedback, feed_imag=feed_imag, decay=decay, charge=charge)


class Basis(NamedTuple):
    """A recurrence in the basis of a learned start Q₀, where Q₀ Λ̄ Q₀' is Λ̄; its states are to be multiplied by Q₀'."""

    constants: Constants
    drive: Tensor
    state: Tensor


def in_basis(start: Tensor, constants: Constants, form: Form, drive: Tensor, state: Tensor) -> Basis:
    """The same recurrence, seen from a learned start."""
    weight = None if constants.weight is None else start.mT @ constants.weight @ start
    bias = None if constants.bias is None else constants.bias @ start
    size = state.shape[-1]
    end = size * (3 if form.given else 1)
    vectors = (drive[..., :end].unflatten(-1, (-1, size)) @ start).flatten(-2)
    drive = torch.cat((vectors, drive[..., end:]), -1)
    return Basis(constants._replace(weight=weight, bias=bias), drive, state @ start)


def scan(
    constants: Constants,
    form: Form,
    drive: Tensor,
    state: Tensor,
    reset: Tensor | None,
    lengths: Tensor | None,
    lean: bool,
    factors: Factors = DENSE,
) -> Tensor | None:
    """All states; None inside a transform."""
    if transformed(drive, state, *constants):
        _build.notice("torch.func transforms and forward-mode derivatives look into every step.")
        return None
    return adpt_scan(drive, state, constants, form, reset=reset, lengths=lengths, factors=factors, lean=lean)


def steps_known(spec: ADPTSpec, states: Tensor, drive: Tensor, constants: Constants, form: Form) -> bool:
    """Whether the step at many known states has a kernel, which records no derivative; if not, it is said once."""
    tensors = (states, drive, *constants)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if states.device.type != "cpu" or recorded or spec.start or watched() or transformed(*tensors):
        return False
    if _uncovered(spec, drive.dtype) is not None or not adpt_step.covers(constants, form):
        if _build.wanted():
            _build.notice("the kernel of Jacobians and Newton passes is for one head, a real spectrum, K and V of x.")
        return False
    return adpt_step.ready(states.dtype)


def jacobians(
    spec: ADPTSpec, constants: Constants, form: Form, states: Tensor, drive: Tensor
) -> adpt_step.Jacobians | None:
    """The derivative of the step at states (batch, time, n), some steps at a time; None where there is no kernel."""
    if not steps_known(spec, states, drive, constants, form):
        return None
    return adpt_step.Jacobians(states.detach(), constants, form)
