"""Communication between the processes of a `torch.distributed` group, each with one chunk of the time axis."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DistributedError
from ..ops.tolerance import HALF_LIFE, remembered_scale
from .system import System
from .time_axis import LaterSteps, TimeAxis, mark_before_reset
from .transitions import Transition, ZeroTransition

__all__ = ["AffineMap", "Exchange", "RankedTimeAxis", "Ranks"]


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
                "exited, failed, or takes longer than the timeout of the group. First look for an error in the output "
                "of the other ranks; check that all ranks call the solver, and backward, equally often; if one is only "
                "slow, pass timeout=datetime.timedelta(hours=1) to init_process_group."
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
        entering = self.entering(transition, local[:, -1], reset, offset.shape[1])
        return local if entering is None else transition.scan(offset, entering, reset)

    def entering(self, transition: Transition, leaving: Tensor, reset: Tensor | None, steps: int) -> Tensor | None:
        """Return the state that enters this rank, (batch, n); None on rank 0.

        Args:
            transition: The transition of this rank.
            leaving: (batch, n), the last state of this rank if zero enters it. On rank 0, the last state.
            reset: (batch, time) bool, of this rank.
            steps: The number of steps of this rank.
        """
        maps = self._gather_maps(AffineMap(transition.product(steps), _has_reset(leaving, reset), leaving))
        if self.rank == 0:
            return None
        entering = maps[0].end
        for each in maps[1 : self.rank]:
            entering = each(entering)
        return entering

    def make_scan_back(
        self, transition: Transition, reset: Tensor | None, steps: int, scan_chunk: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that runs the adjoint recurrence over the time of all ranks, for this rank.

        The products of the transitions are sent once; each call sends only the gradient that leaves a chunk.

        Args:
            transition: The transition of the forward recurrence of this rank.
            reset: (batch, time) bool, of this rank.
            steps: The number of steps of this rank.
            scan_chunk: Runs the recurrence over the chunk of this rank, with zero after it.
        """
        if self.size == 1 or isinstance(transition, ZeroTransition):
            return scan_chunk
        first = transition.part(None, 0, 1).backward()
        product = transition.product(steps).backward()
        maps: list[AffineMap] = []

        def scan_back(offset: Tensor) -> Tensor:
            local = scan_chunk(offset.clone())
            leaving = first.mv(local[:, :1]).squeeze(1)
            if reset is not None:
                leaving = torch.where(reset[:, :1], 0.0, leaving)
            if not maps:
                maps.extend(self._gather_maps(AffineMap(product, _has_reset(offset, reset), leaving)))
                ends = [each.end for each in maps]
            else:
                ends = self.all_gather(leaving)
            if self.rank == self.size - 1:
                return local
            entering = torch.zeros_like(leaving)
            for each, end in reversed(list(zip(maps, ends, strict=True))[self.rank + 1 :]):
                entering = each._replace(end=end)(entering)
            offset[:, -1] += entering
            return scan_chunk(offset)

        return scan_back


class RankedTimeAxis(TimeAxis):
    """The time axis split over the ranks of a process group, in the order of the ranks.

    Args:
        ranks: The processes.
        lengths: The number of steps of each rank.
    """

    is_split = True

    def __init__(self, ranks: Ranks, lengths: list[int]):
        self.ranks, self._lengths = ranks, lengths
        self.rank = ranks.rank

    def lengths(self, steps: int) -> list[int]:
        return self._lengths

    def scan(self, transition: Transition, offset: Tensor, initial: Tensor, reset: Tensor | None) -> Tensor:
        return self.ranks.scan(transition, offset, initial, reset)

    def entering(self, transition: Transition, leaving: Tensor, reset: Tensor | None, steps: int) -> Tensor | None:
        return self.ranks.entering(transition, leaving, reset, steps)

    def make_scan_back(self, transition: Transition, reset: Tensor | None, steps: int) -> Callable[[Tensor], Tensor]:
        scan_chunk = super().make_scan_back(transition, reset, steps)
        return self.ranks.make_scan_back(transition, reset, steps, scan_chunk)

    def with_previous(self, system: System, states: Tensor) -> System:
        own = remembered_scale(states, system.reset)
        reset = system.reset
        has_reset = own.new_zeros(len(own), 1) if reset is None else reset.any(1, keepdim=True).to(own)
        earlier = self.ranks.all_gather(torch.cat((states[:, -1], own, has_reset), -1))[: self.rank]
        recent, size = torch.zeros_like(own), states.shape[-1]
        for length, message in zip(self._lengths, earlier, strict=False):
            after, cut = message[:, size:-1], message[:, -1:] > 0
            recent = torch.maximum(after, torch.where(cut, 0.0, recent * 0.5 ** (length / HALF_LIFE)))
        initial = earlier[-1][:, :size] if earlier else system.initial
        return dataclasses.replace(system, initial=initial, recent_scale=recent)

    def sum(self, values: Tensor) -> Tensor:
        return self.ranks.all_sum(values)

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        return self.ranks.broadcast(values, source)

    def earlier_maximum(self, values: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        largest, also = self._gather_maxima(values, also)
        earlier = largest[: self.rank]
        return (torch.maximum(values, earlier.amax(0).unsqueeze(1)) if len(earlier) else values), also

    def later_maximum(self, values: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        largest, also = self._gather_maxima(values, also)
        later = largest[self.rank + 1 :]
        return (torch.maximum(values, later.amax(0).unsqueeze(1)) if len(later) else values), also

    def _gather_maxima(self, values: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest value of each sequence in each process, (processes, batch), and the maximum of `also`."""
        own = values.nan_to_num(torch.inf, torch.inf).amax(1)
        every = torch.stack(self.ranks.all_gather(torch.cat((own, also))))
        return every[:, : len(own)], every[:, len(own) :].amax(0)

    def receive_from_next(self, values: Tensor) -> Tensor:
        later = self.ranks.all_gather(values)[self.rank + 1 :]
        return later[0] if later else torch.zeros_like(values)

    def receive_from_later(
        self, leaving: Tensor, values: Tensor, weighted: Tensor | None, reset: Tensor | None
    ) -> LaterSteps:
        cut = mark_before_reset(reset)
        scale = remembered_scale(values.flip(1), None if cut is None else cut.flip(1))
        has_reset = scale.new_zeros(len(scale), 1) if reset is None else reset.any(1, keepdim=True).to(scale)
        first_reset = scale.new_zeros(len(scale), 1) if reset is None else reset[:, :1].to(scale)
        sent = [leaving.squeeze(1), scale, has_reset, first_reset]
        if weighted is not None:
            sent.append(weighted.nan_to_num(torch.inf, torch.inf))
        sizes = [each.shape[1] for each in sent]
        after, largest = torch.zeros_like(scale), torch.zeros_like(scale)
        gradient = torch.zeros_like(leaving)
        messages = self.ranks.all_gather(torch.cat(sent, -1))
        for length, message in list(zip(self._lengths, messages, strict=True))[: self.rank : -1]:
            leaving, size, ends, starts, *weights = message.split(sizes, 1)
            after = torch.maximum(size, torch.where(ends > 0, 0.0, after * 0.5 ** (length / HALF_LIFE)))
            after = torch.where(starts > 0, 0.0, after)  # a step with a reset passes no gradient back
            gradient = leaving.unsqueeze(1)
            for each in weights:
                largest = torch.maximum(largest, each)
        return LaterSteps(gradient, after, None if weighted is None else largest)

    def count_leading(self, holds: Tensor, also: Tensor) -> tuple[Tensor, Tensor]:
        own, _ = super().count_leading(holds, also)
        every = torch.stack(self.ranks.all_gather(torch.cat((own, also))))
        reached = torch.zeros_like(own)
        unbroken = torch.ones_like(reached, dtype=torch.bool)
        for length, count in zip(self._lengths, every[:, : len(own)], strict=True):
            reached = reached + torch.where(unbroken, count, 0)
            unbroken = unbroken & (count == length)
        return reached, every[:, len(own) :].amax(0)

    def count_trailing(self, holds: Tensor, also: Tensor) -> tuple[int, Tensor]:
        own, _ = super().count_trailing(holds, also)
        every = torch.stack(self.ranks.all_gather(torch.cat((also.new_tensor([own]), also))))
        reached = 0
        for length, count in zip(reversed(self._lengths), reversed(every[:, 0].tolist()), strict=True):
            reached += count
            if count < length:
                break
        return reached, every[:, 1:].amax(0)

    def maximum(self, values: Tensor) -> Tensor:
        return torch.stack(self.ranks.all_gather(values)).amax(0)


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


def _has_reset(like: Tensor, reset: Tensor | None) -> Tensor:
    """Return whether each sequence has a reset, (batch, 1)."""
    if reset is None:
        return torch.zeros(like.shape[0], 1, dtype=torch.bool, device=like.device)
    return reset.any(1, keepdim=True)


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error, without the source location that torch prepends."""
    return re.sub(r"^\[[^]]*\]\s*", "", str(error).strip()).partition("\n")[0].partition(". ")[0].rstrip(".")[:200]
