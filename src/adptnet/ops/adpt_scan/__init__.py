"""The whole ADPT recurrence as one operation, forward and backward. The derivation is in the README beside this file.

`adpt_scan` is what to call. Torch sees one operation, `adptnet::adpt_scan`, to differentiate, compile and export. On a
CPU, where only autograd looks, the same functions run without its dispatcher, which takes longer than a short sequence.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from .. import _build
from .._torch_state import apart, constant_when_compiled, plain, transformed, watched
from . import cpu, diagonal, flops, launch, reference
from .form import DENSE, PLAIN, Constants, Factors, Form, Retracted, Source, check, form_of, numbers_of

__all__ = ["DENSE", "Constants", "Factors", "Form", "Retracted", "Source", "adpt_scan", "ready", "why_not"]

_LEAVES = 2 + len(Constants._fields)  # drive, state and constants: what has a derivative
_HELD = 2 + len(Factors._fields)  # reset, lengths and factors: tensors that have none
_TRANSFORMED = "a transform of torch.func or forward mode is at work, which the kernel does not know."


def _ready(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Return whether there is a kernel for CPUs; on meta, where only shapes are computed, the operation needs none."""
    return dtype in (torch.float32, torch.float64) if device == "meta" else cpu.ready(dtype)


ready = constant_when_compiled(_ready)


@constant_when_compiled
def _wanted() -> bool:
    return _build.wanted()


def why_not(form: Form, size: int, *, paired: bool, slow: bool, dtype: torch.dtype, device: str) -> str | None:
    """Return why a GPU runs such a recurrence step by step, as `launch.why_not`; None if in one operation."""
    if torch.device(device).type == "cuda" and _wanted() and diagonal.covers(form, slow=slow):
        return None
    return launch.why_not(form, size, paired=paired, slow=slow, dtype=dtype, device=device)


def _gpu_kernel(drive: Tensor, constants: Constants, form: Form) -> Any:
    """Return the module whose `forward` and `backward` run such a recurrence on a GPU; None for the reference."""
    if drive.device.type == "cpu":
        return None
    slow = constants.decay is not None
    reason = why_not(
        form,
        constants.real.shape[0],
        paired=constants.imag is not None,
        slow=slow,
        dtype=drive.dtype,
        device=str(drive.device),
    )
    if reason is not None:
        if _wanted():
            _build.notice(reason)
        return None
    if diagonal.covers(form, slow=slow):
        return diagonal
    from . import triton

    return triton


def adpt_scan(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form = PLAIN,
    *,
    reset: Tensor | None = None,
    lengths: Tensor | None = None,
    factors: Factors = DENSE,
    lean: bool = False,
) -> Tensor:
    """All states of the recurrence, (batch, time, width); see `reference.adpt_scan`.

    Args:
        drive, state, constants, form, reset, lengths: As there.
        factors: K and V by their factors, for the kernel to multiply with.
        lean: Keep only the states for the backward and compute the projections K x and V x again; otherwise they are
            kept, which is faster and takes twice as much memory again.
    """
    # Not for `check`: whether a tensor asks for a derivative is no part of the kind of a call.
    if form.linear and (constants.beta is None or constants.beta.requires_grad):
        raise InputError(f"adpt_scan: linear=True is for a β that is fixed at zero; got {form}, beta={constants.beta}.")
    inputs = (drive, state, *constants, reset, lengths, *factors)
    given = [t for t in inputs if t is not None]
    recorded = torch.is_grad_enabled() and True in [t.requires_grad for t in inputs[:_LEAVES] if t is not None]
    save = recorded and not lean
    states: Tensor
    directly = plain(*given) and False not in [t.is_cpu for t in given]
    if directly and cpu.ready(drive.dtype):
        plan = cpu.plan(inputs, form)
        if recorded:
            states = _Recorded.apply((plan, inputs, save), *given)  # type: ignore[no-untyped-call]
        else:
            states, _ = cpu.forward(plan, inputs, save)
        return states
    check(drive, state, constants, form, reset, lengths, factors)
    if transformed(*given):
        _build.notice(_TRANSFORMED)
    elif not directly:
        _introduce_flops()
        states, _ = _scan(*inputs, numbers_of(form), save)
        return states
    return reference.adpt_scan(drive, state, constants, form, reset=reset, lengths=lengths)


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
    form = form_of(numbers)
    if drive.device.type == "cpu" and cpu.ready(drive.dtype):
        inputs = (drive, state, *constants, reset, lengths, left, right, outer, inner)
        states, projections = cpu.forward(cpu.plan(inputs, form), inputs, save)
        return states, projections if save else drive.new_empty(0)  # an operation returns no tensor twice
    kernel = _gpu_kernel(drive, constants, form)
    if kernel is not None:
        return kernel.forward(drive, state, constants, form, reset, lengths), drive.new_empty(0)
    states = reference.adpt_scan(drive, state, constants, form, reset=reset, lengths=lengths)
    return states, drive.new_full(cpu.kept(drive, constants, form, save), torch.nan)  # nobody may take them for numbers


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
    form = form_of(numbers)
    if drive.device.type == "cpu":
        inputs = (drive, state, *constants, reset, lengths, left, right, outer, inner)
        found = cpu.backward(cpu.plan(inputs, form), gradient, inputs, states, projections, [True] * _LEAVES)
        return [t for t in found if t is not None]
    kernel = _gpu_kernel(drive, constants, form)
    to_drive, to_state, to_constants = kernel.backward(gradient, states, state, constants, form, reset, lengths)
    return [to_drive, to_state, *(t for t in to_constants if t is not None)]


_scan = torch.library.custom_op("adptnet::adpt_scan", _forward, mutates_args=(), device_types=["cpu", "cuda"])
_scan_backward = torch.library.custom_op(
    "adptnet::adpt_scan_backward", _backward, mutates_args=(), device_types=["cpu", "cuda"]
)


@_scan.register_fake
def _(drive: Tensor, state: Tensor, real: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rest = len(Constants._fields) - 1
    numbers, save = others[rest + _HELD :]
    kept = cpu.kept(drive, Constants(real, *others[:rest]), form_of(numbers), save)
    return drive.new_empty(*drive.shape[:2], state.shape[-1]), drive.new_empty(kept)


@_scan_backward.register_fake
def _(gradient: Tensor, states: Tensor, projections: Tensor, *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs[:_LEAVES] if t is not None]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: _LEAVES + _HELD], *output)
    ctx.form = form_of(inputs[_LEAVES + _HELD])
    ctx.by_kernel = _has_backward(inputs[0], Constants(*inputs[2:_LEAVES]), ctx.form)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Any, ...]:
    *inputs, states, projections = ctx.saved_tensors
    if gradient is None:
        found: list[Tensor | None] = [None] * _LEAVES
    elif torch.is_grad_enabled() or not ctx.by_kernel or transformed(gradient):
        found = _by_reference(gradient, inputs, ctx.form, ctx.needs_input_grad)
    else:
        _introduce_flops()
        every = iter(_scan_backward(gradient, states, projections, *inputs, numbers_of(ctx.form)))
        found = [None if t is None else next(every) for t in inputs[:_LEAVES]]
    return *found, *(None,) * (_HELD + 2)  # form and save too


def _has_backward(drive: Tensor, constants: Constants, form: Form) -> bool:
    if drive.device.type in ("cpu", "meta"):
        return _ready(drive.dtype, drive.device.type)
    return _gpu_kernel(drive, constants, form) is not None


def _by_reference(gradient: Tensor, inputs: Sequence[Any], form: Form, needed: Sequence[bool]) -> list[Tensor | None]:
    """The derivative through the loop in torch, which can itself be differentiated."""
    if torch.is_grad_enabled():
        _build.notice("a derivative of a derivative was asked for, and the kernel has one only.")
    elif transformed(gradient):
        _build.notice(_TRANSFORMED)
    again = torch.is_grad_enabled()
    reset, lengths = inputs[_LEAVES : _LEAVES + 2]
    with torch.enable_grad():
        leaves = apart(inputs[:_LEAVES])
        drive, state, *constants = leaves
        states = reference.adpt_scan(drive, state, Constants(*constants), form, reset=reset, lengths=lengths)
        wanted = [t for t, need in zip(leaves, needed, strict=False) if need]
        found = iter(torch.autograd.grad(states, wanted, gradient, create_graph=again, allow_unused=True))
    return [next(found) if need else None for need in needed[:_LEAVES]]


_scan.register_autograd(_differentiate, setup_context=_remember)


def _introduce_flops() -> None:
    if watched() and not torch.compiler.is_compiling():
        operations = torch.ops.adptnet
        flops.introduce(
            {operations.adpt_scan: flops.forward_flops, operations.adpt_scan_backward: flops.backward_flops}
        )


class _Recorded(torch.autograd.Function):
    """The kernel of a CPU for autograd alone, which looks at every argument: only at those that there are."""

    @staticmethod
    def forward(ctx: Any, about: tuple[cpu.Plan, cpu.Inputs, bool], *given: Tensor) -> Tensor:
        ctx.plan = about[0]
        states, projections = cpu.forward(*about)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, states, projections)
        return states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        *given, states, projections = ctx.saved_tensors
        if gradient is None:
            return (None,) * (1 + len(given))
        plan: cpu.Plan = ctx.plan
        inputs = _placed(given, plan.places)
        if not torch.is_grad_enabled() and plain(gradient):
            found = cpu.backward(plan, gradient, inputs, states, projections, ctx.needs_input_grad[1:])
            return None, *found, *[None] * (len(given) - len(found))
        if torch.is_grad_enabled() or transformed(gradient):
            every = _by_reference(gradient, inputs, plan.form, _placed(ctx.needs_input_grad[1:], plan.places))
            return None, *[every[place] if place < _LEAVES else None for place in plan.places]
        _introduce_flops()
        found = _scan_backward(gradient, states, projections, *inputs, numbers_of(plan.form))
        return None, *found, *[None] * (len(given) - len(found))


def _placed(given: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """All arguments, from those that there are."""
    found = [None] * (_LEAVES + _HELD)
    for place, one in zip(places, given, strict=True):
        found[place] = one
    return found
