"""The ADPT recurrence in Triton, for GPUs: a program runs all steps of one head of a tile of sequences.

`resident.py`, `streamed.py` and `given.py` are three pairs of kernels with the same arguments: for small heads, for
large heads, and for directions that come with the drive. They share `memory.py`, a step with its loads and stores, and
`arithmetic.py`, the formulas. `launch.py` beside this folder chooses. A batch tile is the M of the matrix products,
heads are an axis of the grid. Imported only when it is used. No kernel has run on a GPU.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ..diagonal import find_states_before
from ..form import Constants, Form, Source
from ..launch import Launch, check_constants, plan_launch, saved_shape
from .given import given_backward, given_forward
from .resident import resident_backward, resident_forward
from .streamed import streamed_backward, streamed_forward

__all__ = [
    "backward",
    "forward",
    "given_backward",
    "given_forward",
    "resident_backward",
    "resident_forward",
    "streamed_backward",
    "streamed_forward",
]

# Rows of the buffer of gradients that are summed over the steps of each sequence, then over the batch by torch.
SUMS: tuple[str, ...] = ("real", "imag", "feed_real", "feed_imag", "decay", "charge", "key_gain", "value_gain")
SUMS += ("key_shift", "value_shift", "key_bias", "value_bias", "beta")
_FIRST_ROWS = {"bias": "key_bias", "norm_weight": "key_gain", "norm_bias": "key_shift"}  # of two rows


def forward(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return all states, (batch, time, width), and the projections K x and V x, (batch, time, heads, 2, m), if saved.

    Args:
        drive, state, constants, form, reset, lengths: As in `adpt_scan`.
        save: Whether to save the projections; they are empty if not, or if there are none.
    """
    batch, steps = drive.shape[:2]
    states = drive.new_empty(batch, steps, state.shape[-1])
    projections = drive.new_empty(saved_shape(drive, constants, form, save))
    if states.numel():
        launch = _plan_launch(drive, constants, form)
        kernel = {"resident": resident_forward, "streamed": streamed_forward, "given": given_forward}[launch.kind]
        needs_scratch = launch.kind == "streamed" and not save
        scratch = drive.new_empty(batch, 2 * constants.real.shape[0]) if needs_scratch else projections
        arguments, options = _make_arguments(drive, state, constants, form, reset, lengths, states, scratch, launch)
        with torch.cuda.device_of(drive):  # Triton launches on the current device
            kernel[(triton.cdiv(batch, launch.rows), form.heads)](
                *arguments, batch, steps, SAVE=projections.numel() > 0, **options
            )
    return states, projections


def backward(
    gradient: Tensor,
    states: Tensor,
    projections: Tensor,
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Constants]:
    """Return the gradients of the drive, the initial state and each of the constants.

    Args:
        gradient: With respect to the states.
        states, projections: The results of `forward`; projections that were not saved are computed by one product.
        drive, state, constants, form, reset, lengths: As in `adpt_scan`.
    """
    (batch, steps), size, heads = gradient.shape[:2], constants.real.shape[0], form.heads
    launch = _plan_launch(drive, constants, form)
    new = gradient.new_empty if gradient.numel() else gradient.new_zeros  # the kernels write every entry
    to_drive, to_state, sums = new(drive.shape), new(state.shape), new(batch, len(SUMS), size)
    to_projections, sources = gradient, gradient  # not used
    if not form.directions_in_drive:
        to_projections, sources = new(batch, steps, heads, 2 * (size // heads)), new(batch, steps, heads, size // heads)
        if not projections.numel():
            projections = _project(states, state, constants, form, reset)
    if gradient.numel():
        kernel = {"resident": resident_backward, "streamed": streamed_backward, "given": given_backward}[launch.kind]
        arguments, options = _make_arguments(drive, state, constants, form, reset, lengths, states, projections, launch)
        with torch.cuda.device_of(gradient):
            kernel[(triton.cdiv(batch, launch.rows), heads)](
                *arguments, gradient.contiguous(), to_drive, to_state, to_projections, sources, sums, batch, steps,
                **options,
            )  # fmt: skip
    weight = None
    if not form.directions_in_drive:
        left, right = to_projections.flatten(0, 1), sources.flatten(0, 1)
        weight = torch.bmm(left.permute(1, 2, 0), right.transpose(0, 1)).unflatten(1, (2, -1))
    return to_drive, to_state, _collect(sums, weight, constants, form)


def _collect(sums: Tensor, weight: Tensor | None, constants: Constants, form: Form) -> Constants:
    """Return the gradients of the constants, None for those that are None. No two may share memory."""
    unused = {"weight", "bias"} if form.directions_in_drive else set()
    if form.beta_in_drive:
        unused.add("beta")
    found: dict[str, Any] = {"weight": weight}
    for name, constant in constants._asdict().items():
        rows = sums[:, SUMS.index(_FIRST_ROWS.get(name, name)) :] if name != "weight" else sums
        if constant is None:
            found[name] = None
        elif name in unused:
            found[name] = torch.zeros_like(constant)
        elif name == "bias":
            found[name] = rows[:, :2].unflatten(-1, (form.heads, -1)).transpose(1, 2).sum(0)
        elif name != "weight":
            found[name] = rows[:, :2].sum(0) if name in _FIRST_ROWS else rows[:, 0, : constant.shape[0]].sum(0)
    return Constants(**found)


def _project(states: Tensor, state: Tensor, constants: Constants, form: Form, reset: Tensor | None) -> Tensor:
    """Return K x and V x of every step, (batch, time, heads, 2, m)."""
    assert constants.weight is not None
    size = constants.real.shape[0]
    before = find_states_before(states, state, reset)[..., :size]
    if form.source != Source.STATE:
        before = before.relu() if form.source == Source.RELU else (before >= form.spike_threshold).to(before.dtype)
    projected = torch.einsum("bthi,hpji->bthpj", before.unflatten(-1, (form.heads, -1)), constants.weight)
    return (projected if constants.bias is None else projected + constants.bias).contiguous()


def _plan_launch(drive: Tensor, constants: Constants, form: Form) -> Launch:
    launch = plan_launch(form, constants.real.shape[0], drive.device)
    assert launch is not None, "checked before by `launch.explain_unsupported`"
    return launch


def _make_arguments(
    drive: Tensor,
    state: Tensor,
    constants: Constants,
    form: Form,
    reset: Tensor | None,
    lengths: Tensor | None,
    states: Tensor,
    projections: Tensor,
    launch: Launch,
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that all kernels share, and their options; absent tensors are replaced by one not read."""
    fields = (*check_constants(constants), None if reset is None else reset.view(torch.uint8), lengths)
    tensors = [drive, state, *(states if t is None else t for t in fields), states, projections]
    dot = 0.0 if form.dot is None else form.dot
    epsilon = 0.0 if form.norm_epsilon is None else form.norm_epsilon
    numbers = [epsilon, form.spike_threshold, dot, math.sqrt(1 - dot**2)]
    options: dict[str, Any] = {
        "HEADS": form.heads,
        "SIZE": constants.real.shape[0] // form.heads,
        "PAD": launch.pad,
        "ROWS": launch.rows,
        "PRECISION": launch.precision,
        "BIASED": constants.bias is not None and not form.directions_in_drive,
        "RESETS": reset is not None,
        "RAGGED": lengths is not None,
        "RETRACTION": int(form.retraction),
        "PAIRS": constants.imag is not None,
        "SOURCE": int(form.source),
        "PHASED": form.phased,
        "ROW_BETA": form.beta_in_drive,
        "AWARE": form.rotation_aware,
        "SLOW": constants.decay is not None,
        "NORM": form.norm_epsilon is not None,
        "DOT": form.dot is not None,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }
    if launch.kind == "streamed":
        options |= {"SOME": launch.some, "BLOCK": launch.block, "INNER": launch.inner}
    return [*(t.contiguous() for t in tensors), *numbers], options
