"""Ranks: the processes of a `torch.distributed` group in the order of time, and what they tell each other."""

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
from .transitions import Transition, Zero

__all__ = ["Line", "Notes", "Ranks", "Stretch"]


class Stretch(NamedTuple):
    """What the steps of a rank make of the state that enters them: product x + end."""

    product: Transition  # as a transition of one step
    cut: Tensor  # (batch, 1) bool: nothing that enters leaves, for there is a reset in between
    end: Tensor  # (batch, n), what leaves if zero enters

    def __call__(self, state: Tensor) -> Tensor:
        through = self.product.mv(state.unsqueeze(1)).squeeze(1)
        return torch.where(self.cut, 0.0, through) + self.end


@dataclasses.dataclass
class Notes:
    """A small object of each rank."""

    own: Any = None
    every: list[Any] = dataclasses.field(default_factory=list)


class Ranks:
    """The processes of `group` (all if None). Every method is called by all of them, in the same order."""

    def __init__(self, group: dist.ProcessGroup | None):
        if not dist.is_available() or not dist.is_initialized():
            raise DistributedError(
                "there is no process group. Call torch.distributed.init_process_group('gloo') ('nccl' on GPUs) before "
                "the solve, and start the program with: torchrun --nproc-per-node=4 program.py"
            )
        self.group = group
        self.here = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        if self.here < 0:
            raise DistributedError(
                f"rank {dist.get_rank()} is not in the group it was given. Call the solver only on the ranks of the "
                "group, or make it with torch.distributed.new_group([...]) of all that call."
            )

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each backend raises its own
            raise DistributedError(
                f"rank {self.here} of {self.count} could not {what}: {_reason(error)}. Another rank has ended, "
                "failed, or takes longer than the timeout of the group. See what the other ranks printed first; check "
                "that all call the solver, and backward, equally often; if one is only slow, pass "
                "timeout=datetime.timedelta(hours=1) to init_process_group."
            ) from error

    @contextlib.contextmanager
    def together(self) -> Iterator["Notes"]:
        """What is done inside is done by all ranks, or an error is raised on all. They then know each other's notes."""
        notes, raised = Notes(), None
        try:
            yield notes
        except Exception as error:
            raised = error
        message = None if raised is None else f"{type(raised).__name__}: {raised}"
        every: list[Any] = [None] * self.count
        with self._naming("compare notes with the others"):
            dist.all_gather_object(every, (message, notes.own), group=self.group)
        if raised is not None:
            raise raised
        for rank, (message, _) in enumerate(every):
            if message is not None:
                raise DistributedError(f"rank {rank} stopped, and so does rank {self.here}. There: {message}")
        notes.every = [note for _, note in every]

    def gathered(self, values: Tensor) -> list[Tensor]:
        """The values of every rank, which are of one shape."""
        if not values.numel():
            return [values] * self.count
        values = values.contiguous()
        every = [torch.empty_like(values) for _ in range(self.count)]
        with self._naming("gather from the others"):
            dist.all_gather(every, values, group=self.group)
        return every

    def summed(self, values: Tensor) -> Tensor:
        """The sum of the values of all ranks."""
        total = values.clone(memory_format=torch.contiguous_format)
        if total.numel():
            with self._naming("add up with the others"):
                dist.all_reduce(total, group=self.group)
        return total

    def told(self, values: Tensor, source: int) -> Tensor:
        """The values of rank `source`."""
        told = values.clone(memory_format=torch.contiguous_format)
        if told.numel():
            with self._naming(f"hear from rank {source}"):
                dist.broadcast(told, group=self.group, group_src=source)
        return told

    def stretches(self, own: Stretch) -> list[Stretch]:
        """What the steps of every rank do, in one message of each."""
        tensors = [own.cut.to(own.end.dtype), own.end, *_tensors(own.product)]
        sizes = [tensor.numel() for tensor in tensors]
        every = []
        for message in self.gathered(torch.cat([tensor.flatten() for tensor in tensors])):
            cut, end, *product = (
                part.view(like.shape).clone() for part, like in zip(message.split(sizes), tensors, strict=True)
            )
            every.append(Stretch(_with_tensors(own.product, product), cut > 0, end))
        return every

    def scan(self, transition: Transition, offset: Tensor, initial: Tensor, reset: Tensor | None) -> Tensor:
        """`transition.scan` through the time of all ranks, each with its own part; `initial` enters the first."""
        first = initial if self.here == 0 else torch.zeros_like(initial)
        if self.count == 1 or isinstance(transition, Zero):
            return transition.scan(offset, first, reset)
        alone = transition.scan(offset.clone(), first, reset)
        stretches = self.stretches(Stretch(transition.product(offset.shape[1]), _cut(offset, reset), alone[:, -1]))
        if self.here == 0:
            return alone
        entering = stretches[0].end
        for stretch in stretches[1 : self.here]:
            entering = stretch(entering)
        return transition.scan(offset, entering, reset)

    def scan_back(self, transition: Transition, offset: Tensor, reset: Tensor | None) -> Tensor:
        """The same against time, for the adjoint: x_t = A'_{t+1} x_{t+1} + offset_t; x_t = offset_t before a reset."""
        back = transition.backward()
        ahead = None if reset is None else reset.roll(-1, 1)
        none = torch.zeros_like(offset[:, 0])
        if self.count == 1 or isinstance(transition, Zero):
            return back.scan(offset, none, ahead, reverse=True)
        alone = back.scan(offset.clone(), none, ahead, reverse=True)
        leaving = transition.part(None, 0, 1).backward().mv(alone[:, :1]).squeeze(1)
        if reset is not None:
            leaving = torch.where(reset[:, :1], 0.0, leaving)
        product = transition.product(offset.shape[1]).backward()
        stretches = self.stretches(Stretch(product, _cut(offset, reset), leaving))
        if self.here == self.count - 1:
            return alone
        entering = none
        for stretch in reversed(stretches[self.here + 1 :]):
            entering = stretch(entering)
        offset[:, -1] += entering
        return back.scan(offset, none, ahead, reverse=True)


class Line(NamedTuple):
    """The time of all ranks in a row."""

    ranks: Ranks
    lengths: list[int]  # steps of each rank

    @property
    def start(self) -> int:
        """The steps before those of this rank."""
        return sum(self.lengths[: self.ranks.here])

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def prefix(self, leading: Tensor) -> Tensor:
        """Of how many steps each rank begins with that are so (batch,), how many the whole begins with."""
        return self._joined(self.ranks.gathered(leading))

    def _joined(self, leading: list[Tensor]) -> Tensor:
        reached = torch.zeros_like(leading[0])
        unbroken = torch.ones_like(reached, dtype=torch.bool)
        for length, count in zip(self.lengths, leading, strict=True):
            reached = reached + torch.where(unbroken, count, 0)
            unbroken = unbroken & (count == length)
        return reached

    def entered(self, system: System, ends: list[Tensor]) -> System:
        """The system of this rank with what enters it: the last state of the rank before."""
        return system if self.ranks.here == 0 else dataclasses.replace(system, initial=ends[self.ranks.here - 1])

    def prefix_maximum(self, excess: Tensor) -> Tensor:
        """Return `excess` (batch, time) raised to the largest of the ranks before."""
        every = self.ranks.gathered(excess.nan_to_num(torch.inf, torch.inf).amax(-1, keepdim=True))[: self.ranks.here]
        return torch.maximum(excess, torch.stack(every).amax(0)) if every else excess

    def recent_scale(self, own: Tensor, reset: Tensor | None) -> Tensor:
        """Return the recent scale of the states (batch, n) before this rank, from that after each rank."""
        fresh = own.new_zeros(len(own), 1) if reset is None else reset.any(1, keepdim=True).to(own)
        recent = torch.zeros_like(own)
        every = self.ranks.gathered(torch.cat((own, fresh), -1))[: self.ranks.here]
        for length, message in zip(self.lengths, every, strict=False):
            after, cut = message[:, :-1], message[:, -1:] > 0
            recent = torch.maximum(after, torch.where(cut, 0.0, recent * 0.5 ** (length / HALF_LIFE)))
        return recent

    def summed_up(self, residual: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Of residuals (batch, time) the largest; of right steps, how many the whole begins with."""
        own = torch.stack((residual.amax(-1).double(), right.long().cumprod(-1).sum(-1).double()))
        every = self.ranks.gathered(own)
        worst = torch.stack([worst for worst, _ in every]).amax(0)
        return worst.to(residual.dtype), self._joined([leading.long() for _, leading in every])


def _tensors(transition: Transition) -> list[Tensor]:
    found: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    transition.mapped(noted)
    return found


def _with_tensors(transition: Transition, tensors: Iterable[Tensor]) -> Transition:
    following = iter(tensors)
    return transition.mapped(lambda _: next(following))


def _cut(offset: Tensor, reset: Tensor | None) -> Tensor:
    if reset is None:
        return torch.zeros(offset.shape[0], 1, dtype=torch.bool, device=offset.device)
    return reset.any(1, keepdim=True)


def _reason(error: Exception) -> str:
    """The first sentence of an error, without the place in the source of torch."""
    return re.sub(r"^\[[^]]*\]\s*", "", str(error).strip()).partition("\n")[0].partition(". ")[0].rstrip(".")[:200]
