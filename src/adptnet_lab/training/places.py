"""Where a run happens: one process, or the ranks of a process group. The loop is the same for both."""

import abc
import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adptnet.errors import DistributedError, IncompatibleError

from ..tasks import Batch
from .batch_norm import share_batch_norms
from .config import Precision

__all__ = ["Accelerated", "Alone", "Outputs", "Place", "launched"]


class Place(abc.ABC):
    """The processes of a run and what they share."""

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def moved(self, batch: Batch) -> Batch:
        lengths = None if batch.lengths is None else batch.lengths.to(self.device)
        return batch._replace(
            inputs=batch.inputs.to(self.device), targets=batch.targets.to(self.device), lengths=lengths
        )

    @abc.abstractmethod
    def wrapped(self, model: nn.Module) -> nn.Module:
        """What to call in training: `outputs, states = wrapped(inputs, lengths, states)`. `model` keeps the weights."""

    @abc.abstractmethod
    def autocast(self) -> AbstractContextManager[Any]: ...

    @abc.abstractmethod
    def backward(self, loss: Tensor, wrapped: nn.Module, last: bool) -> None:
        """Adds to the gradients; gradients of all processes meet in the `last` part of a step."""

    @abc.abstractmethod
    def stepped(self, optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None) -> float:
        """Clips and steps, unless the gradient is not finite; returns its norm."""

    @abc.abstractmethod
    def summed(self, values: list[float]) -> list[float]:
        """The sums over all processes."""

    @abc.abstractmethod
    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor that may be spread over the processes; every process calls it, in the same order."""
        return tensor.detach().cpu()

    def spread(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The other way round: `tensor` laid out as `like`."""
        return tensor.to(like.device)

    scale: float | None = None  # of the loss, where a narrow precision needs one
    complete: bool = True  # whether each process has all of the weights


class Alone(Place):
    """One process in float32. Needs nothing but torch."""

    rank, count = 0, 1

    def __init__(self, device: torch.device | str | None = None):
        self.device = torch.device(device or "cpu")

    def wrapped(self, model: nn.Module) -> nn.Module:
        return Outputs(model)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor, wrapped: nn.Module, last: bool) -> None:
        loss.backward()

    def stepped(self, optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None) -> float:
        norm = float(nn.utils.clip_grad_norm_(parameters, _limit(clip)))
        if math.isfinite(norm):
            optimiser.step()
        return norm

    def summed(self, values: list[float]) -> list[float]:
        return values

    def gathered(self, value: Any) -> list[Any]:
        return [value]


class Accelerated(Place):
    """What accelerate sets up from the environment that torchrun makes: data parallel, or with weights sharded."""

    def __init__(self, precision: Precision = "float32", *, sharded: bool = False, device: str | None = None):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedDataParallelKwargs

        # Statistics of batch norms are shared, so buffers agree; a layer at β = 0 has weights without a gradient.
        data_parallel = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
        mixed = "no" if precision == "float32" else precision
        cpu = device == "cpu" or not torch.accelerator.is_available()  # unsaid, accelerate would form no group on CPUs
        AcceleratorState._reset_state()  # it is the process's: a run before this one may have had another precision
        self._accelerator = Accelerator(mixed_precision=mixed, cpu=cpu, kwargs_handlers=[data_parallel])
        self.rank, self.count = self._accelerator.process_index, self._accelerator.num_processes
        self.device = self._accelerator.device
        if precision == "fp16" and self.device.type == "cpu":  # accelerate would go on in float32
            raise IncompatibleError("precision='fp16' needs a GPU. Pass --training.precision bf16 on a CPU.")
        self._sharded = sharded
        self.complete = not sharded
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if self.count != ranks:
            raise DistributedError(f"torchrun started {ranks} processes, and accelerate joined {self.count} of them.")
        if sharded and self.count == 1:
            start = "torchrun --nproc_per_node=2 -m adptnet train TASK --sharded"
            raise DistributedError(f"weights are sharded over several processes. Start with {start}")

    def wrapped(self, model: nn.Module) -> nn.Module:
        if self.count == 1:
            return Outputs(model)
        share_batch_norms(model)
        if self._sharded:
            self._shard(model)
            return Outputs(model)
        wrapped: nn.Module = self._accelerator.prepare_model(Outputs(model))
        return wrapped

    def _shard(self, model: nn.Module) -> None:
        """Each block, then the rest, by FSDP; marks on parameters are carried over to the new ones."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        marks = {name: getattr(parameter, "_optim", {}) for name, parameter in model.named_parameters()}
        mesh = init_device_mesh(self.device.type, (self.count,))
        for block in getattr(model, "blocks", []):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for name, parameter in model.named_parameters():
            parameter._optim = marks[name]  # type: ignore[attr-defined]

    def autocast(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._accelerator.autocast()
        return context

    def backward(self, loss: Tensor, wrapped: nn.Module, last: bool) -> None:
        with nullcontext() if last else self._accelerator.no_sync(wrapped):
            self._scaled(loss).backward()

    def stepped(self, optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None) -> float:
        scaler = self._accelerator.scaler
        if scaler is not None:
            scaler.unscale_(optimiser)
        norm = float(self.whole(nn.utils.clip_grad_norm_(parameters, _limit(clip))))
        if scaler is not None:  # looks for infinities itself: it skips the step and lowers the scale
            scaler.step(optimiser)
            scaler.update()
            return norm if math.isfinite(norm) else 0.0
        if math.isfinite(norm):
            optimiser.step()
        return norm

    def _scaled(self, loss: Tensor) -> Tensor:
        scaler = self._accelerator.scaler
        return loss if scaler is None else scaler.scale(loss)

    @property
    def scale(self) -> float | None:
        scaler = self._accelerator.scaler
        return None if scaler is None else float(scaler.get_scale())

    @scale.setter
    def scale(self, value: float | None) -> None:
        scaler = self._accelerator.scaler
        if scaler is not None and value is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": value})

    def summed(self, values: list[float]) -> list[float]:
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gathered(self, value: Any) -> list[Any]:
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()

    def spread(self, tensor: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return tensor.to(like.device)
        return distribute_tensor(tensor.to(self.device), like.device_mesh, like.placements)


def launched(precision: Precision = "float32", *, sharded: bool = False, device: str | None = None) -> Place:
    """The place this process was started in. accelerate is asked for only where torch alone does not do."""
    if device is not None:
        _check_device(device)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 and precision == "float32" and not sharded:
        return Alone(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        return Accelerated(precision, sharded=sharded, device=device)
    except ImportError:
        one = "sharded weights need" if sharded else f"precision={precision!r} needs"
        wanted = f"{ranks} processes need" if ranks > 1 else one
        raise IncompatibleError(f"{wanted} accelerate: pip install 'adptnet[train]'.") from None


def _check_device(name: str) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise IncompatibleError(f"device {name!r} cannot be used here: {reason}. Pass --device cpu.") from None


class Outputs(nn.Module):
    """A model whose states are cut from the graph: processes wait for the gradient of all that is handed over."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, lengths: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        outputs, states = self.model(inputs, state, lengths=lengths)
        return outputs, pytree.tree_map(Tensor.detach, states)


def _limit(clip: float | None) -> float:
    return math.inf if clip is None else clip
