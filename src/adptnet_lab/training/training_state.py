"""The state of a run, and the files that a checkpoint stores it in. Nothing is pickled."""

import dataclasses
import json
import math
from typing import Any

import torch
from torch import Tensor, nn

from adptnet.checkpoint import find_tied, serialize
from adptnet.errors import CheckpointError
from adptnet.spec import ModuleSpec

from .config import TrainConfig
from .microbatches import CarriedStates
from .strategy import Strategy

__all__ = [
    "Progress",
    "TrainingState",
    "get_random_states",
    "parse_progress",
    "serialize_weights",
    "set_random_states",
]

_WEIGHTS, _BEST, _OPTIMIZER, _RANDOM, _CARRIED, _PROGRESS = (
    "model.safetensors",
    "best.safetensors",
    "optimiser.safetensors",
    "random.safetensors",
    "carried.safetensors",
    "progress.json",
)


@dataclasses.dataclass
class Progress:
    """The progress of a run. The step is the position in the data, because a batch is a function of the step."""

    step: int = 0
    seconds: float = 0.0
    evaluations: int = 0
    best: float | None = None
    best_step: int | None = None
    stale: int = 0  # evaluations since the best
    waited: int = 0  # evaluations since the best or the last plateau
    plateaus: int = 0
    scale: float | None = None  # of the loss, in fp16
    stopped: bool = False  # before the last step, because of `stop_at` or `patience`

    def record_score(self, score: float, higher_is_better: bool, config: TrainConfig) -> bool:
        """Update the best score, the plateaus and whether to stop, after an evaluation.

        Args:
            score: The score that selects the weights.
            higher_is_better: Whether a higher score is better.
            config: Its `stop_at`, `patience` and schedule apply.

        Returns:
            Whether the score is the best so far, which NaN never is.
        """
        self.evaluations += 1
        first = self.best is None and not math.isnan(score)
        better = first or (self.best is not None and (score > self.best if higher_is_better else score < self.best))
        if better:
            self.best, self.best_step, self.stale, self.waited = score, self.step, 0, 0
        else:
            self.stale += 1
            self.waited += 1
        patience = getattr(config.schedule, "patience", None)
        if patience is not None and self.waited > patience:
            self.plateaus, self.waited = self.plateaus + 1, 0
        limit = config.stop_at
        reached = limit is not None and (score >= limit if higher_is_better else score <= limit)
        self.stopped = reached or (config.patience is not None and self.stale >= config.patience)
        return better


def parse_progress(content: bytes) -> Progress:
    """Return the progress in the content of a progress.json.

    Args:
        content: The content of the file.

    Raises:
        CheckpointError: The step or the time is not possible.
    """
    progress = Progress(**json.loads(content))
    if not isinstance(progress.step, int) or progress.step < 0 or not isinstance(progress.seconds, float):
        raise CheckpointError(f"A checkpoint cannot be of step {progress.step!r} after {progress.seconds!r} seconds.")
    return progress


class TrainingState:
    """Weights, optimizer, random generators, carried states and progress of a run.

    Args:
        model: The model; its parameters may be sharded.
        optimizer: Its optimizer.
        strategy: The processes.
        carried: The hidden states that are carried from one batch to the next.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, carried: CarriedStates):
        self.carried = carried
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.progress = Progress()
        self.best_weights: dict[str, Tensor] | None = None
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [named[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def copy_weights(self) -> dict[str, Tensor]:
        """Return a copy of the complete weights on the CPU. Every process must call it."""
        return {name: self.strategy.gather_tensor(tensor).clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy complete weights into the model.

        Args:
            weights: A state dict of the same names, shapes and dtypes as the model's.

        Raises:
            CheckpointError: They are the weights of another model.
        """
        own = self.model.state_dict()
        kinds = [{name: (t.shape, t.dtype) for name, t in each.items()} for each in (own, weights)]
        if kinds[0] != kinds[1]:
            name = next(name for name in {**own, **weights} if kinds[0].get(name) != kinds[1].get(name))
            here, there = (_describe_kind(kind.get(name)) for kind in kinds)
            raise CheckpointError(
                f"The checkpoint holds the weights of another model: its {name} is {there}, and that of the model is "
                f"{here}."
            )
        for name, tensor in own.items():
            tensor.copy_(self.strategy.shard_tensor(weights[name], tensor))

    def to_files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint, by name. Every process must call it, and gets the same."""
        from safetensors.torch import save

        self.progress.scale = self.strategy.loss_scale
        files = {
            _WEIGHTS: serialize_weights(self.model, self.copy_weights()),
            _OPTIMIZER: save(self._optimizer_tensors()),
            _RANDOM: save(self._gather_tensors(get_random_states(self.strategy.device))),
            _CARRIED: save(self._gather_tensors(self.carried.to_tensors())),
            _PROGRESS: json.dumps(dataclasses.asdict(self.progress), indent=1).encode(),
        }
        if self.best_weights is not None:
            files[_BEST] = serialize_weights(self.model, self.best_weights)
        return files

    def load_files(self, files: dict[str, bytes]) -> None:
        """Restore the state that `to_files` wrote, with the same number of processes.

        Args:
            files: The files of a checkpoint, by name.

        Raises:
            CheckpointError: The checkpoint is of another model or of another number of processes.
        """
        from safetensors.torch import load

        self.load_weights(load(files[_WEIGHTS]))
        self.best_weights = load(files[_BEST]) if _BEST in files else None
        self._load_optimizer(load(files[_OPTIMIZER]))
        states = load(files[_RANDOM])
        processes = len({name.split("/")[0] for name in states})
        if processes != self.strategy.world_size:
            raise CheckpointError(
                f"The checkpoint is of a run in {processes} processes, and this one has {self.strategy.world_size}: "
                "their random numbers would differ. Start as many."
            )
        set_random_states(self._select_own(states))
        self.carried.load_tensors(self._select_own(load(files[_CARRIED])))
        self.progress = parse_progress(files[_PROGRESS])
        self.strategy.loss_scale = self.progress.scale

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for number, values in self.optimizer.state_dict()["state"].items():
            for key, value in values.items():
                whole = self.strategy.gather_tensor(torch.as_tensor(value))
                tensors[f"{self._names[number]}/{key}"] = whole.contiguous().clone()
        return tensors

    def _load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            owner, _, key = name.rpartition("/")
            number = self._names.index(owner)
            like = parameters[number]
            is_sharded = tensor.shape == like.shape  # unlike the count of steps
            state.setdefault(number, {})[key] = self.strategy.shard_tensor(tensor, like) if is_sharded else tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def _gather_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of every process, under RANK/NAME."""
        every = enumerate(self.strategy.gather(tensors))
        return {f"{rank}/{name}": tensor.contiguous() for rank, own in every for name, tensor in own.items()}

    def _select_own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of this process from what `_gather_tensors` returned."""
        split = [(name.partition("/"), tensor) for name, tensor in tensors.items()]
        return {name: tensor for (rank, _, name), tensor in split if rank == str(self.strategy.rank)}


def _describe_kind(kind: tuple[torch.Size, torch.dtype] | None) -> str:
    return "missing" if kind is None else f"{tuple(kind[0])} of {kind[1]}"


def get_random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators that dropout draws from: the CPU's, and that of `device` if it is a GPU.

    Args:
        device: The device of the run.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Restore the states that `get_random_states` returned.

    Args:
        states: The states, by device type.
    """
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def serialize_weights(model: nn.Module, weights: dict[str, Tensor]) -> bytes:
    """Return the content of a weights file, which `adptnet.load` reads if the model has a spec.

    Args:
        model: Provides the spec and the tied parameters.
        weights: The complete weights.
    """
    spec = getattr(model, "spec", None)
    return serialize(spec, weights, find_tied(model)) if isinstance(spec, ModuleSpec) else serialize(None, weights)
