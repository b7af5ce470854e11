"""Autograd of `adpt_scan`: the custom operations that torch dispatches, and a shortcut for the CPU.

Torch sees one operation, `adptnet::adpt_scan`, to differentiate, compile and export. `CpuScan` runs the same CPU
kernels without the dispatcher, whose overhead exceeds the run time of a short sequence.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _backends, _gpu
from .._torch_state import can_bypass_dispatcher, has_dispatch_mode, is_transformed, separate_views
from . import cpu, flops, launch, reference
from .dispatch import TRITON, choose, select_gpu_kernel
from .form import Constants, Factors, Form, decode_form, encode_form

__all__ = ["LEAF_COUNT", "CpuScan", "register_flop_formulas", "run_cpu_backward", "scan"]

LEAF_COUNT = 2 + len(Constants._fields)  # drive, state and constants: the differentiable inputs
_OTHER_COUNT = 2 + len(Factors._fields)  # reset, lengths and factors: tensors without a gradient


def _forward(
    drive: Tensor,
    state: Tensor,
    real: Tensor,
    imag: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    beta: Tensor | None,
    feed_real: Tensor | None,
    feed_imag: Tensor | None,
    decay: Tensor | None,
    charge: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    reset: Tensor | None,
    lengths: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    outer: Tensor | None,
    inner: Tensor | None,
    numbers: Sequence[float],
    save: bool,
) -> tuple[Tensor, Tensor]:
    constants = Constants(real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias)
    form = decode_form(numbers)
    if _gpu.is_cpu(drive.device) and cpu.has_kernel(drive.dtype):
        inputs = (drive, state, *constants, reset, lengths, left, right, outer, inner)
        states, projections = cpu.forward(cpu.make_plan(inputs, form), inputs, save)
        # A custom operation must return a new tensor at each call, so it cannot return `plan.empty`.
        return states, projections if save else drive.new_empty(0)
    kernel = select_gpu_kernel(drive, constants, form)
    if kernel is not None:
        found: tuple[Tensor, Tensor] = kernel.forward(drive, state, constants, form, reset, lengths, save)
        return found
    states = reference.adpt_scan(drive, state, constants, form, reset=reset, lengths=lengths)
    shape = _saved_shape(drive, constants, form, save)
    return states, drive.new_full(shape, torch.nan)  # NaN, so that a use by mistake is noticed


def _backward(
    gradient: Tensor,
    states: Tensor,
    projections: Tensor,
    drive: Tensor,
    state: Tensor,
    real: Tensor,
    imag: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    beta: Tensor | None,
    feed_real: Tensor | None,
    feed_imag: Tensor | None,
    decay: Tensor | None,
    charge: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    reset: Tensor | None,
    lengths: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    outer: Tensor | None,
    inner: Tensor | None,
    numbers: Sequence[float],
) -> list[Tensor]:
    constants = Constants(real, imag, weight, bias, beta, feed_real, feed_imag, decay, charge, norm_weight, norm_bias)
    form = decode_form(numbers)
    if _gpu.is_cpu(drive.device):
        _backends.note_run("backward", _backends.CPU)
        inputs = (drive, state, *constants, reset, lengths, left, right, outer, inner)
        plan = cpu.make_plan(inputs, form)
        gradients = cpu.backward(plan, gradient, inputs, states, projections, [True] * LEAF_COUNT)
        return [t for t in gradients if t is not None]
    kernel = select_gpu_kernel(drive, constants, form)
    to_drive, to_state, to_constants = kernel.backward(
        gradient, states, projections, drive, state, constants, form, reset, lengths
    )
    return [to_drive, to_state, *(t for t in to_constants if t is not None)]


def _saved_shape(drive: Tensor, constants: Constants, form: Form, save: bool) -> tuple[int, ...]:
    """Return the shape of the second result of the forward, which its backward needs."""
    if not _gpu.is_gpu(drive.device):
        return cpu.saved_shape(drive, constants, form, save)
    size, paired, slow = constants.real.shape[0], constants.imag is not None, constants.decay is not None
    backend = choose(form, size, paired=paired, slow=slow, dtype=drive.dtype, device=drive.device)
    return launch.saved_shape(drive, constants, form, save) if backend == TRITON else (0,)


scan = torch.library.custom_op("adptnet::adpt_scan", _forward, mutates_args=(), device_types=["cpu", "cuda"])
_scan_backward = torch.library.custom_op(
    "adptnet::adpt_scan_backward", _backward, mutates_args=(), device_types=["cpu", "cuda"]
)


@scan.register_fake
def _(drive: Tensor, state: Tensor, real: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rest = len(Constants._fields) - 1
    numbers, save = others[rest + _OTHER_COUNT :]
    shape = _saved_shape(drive, Constants(real, *others[:rest]), decode_form(numbers), save)
    return drive.new_empty(*drive.shape[:2], state.shape[-1]), drive.new_empty(shape)


@_scan_backward.register_fake
def _(gradient: Tensor, states: Tensor, projections: Tensor, *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs[:LEAF_COUNT] if t is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: LEAF_COUNT + _OTHER_COUNT], *output)
    ctx.form = decode_form(inputs[LEAF_COUNT + _OTHER_COUNT])
    ctx.by_kernel = _has_backward_kernel(inputs[0], Constants(*inputs[2:LEAF_COUNT]), ctx.form)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Any, ...]:
    *inputs, states, projections = ctx.saved_tensors
    if gradient is None:
        gradients: list[Tensor | None] = [None] * LEAF_COUNT
    elif torch.is_grad_enabled() or not ctx.by_kernel or is_transformed(gradient):
        gradients = _differentiate_reference(gradient, inputs, ctx.form, ctx.needs_input_grad)
    else:
        register_flop_formulas()
        present = iter(_scan_backward(gradient, states, projections, *inputs, encode_form(ctx.form)))
        gradients = [None if t is None else next(present) for t in inputs[:LEAF_COUNT]]
    return *gradients, *(None,) * (_OTHER_COUNT + 2)  # neither form nor save has a gradient


scan.register_autograd(_differentiate, setup_context=_setup_context)


def _has_backward_kernel(drive: Tensor, constants: Constants, form: Form) -> bool:
    size, paired, slow = constants.real.shape[0], constants.imag is not None, constants.decay is not None
    return choose(form, size, paired=paired, slow=slow, dtype=drive.dtype, device=drive.device).is_kernel


def _differentiate_reference(
    gradient: Tensor, inputs: Sequence[Any], form: Form, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients through the eager reference loop, which supports double backward."""
    if torch.is_grad_enabled():
        _backends.note_run("backward", _backends.DOUBLE_BACKWARD)
    elif is_transformed(gradient):
        _backends.note_run("backward", _backends.TRANSFORMED)
    create_graph = torch.is_grad_enabled()
    reset, lengths = inputs[LEAF_COUNT : LEAF_COUNT + 2]
    with torch.enable_grad():
        leaves = separate_views(inputs[:LEAF_COUNT])
        drive, state, *constants = leaves
        states = reference.adpt_scan(drive, state, Constants(*constants), form, reset=reset, lengths=lengths)
        required = [t for t, need in zip(leaves, needed, strict=False) if need]
        found = iter(torch.autograd.grad(states, required, gradient, create_graph=create_graph, allow_unused=True))
    return [next(found) if need else None for need in needed[:LEAF_COUNT]]


def register_flop_formulas() -> None:
    """Make torch's FLOP counter count the operation, if a dispatch mode is active."""
    if has_dispatch_mode() and not torch.compiler.is_compiling():
        operations = torch.ops.adptnet
        flops.register({operations.adpt_scan: flops.forward_flops, operations.adpt_scan_backward: flops.backward_flops})


class CpuScan(torch.autograd.Function):
    """Autograd wrapper of the CPU kernel. Only tensors that are not None are passed: autograd checks each argument."""

    @staticmethod
    def forward(ctx: Any, call: tuple[cpu.Plan, cpu.Inputs, bool], *present: Tensor) -> Tensor:
        """Run the kernel; `call` holds the arguments of `cpu.forward`, and `present` its tensors that are not None."""
        ctx.plan = call[0]
        states, projections = cpu.forward(*call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*present, states, projections)
        return states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients, by the kernel unless double backward or a transform needs the reference."""
        *present, states, projections = ctx.saved_tensors
        if gradient is None:
            return (None,) * (1 + len(present))
        plan: cpu.Plan = ctx.plan
        inputs = _scatter(present, plan.present)
        if torch.is_grad_enabled() or is_transformed(gradient):
            needed = _scatter(ctx.needs_input_grad[1:], plan.present)
            every = _differentiate_reference(gradient, inputs, plan.form, needed)
            return None, *[every[position] if position < LEAF_COUNT else None for position in plan.present]
        found = run_cpu_backward(plan, gradient, inputs, states, projections, ctx.needs_input_grad[1:])
        return None, *found, *[None] * (len(present) - len(found))


def run_cpu_backward(
    plan: cpu.Plan,
    gradient: Tensor,
    inputs: cpu.Inputs,
    states: Tensor,
    projections: Tensor,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of the inputs that are not None, as a custom operation if a dispatch mode is active.

    Args:
        plan, gradient, inputs, states, projections, needed: As in `cpu.backward`.
    """
    if can_bypass_dispatcher(gradient):
        _backends.note_run("backward", _backends.CPU)
        return cpu.backward(plan, gradient, inputs, states, projections, needed)
    register_flop_formulas()
    found: list[Tensor] = _scan_backward(gradient, states, projections, *inputs, encode_form(plan.form))
    return found


def _scatter(values: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Return a list of all arguments with `values` at `positions` and None elsewhere."""
    arguments = [None] * (LEAF_COUNT + _OTHER_COUNT)
    for position, value in zip(positions, values, strict=True):
        arguments[position] = value
    return arguments
