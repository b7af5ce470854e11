"""Drive and recurrence of a layer as one autograd function, for short calls in training on a CPU.

The values are those of the layer's modules called one by one: B x, the gain, and `adpt_scan`, whose kernels run both
directions. The gradients of the drive are in `csrc/drive_gradients.h`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import _backends
from .._torch_state import has_dispatch_mode, is_transformed, separate_views
from ..adpt_scan import DENSE, Constants, Form
from ..adpt_scan import cpu as adpt_scan_cpu
from ..adpt_scan._autograd import run_cpu_backward
from . import reference
from .cpu import compute_drive_gradients
from .form import GateValues, GateWeights, LayerVectors, LayerWeights, LinearizedVectors, VectorSource

__all__ = ["TrainingCall"]

MAX_PLANS = 64  # batch sizes and lengths whose plans are cached
_OTHERS = None, None, *DENSE  # no reset, no lengths, no factors


class _Plan(NamedTuple):
    """The plan of the kernel for a batch size and a length, and the state from which sequences start."""

    scan: adpt_scan_cpu.Plan
    zeros: Tensor


class TrainingCall:
    """Runs drive and recurrence of a layer with gradients. The read-out is left to the caller.

    All tensors are CPU tensors of one dtype, for which `adpt_scan` has a kernel.

    Args:
        form: The form of the recurrence: not `directions_in_drive`, `beta_in_drive`, `dot` or `norm_epsilon`.
        weights: The matrices; the read-out is not used.
        source: Evaluates the vectors, with a real gain.
    """

    def __init__(self, form: Form, weights: LayerWeights, source: VectorSource):
        self.form, self.source = form, source
        self.has_biases = bool(weights.direction_biases)
        self.has_gate = weights.gate is not None
        gate = () if weights.gate is None else weights.gate
        directions = *weights.directions, *weights.direction_biases
        self._tensors = weights.input_weight, weights.input_bias, *gate, *directions
        self.weight_count = len(self._tensors)
        self._plans: dict[Any, _Plan] = {}

    def run(
        self,
        x: Tensor,
        state: Tensor | None,
        sources: Sequence[Tensor | None],
        at: LinearizedVectors | None = None,
        *,
        scale_weight: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the states after every step, (batch, steps, n), and after the last, (batch, n).

        Args:
            x: (batch, steps, width), at least one step.
            state: The state before the first step, (batch, n); None for zeros.
            sources: The tensors from which the vectors are evaluated.
            at: The vectors linearized at these sources, if that was done before.
            scale_weight: Compute (gain B) x rather than gain (B x); only with a B, and without a bias and a gate.
        """
        found: tuple[Tensor, Tensor] = _States.apply(  # type: ignore[no-untyped-call]
            (self, at, scale_weight), x, state, *self._tensors, *sources
        )
        return found

    def find_plan(self, drive: Tensor, constants: Constants) -> _Plan:
        """Return the plan for the batch size and length of a drive.

        Args:
            drive: (batch, steps, n).
            constants: The constants of the recurrence.
        """
        key = drive.shape, torch.get_num_threads()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            zeros = drive.new_zeros(drive.shape[0], drive.shape[2])
            scan = adpt_scan_cpu.make_plan((drive, zeros, *constants, *_OTHERS), self.form)
            plan = self._plans[key] = _Plan(scan, zeros)
        return plan

    def unpack(self, tensors: Sequence[Any]) -> LayerWeights:
        """Return the matrices from a flat sequence, in the order in which `run` passes them.

        Args:
            tensors: The matrices.
        """
        weight, bias, *matrices = tensors
        gate = GateWeights(*matrices[:3]) if self.has_gate else None
        matrices = matrices[3:] if self.has_gate else matrices
        count = len(matrices) // 2 if self.has_biases else len(matrices)
        return LayerWeights(weight, bias, tuple(matrices[:count]), tuple(matrices[count:]), None, None, gate)


class _States(torch.autograd.Function):
    """Autograd wrapper: the drive, and the kernels of `adpt_scan`."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], x: Tensor, state: Any, *tensors: Any) -> tuple[Tensor, ...]:
        """Run the kernel; see `TrainingCall.run`."""
        training, at, scale_weight = call
        count = training.weight_count
        weights = training.unpack(tensors[:count])
        vectors = (training.source.linearize(tensors[count:]) if at is None else at).vectors
        batch, steps, width = x.shape
        matrix: Any = weights.input_weight
        gate = weights.gate
        gated: tuple[Tensor, ...] = ()
        if scale_weight:
            drive = x @ (vectors.gain_real * matrix.t())
        else:  # with the operations of the modules
            u = x.reshape(-1, width)
            u = u if matrix is None else functional.linear(u, matrix)
            u = u if weights.input_bias is None else u + weights.input_bias
            if gate is not None:
                hidden = functional.linear(u, gate.down)
                gated = u, hidden, functional.linear(hidden, gate.up).add_(gate.bias)
                u = functional.softplus(gated[2]).mul_(u)
            drive = (vectors.gain_real * u).view(batch, steps, -1)
        constants = Constants(
            vectors.real,
            vectors.imag,
            _stack(weights.directions, training.form.heads),
            _stack(weights.direction_biases, training.form.heads),
            vectors.beta,
        )
        plan = training.find_plan(drive, constants)
        initial = plan.zeros if state is None else state
        states, projections = adpt_scan_cpu.forward(plan.scan, (drive, initial, *constants, *_OTHERS), True)
        ctx.training, ctx.plan, ctx.at, ctx.initial = training, plan.scan, at, plan.zeros if state is None else None
        ctx.set_materialize_grads(False)
        ctx.input_count = 2 + len(tensors)
        ctx.save_for_backward(x, state, *tensors, drive, *constants[2:4], states, projections, *gated)
        return states, states[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, to_states: Tensor | None, to_final: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients, by the kernel unless double backward or a transform needs the reference."""
        saved = ctx.saved_tensors  # read once: activation checkpointing computes the tensors at each read
        inputs = saved[: ctx.input_count]
        drive, matrices, biases, states, projections, *gated = saved[ctx.input_count :]
        given = [g for g in (to_states, to_final) if g is not None]
        if not given:
            return (None,) * (1 + len(inputs))
        training: TrainingCall = ctx.training
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_transformed(*given):
            return None, *_differentiate_reference(training, inputs, needs[1:], (to_states, to_final))
        gradient: Any = to_states
        if to_final is not None:
            gradient = torch.zeros_like(states) if to_states is None else to_states.clone()
            gradient[:, -1] += to_final
        x, state, *tensors = inputs
        weights, sources = training.unpack(tensors[: training.weight_count]), tensors[training.weight_count :]
        at = training.source.linearize(sources) if ctx.at is None else ctx.at
        real, imag, gain, _, beta = at.vectors
        constants = Constants(real, imag, matrices, biases, beta)
        first, count = 8 if training.has_gate else 5, 3 + training.weight_count
        needs_vectors, needs_matrices = True in needs[count:], True in needs[first:count]
        needed = (needs_vectors, needs_vectors, needs_matrices, needs_matrices, needs_vectors)
        present = [need for need, t in zip(needed, constants[:5], strict=True) if t is not None]
        leaves = (drive, ctx.initial if state is None else state, *constants, *_OTHERS)
        found = run_cpu_backward(ctx.plan, gradient, leaves, states, projections, (True, needs[2], *present))
        to_drive, to_state, *others = found
        remaining = iter(others)
        to_constants: list[Any] = [None if t is None else next(remaining) for t in constants[:5]]
        to_real, to_imag, to_matrices, to_biases, to_beta = to_constants
        values = GateValues(*gated) if gated else None
        differentiate = reference.drive_gradients if has_dispatch_mode() else compute_drive_gradients
        to = differentiate(to_drive, x, gain, weights, values, needs_x=needs[1])  # type: ignore[arg-type]
        to_sources: Sequence[Any] = (None,) * len(sources)
        if needs_vectors:
            to_sources = training.source.pull_back(at, LayerVectors(to_real, to_imag, to.gain, None, to_beta))
        return (
            None,
            to.x,
            to_state if needs[2] else None,
            to.weight,
            to.bias,
            *to.gate,
            *_split(to_matrices, len(weights.directions)),
            *_split(to_biases, len(weights.direction_biases)),
            *to_sources,
        )


def _stack(parts: tuple[Tensor, ...], heads: int) -> Tensor | None:
    """Return K and V of all heads as one tensor, (heads, 2, …)."""
    return torch.stack(parts).view(heads, 2, *parts[0].shape) if parts else None


def _split(gradient: Tensor | None, count: int) -> Sequence[Any]:
    """Return the gradients of K and V of each head from that of `_stack`."""
    return (None,) * count if gradient is None else gradient.flatten(0, 1).unbind()


def _differentiate_reference(
    training: TrainingCall, inputs: list[Any], needed: Any, gradients: tuple[Tensor | None, Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients through the eager reference loop, which supports double backward."""
    create_graph = torch.is_grad_enabled()
    _backends.note_run("backward", _backends.DOUBLE_BACKWARD if create_graph else _backends.TRANSFORMED)
    with torch.enable_grad():
        leaves = separate_views(inputs)
        x, state, *tensors = leaves
        weights = training.unpack(tensors[: training.weight_count])
        vectors = training.source.evaluate(tensors[training.weight_count :])
        initial = x.new_zeros(x.shape[0], vectors.real.shape[0]) if state is None else state
        outputs = reference.adpt_layer(x, initial, training.form, weights, vectors)
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
        required = [t for t, need in zip(leaves, needed, strict=True) if need]
        ys, gs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, required, gs, create_graph=create_graph, allow_unused=True))
    return [next(found) if need else None for need in needed]
