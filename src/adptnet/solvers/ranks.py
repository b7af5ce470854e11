"""Communication between the processes of a `torch.distributed` group, each with one chunk of the time axis."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DistributedError
from ..ops.tolerance import HALF_LIFE
from .system import System
from .transitions import Transition, ZeroTransition

__all__ = ["AffineMap", "Exchange", "Ranks", "TimeAxis"]


class AffineMap(NamedTuple):
    """Map from the state that enters the chunk of a rank to the state that leaves it: product · x + end."""

    product: Transition  # the product of all transitions of the chunk, as a transition of one step
    cut: Tensor  # (batch, 1) bool: whether a reset in the chunk removes the influence of the entering state
    end: Tensor  # (batch, n), the state that leaves if zero enters

    def __call__(self, state: Tensor) -> Tensor:
        product = self.product.mv(state.unsqueeze(1)).squeeze(1)
        return torch.where(self.cut, 0.0, product) + self.end


@dataclasses.dataclass
class Exchange:
    """A small object of each rank: `own` is that of this rank, `every` those of all ranks."""

    own: Any = None
    every: list[Any] = dataclasses.field(default_factory=list)


class Ranks:
    """The processes of a group. All of them must call every method, in the same order.

    Args:
        group: The process group; all processes if None.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        if not dist.is_available() or not dist.is_initialized():
            raise DistributedError(
                "there is no process group. Call torch.distributed.init_process_group('gloo') ('nccl' on GPUs) before "
                "the solve, and start the program with: torchrun --nproc-per-node=4 program.py"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise DistributedError(
                f"rank {dist.get_rank()} is not in the process group of the solver. Call the solver only on the ranks "
                "of the group, or make the group with torch.distributed.new_group([...]) of all ranks that call it."
            )

    @contextlib.contextmanager
    def _explain_errors(self, action: str) -> Iterator[None]:
        """Raise `DistributedError` with the usual causes if a collective operation fails."""
        try:
            yield
        except Exception as error:  # the type depends on the backend
            raise DistributedError(
                f"rank {self.rank} of {self.size} could not {action}: {_first_sentence(error)}. Another rank has "
                "ended, failed, or takes longer than the timeout of the group. See what the other ranks printed first; "
                "check that all ranks call the solver, and backward, equally often; if one is only slow, pass "
                "timeout=datetime.timedelta(hours=1) to init_process_group."
            ) from error

    @contextlib.contextmanager
    def synchronize_errors(self) -> Iterator[Exchange]:
        """Raise an error on all ranks if the body raises on one; otherwise gather the object of each rank.

        Yields:
            The exchange: set `own` in the body, and read `every` after it.
        """
        exchange, raised = Exchange(), None
        try:
            yield exchange
        except Exception as error:
            raised = error
        message = None if raised is None else f"{type(raised).__name__}: {raised}"
        every: list[Any] = [None] * self.size
        with self._explain_errors("compare its arguments with the other ranks"):
            dist.all_gather_object(every, (message, exchange.own), group=self.group)
        if raised is not None:
            raise raised
        for rank, (message, _) in enumerate(every):
            if message is not None:
                raise DistributedError(f"rank {self.rank} stopped because rank {rank} raised {message}")
        exchange.every = [own for _, own in every]

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Return the values of every rank.

        Args:
            values: The values of this rank, of the same shape on all ranks.
        """
        if not values.numel():
            return [values] * self.size
        values = values.contiguous()
        every = [torch.empty_like(values) for _ in range(self.size)]
        with self._explain_errors("gather from the other ranks"):
            dist.all_gather(every, values, group=self.group)
        return every

    def all_sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all ranks.

        Args:
            values: The values of this rank, of the same shape on all ranks.
        """
        total = values.clone(memory_format=torch.contiguous_format)
        if total.numel():
            with self._explain_errors("sum over the ranks"):
                dist.all_reduce(total, group=self.group)
        return total

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        """Return the values of rank `source`.

        Args:
            values: The values of this rank, of the same shape on all ranks.
            source: The rank that sends.
        """
        received = values.clone(memory_format=torch.contiguous_format)
        if received.numel():
            with self._explain_errors(f"receive from rank {source}"):
                dist.broadcast(received, group=self.group, group_src=source)
        return received

    def _gather_maps(self, own: AffineMap) -> list[AffineMap]:
        """Return the affine map of every rank, sent in one message each."""
        tensors = [own.cut.to(own.end.dtype), own.end, *_list_tensors(own.product)]
        sizes = [tensor.numel() for tensor in tensors]
        every = []
        for message in self.all_gather(torch.cat([tensor.flatten() for tensor in tensors])):
            cut, end, *product = (
                part.view(like.shape).clone() for part, like in zip(message.split(sizes), tensors, strict=True)
            )
            every.append(AffineMap(_with_tensors(own.product, product), cut > 0, end))
        return every

    def scan(self, transition: Transition, offset: Tensor, initial: Tensor, reset: Tensor | None) -> Tensor:
        """Run `transition.scan` over the time of all ranks, and return the states of this rank.

        Args:
            transition: The transition of this rank.
            offset: (batch, time, n), of this rank. May be overwritten.
            initial: (batch, n), the state that enters the first step of rank 0; ignored on other ranks.
            reset: (batch, time) bool, of this rank.
        """
        first = initial if self.rank == 0 else torch.zeros_like(initial)
        if self.size == 1 or isinstance(transition, ZeroTransition):
            return transition.scan(offset, first, reset)
        local = transition.scan(offset.clone(), first, reset)
        own = AffineMap(transition.product(offset.shape[1]), _has_reset(offset, reset), local[:, -1])
        maps = self._gather_maps(own)
        if self.rank == 0:
            return local
        entering = maps[0].end
        for each in maps[1 : self.rank]:
            entering = each(entering)
        return transition.scan(offset, entering, reset)

    def scan_back(self, transition: Transition, offset: Tensor, reset: Tensor | None) -> Tensor:
        """Run the adjoint recurrence backward over the time of all ranks, and return the states of this rank.

        The recurrence is x_t = A'_{t+1} x_{t+1} + offset_t, and x_t = offset_t before a reset.

        Args:
            transition: The transition of the forward recurrence of this rank.
            offset: (batch, time, n), of this rank. Overwritten.
            reset: (batch, time) bool, of this rank.
        """
        back = transition.backward()
        next_reset = None if reset is None else reset.roll(-1, 1)
        zero = torch.zeros_like(offset[:, 0])
        if self.size == 1 or isinstance(transition, ZeroTransition):
            return back.scan(offset, zero, next_reset, reverse=True)
        local = back.scan(offset.clone(), zero, next_reset, reverse=True)
        leaving = transition.part(None, 0, 1).backward().mv(local[:, :1]).squeeze(1)
        if reset is not None:
            leaving = torch.where(reset[:, :1], 0.0, leaving)
        product = transition.product(offset.shape[1]).backward()
        maps = self._gather_maps(AffineMap(product, _has_reset(offset, reset), leaving))
        if self.rank == self.size - 1:
            return local
        entering = zero
        for each in reversed(maps[self.rank + 1 :]):
            entering = each(entering)
        offset[:, -1] += entering
        return back.scan(offset, zero, next_reset, reverse=True)


class TimeAxis(NamedTuple):
    """The time axis of the whole sequence, split over the ranks."""

    ranks: Ranks
    lengths: list[int]  # the number of steps of each rank

    @property
    def total(self) -> int:
        """Number of steps of all ranks."""
        return sum(self.lengths)

    def count_prefix(self, leading: Tensor) -> Tensor:
        """Return the length (batch,) of the prefix of the whole sequence in which a property holds.

        Args:
            leading: (batch,), the length of the prefix in the chunk of this rank.
        """
        return self._join_prefixes(self.ranks.all_gather(leading))

    def _join_prefixes(self, leading: list[Tensor]) -> Tensor:
        reached = torch.zeros_like(leading[0])
        unbroken = torch.ones_like(reached, dtype=torch.bool)
        for length, count in zip(self.lengths, leading, strict=True):
            reached = reached + torch.where(unbroken, count, 0)
            unbroken = unbroken & (count == length)
        return reached

    def with_entering_state(self, system: System, ends: list[Tensor]) -> System:
        """Return the system of this rank, with the last state of the previous rank as its initial state.

        Args:
            system: The system of this rank.
            ends: The last state of each rank.
        """
        return system if self.ranks.rank == 0 else dataclasses.replace(system, initial=ends[self.ranks.rank - 1])

    def prefix_maximum(self, excess: Tensor) -> Tensor:
        """Return the maximum of `excess` and its largest value on all previous ranks.

        Args:
            excess: (batch, time), of this rank.
        """
        every = self.ranks.all_gather(excess.nan_to_num(torch.inf, torch.inf).amax(-1, keepdim=True))[: self.ranks.rank]
        return torch.maximum(excess, torch.stack(every).amax(0)) if every else excess

    def recent_scale(self, own: Tensor, reset: Tensor | None) -> Tensor:
        """Return the recent scale of the states before this rank, (batch, n).

        Args:
            own: (batch, n), the recent scale after this rank, as if zero entered it.
            reset: (batch, time) bool, of this rank.
        """
        has_reset = own.new_zeros(len(own), 1) if reset is None else reset.any(1, keepdim=True).to(own)
        recent = torch.zeros_like(own)
        every = self.ranks.all_gather(torch.cat((own, has_reset), -1))[: self.ranks.rank]
        for length, message in zip(self.lengths, every, strict=False):
            after, cut = message[:, :-1], message[:, -1:] > 0
            recent = torch.maximum(after, torch.where(cut, 0.0, recent * 0.5 ** (length / HALF_LIFE)))
        return recent

    def reduce_progress(self, residual: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest residual (batch,) and the number (batch,) of leading converged steps of all ranks.

        Args:
            residual: (batch, time), of this rank.
            right: (batch, time) bool, whether each step of this rank has converged.
        """
        own = torch.stack((residual.amax(-1).double(), right.long().cumprod(-1).sum(-1).double()))
        every = self.ranks.all_gather(own)
        worst = torch.stack([worst for worst, _ in every]).amax(0)
        return worst.to(residual.dtype), self._join_prefixes([leading.long() for _, leading in every])


def _list_tensors(transition: Transition) -> list[Tensor]:
    tensors: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    transition.map_tensors(record)
    return tensors


def _with_tensors(transition: Transition, tensors: Iterable[Tensor]) -> Transition:
    """Replace the tensors of a transition, in the order of `_list_tensors`."""
    following = iter(tensors)
    return transition.map_tensors(lambda _: next(following))


def _has_reset(offset: Tensor, reset: Tensor | None) -> Tensor:
    """Return whether each sequence has a reset, (batch, 1)."""
    if reset is None:
        return torch.zeros(offset.shape[0], 1, dtype=torch.bool, device=offset.device)
    return reset.any(1, keepdim=True)


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error, without the source location that torch prepends."""
    return re.sub(r"^\[[^]]*\]\s*", "", str(error).strip()).partition("\n")[0].partition(". ")[0].rstrip(".")[:200]
