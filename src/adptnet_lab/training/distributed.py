"""Several processes, mixed precision and sharded weights, by accelerate and FSDP."""

import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adptnet._dtype import compute_dtype
from adptnet.errors import DistributedError, IncompatibleError

from .config import Precision
from .strategy import DetachedStates, Strategy, bfloat16_autocast, clip_gradients

__all__ = ["AccelerateStrategy", "SharedBatchNorm", "share_batch_norms"]


class AccelerateStrategy(Strategy):
    """The processes that torchrun started, set up by accelerate: data parallel, optionally with sharded weights.

    Args:
        precision: The precision of outputs and loss.
        sharded: Whether to shard the weights over the processes (FSDP).
        device: "cpu" to leave GPUs unused; a GPU by default if there is one.

    Raises:
        IncompatibleError: fp16 on a CPU.
        DistributedError: Not all processes joined, or there is only one to shard the weights over.
    """

    def __init__(self, precision: Precision = "float32", *, sharded: bool = False, device: str | None = None):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedDataParallelKwargs

        # Batch norms share their statistics, so buffers agree; a layer at β = 0 has weights without a gradient.
        data_parallel = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
        mixed = {"float32": "no", "bf16-all": "bf16"}.get(precision, precision)
        self._bfloat16_recurrence = precision == "bf16-all"
        cpu = (
            device == "cpu" or not torch.accelerator.is_available()
        )  # accelerate forms a process group on CPUs only on request
        AcceleratorState._reset_state()  # global: an earlier run of this process may have had another precision
        self._accelerator = Accelerator(mixed_precision=mixed, cpu=cpu, kwargs_handlers=[data_parallel])
        self.rank, self.world_size = self._accelerator.process_index, self._accelerator.num_processes
        self.device = self._accelerator.device
        if precision == "fp16" and self.device.type == "cpu":  # accelerate would silently train in float32
            raise IncompatibleError("precision='fp16' needs a GPU. Pass --training.precision bf16 on a CPU.")
        self._sharded = sharded
        self.has_full_weights = not sharded
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size != processes:
            raise DistributedError(
                f"torchrun started {processes} processes, and accelerate joined {self.world_size} of them."
            )
        if sharded and self.world_size == 1:
            start = "torchrun --nproc_per_node=2 -m adptnet train TASK --sharded"
            raise DistributedError(f"weights are sharded over several processes. Start with {start}")

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.world_size == 1:
            return DetachedStates(model)
        share_batch_norms(model)
        if self._sharded:
            self._shard(model)
            return DetachedStates(model)
        wrapped: nn.Module = self._accelerator.prepare_model(DetachedStates(model))
        return wrapped

    def _shard(self, model: nn.Module) -> None:
        """Shard each block, then the rest; copy the optimizer settings of parameters to the sharded ones."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        marks = {name: getattr(parameter, "_optim", {}) for name, parameter in model.named_parameters()}
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for block in getattr(model, "blocks", []):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for name, parameter in model.named_parameters():
            parameter._optim = marks[name]  # type: ignore[attr-defined]

    def autocast(self) -> AbstractContextManager[Any]:
        if self._bfloat16_recurrence:
            return bfloat16_autocast(self.device, recurrence=True)
        context: AbstractContextManager[Any] = self._accelerator.autocast()
        return context

    def backward(self, loss: Tensor, wrapped: nn.Module, last: bool) -> None:
        scaler = self._accelerator.scaler
        with nullcontext() if last else self._accelerator.no_sync(wrapped):
            (loss if scaler is None else scaler.scale(loss)).backward()

    def clip_and_step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None
    ) -> float:
        scaler = self._accelerator.scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = float(self.gather_tensor(clip_gradients(parameters, clip)))
        if scaler is not None:  # the scaler checks for infinities itself: it skips the step and lowers the scale
            scaler.step(optimizer)
            scaler.update()
            return norm if math.isfinite(norm) else 0.0
        if math.isfinite(norm):
            optimizer.step()
        return norm

    @property
    def loss_scale(self) -> float | None:
        scaler = self._accelerator.scaler
        return None if scaler is None else float(scaler.get_scale())

    @loss_scale.setter
    def loss_scale(self, value: float | None) -> None:
        scaler = self._accelerator.scaler
        if scaler is not None and value is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": value})

    def sum(self, values: list[float]) -> list[float]:
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()

    def shard_tensor(self, tensor: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return tensor.to(like.device)
        return distribute_tensor(tensor.to(self.device), like.device_mesh, like.placements)


class SharedBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` on (rows, features), with mean and variance over the rows of every process.

    Unlike `nn.SyncBatchNorm` it also runs on CPUs.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        wide = x.to(compute_dtype(x.dtype))
        count = _sum_over_processes(torch.full((), float(len(x)), device=x.device, dtype=wide.dtype))
        mean = _sum_over_processes(wide.sum(0)) / count
        variance = _sum_over_processes((wide - mean).square().sum(0)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            share = self.momentum or 0.1
            with torch.no_grad():
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * count / (count - 1), share)
                self.num_batches_tracked.add_(1)
        normed = (wide - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
        return normed.to(x.dtype)


def share_batch_norms(model: nn.Module) -> None:
    """Replace every `nn.BatchNorm1d` inside `model` by a `SharedBatchNorm` with the same parameters and buffers.

    Args:
        model: Changed in place.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.BatchNorm1d:
                shared = SharedBatchNorm(child.num_features, child.eps, child.momentum)
                shared._parameters, shared._buffers = child._parameters, child._buffers
                setattr(module, name, shared.train(child.training))


def _sum_over_processes(values: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """The sum over processes. The gradient of the sum of all losses is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total
