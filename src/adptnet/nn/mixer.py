"""Base class of mixers: sequence layers without a cell, such as attention. It handles shapes, padding and resets."""

import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._validate import check_lengths, check_not_nested, check_reset, make_validity_mask
from ..cells.base import count_positions, register_state, select_rows
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..spec import ModuleSpec, check_size, reset_from_spec
from .streaming import Streamable

__all__ = ["Mixer", "MixerSpec", "MixerState", "Steps", "check_heads"]


class MixerSpec(ModuleSpec):
    """Base class of the specs of mixers.

    Attributes:
        width: Features in and out.
    """

    width: int


@register_state
class MixerState(NamedTuple):
    """State of a mixer, carried from one call to the next."""

    parts: tuple[Tensor, ...]  # each (batch, ...)
    position: Tensor  # (batch,) int64, steps since the sequence began

    def detach(self) -> "MixerState":
        """Return the state detached from the autograd graph, for truncated backpropagation."""
        return MixerState(tuple(part.detach() for part in self.parts), self.position)

    def to(self, *target: Any, **options: Any) -> "MixerState":
        """Return the state moved or cast; arguments as for `ADPTState.to`."""
        parts = tuple(part.to(*target, **options) for part in self.parts)
        device = parts[0].device if parts else torch.empty(0, device=self.position.device).to(*target, **options).device
        return MixerState(parts, self.position.to(device, non_blocking=options.get("non_blocking", False)))

    def select(self, rows: Any) -> "MixerState":
        """Return the state of the sequences `rows`; see `ADPTState.select`.

        Args:
            rows: Indices or a mask over the batch.
        """
        return MixerState(tuple(select_rows(part, rows) for part in self.parts), select_rows(self.position, rows))


class Steps(NamedTuple):
    """Beginnings and ends of the sequences of a batch."""

    position: Tensor  # (batch, time): steps since the sequence began
    reset: Tensor | None  # (batch, time): True where a sequence begins
    lengths: Tensor | None  # (batch,): true lengths
    inside: Tensor | None  # (batch, time): True before the end of each sequence

    def last(self, values: Tensor) -> Tensor:
        """Return `values`, (batch, time, ...), at the last step of each sequence.

        Args:
            values: (batch, time, ...).
        """
        if self.lengths is None:
            return values[:, -1]
        return values[torch.arange(values.shape[0], device=values.device), self.lengths - 1]


class Mixer(Streamable, abc.ABC):
    """Base class of mixers: (batch, time, width) in and out, with an explicit state.

    A subclass implements `mix`. Nothing is kept in the module between calls.
    """

    spec: MixerSpec

    @property
    def width(self) -> int:
        return self.spec.width

    @abc.abstractmethod
    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs and the parts of the state at the last step of each sequence.

        Args:
            x: (batch, time, width), zero in the padding.
            parts: The parts of the state before the first step; None if all sequences begin here.
            steps: Beginnings and ends of the sequences.
        """

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        **run: Any,
    ) -> tuple[Tensor, MixerState]:
        """Run the mixer along a sequence.

        Args:
            x: (batch, time, width).
            state: The state that an earlier call returned.
            lengths: (batch,) true lengths of right-padded sequences. Outputs past the end are zero.
            reset: (batch, time) bool, True where a new sequence begins.
            run: Options of recurrent layers, such as `solver`; raises `InputError` unless None.

        Returns:
            Outputs (batch, time, width) and the state after the last step.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths, reset=reset)
        check_not_nested(x)
        for name, value in run.items():
            if value is not None:
                raise InputError(f"a {type(self).__name__} takes no {name}=; it is for recurrent layers. Drop it.")
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.width or not x.is_floating_point():
            shape = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"a {type(self).__name__} takes floating point (batch, time, {self.width}); got {shape}.")
        batch, count = x.shape[:2]
        if state is not None and (not isinstance(state, tuple) or len(state) != 2 or state[1].shape[0] != batch):
            raise InputError(f"state must be the MixerState an earlier call returned for {batch} sequences.")
        begun = torch.zeros(batch, dtype=torch.int64, device=x.device) if state is None else state[1]
        if not count:
            if state is None:
                raise InputError(f"a sequence needs at least one step; got shape {tuple(x.shape)}.")
            return x.clone(), MixerState(*state)
        lengths = check_lengths(lengths, batch, count, x.device)
        reset = check_reset(reset, batch, count)
        inside = None if lengths is None else make_validity_mask(lengths, count)
        if inside is not None:
            x = torch.where(inside.unsqueeze(-1), x, 0.0)  # padding must not affect the result
        steps = Steps(count_positions(begun, count, reset), reset, lengths, inside)
        y, parts = self.mix(x, None if state is None else state[0], steps)
        y = y if inside is None else torch.where(inside.unsqueeze(-1), y, 0.0)
        return y, MixerState(parts, steps.last(steps.position) + 1)

    def step(self, x: Tensor, state: MixerState | None = None) -> tuple[Tensor, MixerState]:
        """Run one step, with the same result as `forward`.

        Args:
            x: (batch, width).
            state: The state that an earlier call returned.
        """
        y, after = self(x.unsqueeze(-2), state)
        return y.squeeze(-2), after

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)


def check_heads(owner: MixerSpec, num_heads: int, **sizes: int) -> None:
    """Raise `SpecError` unless `num_heads` divides every size.

    Args:
        owner: The spec, for the message.
        num_heads: Number of heads.
        sizes: Sizes by field name.
    """
    check_size(owner, num_heads=num_heads, **sizes)
    for name, size in sizes.items():
        if size % num_heads:
            raise SpecError(
                f"{type(owner).__name__}({name}={size}, num_heads={num_heads}): it must be a multiple of num_heads. "
                f"Pass {name}={-(-size // num_heads) * num_heads}."
            )
