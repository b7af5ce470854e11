"""All that a run is at one moment, and the files it is kept in. Nothing is pickled."""

import dataclasses
import json
import math
from typing import Any

import torch
from torch import Tensor, nn

from adptnet.checkpoint import find_tied, serialised
from adptnet.errors import CheckpointError
from adptnet.spec import ModuleSpec

from .carry import Carried
from .config import TrainConfig
from .places import Place

__all__ = ["Progress", "TrainingState", "progress_from", "random_states", "set_random_states", "with_spec"]

_WEIGHTS, _BEST, _OPTIMISER, _RANDOM, _CARRIED, _PROGRESS = (
    "model.safetensors",
    "best.safetensors",
    "optimiser.safetensors",
    "random.safetensors",
    "carried.safetensors",
    "progress.json",
)


@dataclasses.dataclass
class Progress:
    """How far a run has come. The data need no more than the step: a batch is a function of it."""

    step: int = 0
    seconds: float = 0.0
    evaluations: int = 0
    best: float | None = None
    best_step: int | None = None
    stale: int = 0  # evaluations since the best
    waited: int = 0  # evaluations since the best or the last plateau
    plateaus: int = 0
    scale: float | None = None  # of the loss, in fp16
    stopped: bool = False  # before the last step, as asked for by the settings

    def judge(self, score: float, higher: bool, config: TrainConfig) -> bool:
        """Takes in the score of an evaluation; returns whether it is the best so far, which NaN never is."""
        self.evaluations += 1
        first = self.best is None and not math.isnan(score)
        better = first or (self.best is not None and (score > self.best if higher else score < self.best))
        if better:
            self.best, self.best_step, self.stale, self.waited = score, self.step, 0, 0
        else:
            self.stale += 1
            self.waited += 1
        patience = getattr(config.schedule, "patience", None)
        if patience is not None and self.waited > patience:
            self.plateaus, self.waited = self.plateaus + 1, 0
        reached = config.stop_at is not None and (score >= config.stop_at if higher else score <= config.stop_at)
        self.stopped = reached or (config.patience is not None and self.stale >= config.patience)
        return better


def progress_from(content: bytes) -> Progress:
    """Read a progress.json."""
    progress = Progress(**json.loads(content))
    if not isinstance(progress.step, int) or progress.step < 0 or not isinstance(progress.seconds, float):
        raise CheckpointError(f"A checkpoint cannot be of step {progress.step!r} after {progress.seconds!r} seconds.")
    return progress


class TrainingState:
    """Weights, optimiser, random numbers and progress of a run, to and from files."""

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer, place: Place, carried: Carried):
        self.carried = carried
        self.model = model
        self.optimiser = optimiser
        self.place = place
        self.progress = Progress()
        self.best: dict[str, Tensor] | None = None
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [named[id(p)] for group in optimiser.param_groups for p in group["params"]]

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights, whole, on the CPU. Every process calls it."""
        return {name: self.place.whole(tensor).clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
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
            tensor.copy_(self.place.spread(weights[name], tensor))

    def to_files(self) -> dict[str, bytes]:
        """Every process calls it, and gets the same."""
        from safetensors.torch import save

        self.progress.scale = self.place.scale
        files = {
            _WEIGHTS: with_spec(self.model, self.weights()),
            _OPTIMISER: save(self._optimiser_tensors()),
            _RANDOM: save(self._of_every_process(random_states(self.place.device))),
            _CARRIED: save(self._of_every_process(self.carried.tensors())),
            _PROGRESS: json.dumps(dataclasses.asdict(self.progress), indent=1).encode(),
        }
        if self.best is not None:
            files[_BEST] = with_spec(self.model, self.best)
        return files

    def from_files(self, files: dict[str, bytes]) -> None:
        """Goes back to what `to_files` wrote, on as many processes."""
        from safetensors.torch import load

        self.set_weights(load(files[_WEIGHTS]))
        self.best = load(files[_BEST]) if _BEST in files else None
        self._set_optimiser(load(files[_OPTIMISER]))
        states = load(files[_RANDOM])
        processes = len({name.split("/")[0] for name in states})
        if processes != self.place.count:
            raise CheckpointError(
                f"The checkpoint is of a run in {processes} processes, and this one has {self.place.count}: "
                "their random numbers would differ. Start as many."
            )
        set_random_states(self._of_this_process(states))
        self.carried.load(self._of_this_process(load(files[_CARRIED])))
        self.progress = progress_from(files[_PROGRESS])
        self.place.scale = self.progress.scale

    def _optimiser_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for number, values in self.optimiser.state_dict()["state"].items():
            for key, value in values.items():
                tensors[f"{self._names[number]}/{key}"] = self.place.whole(torch.as_tensor(value)).contiguous().clone()
        return tensors

    def _set_optimiser(self, tensors: dict[str, Tensor]) -> None:
        parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            owner, _, key = name.rpartition("/")
            number = self._names.index(owner)
            whole = tensor.shape == parameters[number].shape
            state.setdefault(number, {})[key] = self.place.spread(tensor, parameters[number]) if whole else tensor
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state})

    def _of_every_process(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        every = enumerate(self.place.gathered(tensors))
        return {f"{rank}/{name}": tensor.contiguous() for rank, own in every for name, tensor in own.items()}

    def _of_this_process(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        split = [(name.partition("/"), tensor) for name, tensor in tensors.items()]
        return {name: tensor for (rank, _, name), tensor in split if rank == str(self.place.rank)}


def _describe_kind(kind: tuple[torch.Size, torch.dtype] | None) -> str:
    return "missing" if kind is None else f"{tuple(kind[0])} of {kind[1]}"


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that dropout draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def with_spec(model: nn.Module, weights: dict[str, Tensor]) -> bytes:
    """A file that `adptnet.load` reads, where the model has a spec."""
    spec = getattr(model, "spec", None)
    return serialised(spec, weights, find_tied(model)) if isinstance(spec, ModuleSpec) else serialised(None, weights)
