"""Strategies: how a run uses its processes. The training loop is the same for one process and for many."""

import abc
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adptnet.errors import IncompatibleError
from adptnet.ops.products import bfloat16_products

from ..tasks import Batch
from .config import Precision

__all__ = [
    "DetachedStates",
    "SingleProcess",
    "Strategy",
    "bfloat16_autocast",
    "clip_gradients",
    "detect_strategy",
]


class Strategy(abc.ABC):
    """Base class: the processes of a run, their devices and their communication.

    Attributes:
        rank: The index of this process; 0 is the first.
        world_size: The number of processes.
        device: The device of this process.
        loss_scale: The factor on the loss that fp16 needs; None in other precisions.
        has_full_weights: Whether each process holds all weights; False if they are sharded.
    """

    rank: int
    world_size: int
    device: torch.device
    loss_scale: float | None = None
    has_full_weights: bool = True

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    def move_to_device(self, batch: Batch) -> Batch:
        """Return `batch` on the device of this process.

        Args:
            batch: A batch on any device.
        """
        lengths = None if batch.lengths is None else batch.lengths.to(self.device)
        return batch._replace(
            inputs=batch.inputs.to(self.device), targets=batch.targets.to(self.device), lengths=lengths
        )

    @abc.abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training, as `outputs, states = wrapped(inputs, lengths, states)`.

        Args:
            model: Keeps the parameters; evaluation and checkpoints use it directly.
        """

    @abc.abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which outputs and loss are computed."""

    @abc.abstractmethod
    def backward(self, loss: Tensor, wrapped: nn.Module, last: bool) -> None:
        """Add the gradients of `loss` to those of the parameters.

        Args:
            loss: The loss of one micro-batch.
            wrapped: The module that `wrap` returned.
            last: Whether this is the last micro-batch of a step, in which gradients are averaged over the processes.
        """

    @abc.abstractmethod
    def clip_and_step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None
    ) -> float:
        """Clip the gradients and take an optimizer step, unless the gradient norm is not finite.

        Args:
            optimizer: The optimizer of `parameters`.
            parameters: Their gradients are clipped together.
            clip: The largest gradient norm; None for no clipping.

        Returns:
            The gradient norm before clipping.
        """

    @abc.abstractmethod
    def sum(self, values: list[float]) -> list[float]:
        """Return the sums of `values` over all processes (all-reduce).

        Args:
            values: The values of this process.
        """

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank (all-gather).

        Args:
            value: The value of this process, which can be pickled.
        """

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return all of a tensor that may be sharded, on the CPU. Every process must call it in the same order.

        Args:
            tensor: A tensor, or its shard on this process.
        """
        return tensor.detach().cpu()

    def shard_tensor(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return `tensor`, which is complete, sharded and placed as `like` is.

        Args:
            tensor: The complete tensor.
            like: A tensor of the same shape.
        """
        return tensor.to(like.device)


class SingleProcess(Strategy):
    """One process, in float32 or bfloat16, which needs no package besides torch.

    Args:
        device: The device to train on; the CPU by default.
        precision: The precision of outputs and loss.

    Raises:
        IncompatibleError: fp16, which needs a scaled loss.
    """

    rank, world_size = 0, 1

    def __init__(self, device: torch.device | str | None = None, precision: Precision = "float32"):
        if precision == "fp16":
            raise IncompatibleError("precision='fp16' scales the loss. Pass strategy=detect_strategy('fp16').")
        self.device = torch.device(device or "cpu")
        self.precision = precision

    def wrap(self, model: nn.Module) -> nn.Module:
        return DetachedStates(model)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return bfloat16_autocast(self.device, recurrence=self.precision == "bf16-all")

    def backward(self, loss: Tensor, wrapped: nn.Module, last: bool) -> None:
        loss.backward()

    def clip_and_step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None
    ) -> float:
        norm = float(clip_gradients(parameters, clip))
        if math.isfinite(norm):
            optimizer.step()
        return norm

    def sum(self, values: list[float]) -> list[float]:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [value]


@contextmanager
def bfloat16_autocast(device: torch.device, *, recurrence: bool) -> Iterator[None]:
    """Return a context with autocast to bfloat16.

    Args:
        device: The device.
        recurrence: Whether the products of the recurrence run in bfloat16, too.
    """
    with torch.autocast(device.type, torch.bfloat16), bfloat16_products(recurrence):
        yield


class DetachedStates(nn.Module):
    """A model that returns detached hidden states, because data parallelism waits for the gradient of every output.

    Args:
        model: Called as `outputs, states = model(inputs, states, lengths=lengths)`.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, lengths: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        outputs, states = self.model(inputs, state, lengths=lengths)
        return outputs, pytree.tree_map(Tensor.detach, states)


def clip_gradients(parameters: list[nn.Parameter], clip: float | None) -> Tensor:
    """Clip the norm of all gradients to `clip`, unless it is None, and return the norm before that.

    Args:
        parameters: The parameters whose gradients are clipped in place.
        clip: The largest norm; None for no clipping.
    """
    return nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)


def detect_strategy(precision: Precision = "float32", *, sharded: bool = False, device: str | None = None) -> Strategy:
    """Return the strategy for the way this process was started: directly or by torchrun.

    Accelerate is imported only if there are several processes, fp16 or sharded weights.

    Args:
        precision: The precision of outputs and loss.
        sharded: Whether to shard the weights over the processes (FSDP).
        device: The device to train on; a GPU by default if there is one.

    Raises:
        IncompatibleError: The device cannot be used, or accelerate is needed and not installed.
    """
    if device is not None:
        _check_device(device)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1 and precision != "fp16" and not sharded:
        return SingleProcess(device or ("cuda" if torch.cuda.is_available() else "cpu"), precision)
    try:
        from .distributed import AccelerateStrategy

        return AccelerateStrategy(precision, sharded=sharded, device=device)
    except ImportError:
        one = "sharded weights need" if sharded else f"precision={precision!r} needs"
        cause = f"{processes} processes need" if processes > 1 else one
        raise IncompatibleError(f"{cause} accelerate: pip install 'adptnet[train]'.") from None


def _check_device(name: str) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise IncompatibleError(f"device {name!r} cannot be used here: {reason}. Pass --device cpu.") from None
