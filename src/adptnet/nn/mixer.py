"""What a mixer is: one method over a whole sequence. Shapes, ends and beginnings of sequences are seen to here."""

import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cells.base import positions, register_state, select_rows
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..solvers.problem import check_lengths, check_not_nested, valid
from ..spec import ModuleSpec, check_size, reset_from_spec

__all__ = ["Mixer", "MixerSpec", "MixerState", "Steps", "check_heads"]


class MixerSpec(ModuleSpec):
    """The description of a mixer."""

    width: int


@register_state
class MixerState(NamedTuple):
    """What a mixer carries from one call to the next."""

    parts: tuple[Tensor, ...]  # each (batch, ...)
    position: Tensor  # (batch,) int64, steps since the sequence began

    def detach(self) -> "MixerState":
        """The same numbers, cut from the graph: for truncated back-propagation."""
        return MixerState(tuple(part.detach() for part in self.parts), self.position)

    def to(self, *target: Any, **options: Any) -> "MixerState":
        """As `ADPTState.to`."""
        parts = tuple(part.to(*target, **options) for part in self.parts)
        device = parts[0].device if parts else torch.empty(0, device=self.position.device).to(*target, **options).device
        return MixerState(parts, self.position.to(device, non_blocking=options.get("non_blocking", False)))

    def select(self, rows: Any) -> "MixerState":
        """As `ADPTState.select`."""
        return MixerState(tuple(select_rows(part, rows) for part in self.parts), select_rows(self.position, rows))


class Steps(NamedTuple):
    """Where the sequences of a batch begin and end."""

    position: Tensor  # (batch, time) steps since the sequence began
    reset: Tensor | None  # (batch, time) where a sequence begins
    lengths: Tensor | None  # (batch,)
    inside: Tensor | None  # (batch, time) whether a step is before the end

    def last(self, values: Tensor) -> Tensor:
        """`values` (batch, time, ...) at the true end."""
        if self.lengths is None:
            return values[:, -1]
        return values[torch.arange(values.shape[0], device=values.device), self.lengths - 1]


class Mixer(nn.Module, abc.ABC):
    """(batch, time, width) in and out; always returns outputs and state. Nothing is kept in the module."""

    spec: MixerSpec

    @property
    def width(self) -> int:
        return self.spec.width

    @abc.abstractmethod
    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs, and what the state holds at the true end. `parts` is None where nothing came before."""

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        lengths: Tensor | None = None,
        reset: Tensor | None = None,
        **run: Any,
    ) -> tuple[Tensor, MixerState]:
        """As `RecurrentLayer.forward`, on (batch, time, width); there is no solver to choose."""
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths, reset=reset)
        check_not_nested(x)
        for name, value in run.items():
            if value is not None:
                raise InputError(f"a {type(self).__name__} takes no {name}=; it is for recurrent layers. Drop it.")
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.width or not x.is_floating_point():
            shape = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"a {type(self).__name__} takes numbers, (batch, time, {self.width}); got {shape}.")
        batch, count = x.shape[:2]
        if state is not None and (not isinstance(state, tuple) or len(state) != 2 or state[1].shape[0] != batch):
            raise InputError(f"state must be the MixerState an earlier call returned for {batch} sequences.")
        begun = torch.zeros(batch, dtype=torch.int64, device=x.device) if state is None else state[1]
        if not count:
            if state is None:
                raise InputError(f"a sequence needs at least one step; got shape {tuple(x.shape)}.")
            return x.clone(), MixerState(*state)
        lengths = check_lengths(lengths, batch, count, x.device)
        reset = _check_reset(reset, batch, count)
        inside = None if lengths is None else valid(lengths, count)
        if inside is not None:
            x = torch.where(inside.unsqueeze(-1), x, 0.0)  # what is in the padding must not matter
        steps = Steps(positions(begun, count, reset), reset, lengths, inside)
        y, parts = self.mix(x, None if state is None else state[0], steps)
        y = y if inside is None else torch.where(inside.unsqueeze(-1), y, 0.0)
        return y, MixerState(parts, steps.last(steps.position) + 1)

    def step(self, x: Tensor, state: MixerState | None = None) -> tuple[Tensor, MixerState]:
        """One step, (batch, width). The same numbers as `forward`."""
        y, after = self(x.unsqueeze(-2), state)
        return y.squeeze(-2), after

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as the constructor does."""
        reset_from_spec(self, self.spec)


def _check_reset(reset: Tensor | None, batch: int, count: int) -> Tensor | None:
    if reset is None:
        return None
    reset = torch.as_tensor(reset)
    if reset.dtype != torch.bool or reset.shape != (batch, count):
        raise InputError(
            f"reset is {reset.dtype} of shape {tuple(reset.shape)}; it must be torch.bool of shape {(batch, count)}, "
            "True where a sequence begins. Pass reset.bool()."
        )
    return reset


def check_heads(owner: MixerSpec, num_heads: int, **sizes: int) -> None:
    """Raises unless the heads divide every size."""
    check_size(owner, num_heads=num_heads, **sizes)
    for name, size in sizes.items():
        if size % num_heads:
            raise SpecError(
                f"{type(owner).__name__}({name}={size}, num_heads={num_heads}): the heads do not divide it. "
                f"Pass {name}={-(-size // num_heads) * num_heads}."
            )
