"""`Experiment`: a task, a model and the settings of the training; the content of config.json."""

import hashlib
import json
from typing import Any

from adptnet.errors import IncompatibleError
from adptnet.nn.block import BlockSpec
from adptnet.nn.spiking_model import SpikingModelSpec
from adptnet.nn.swiglu import SwiGLUBlockSpec
from adptnet.spec import ModuleSpec, Spec, check_kind, spec

from ..tasks import Task
from .config import TrainConfig

__all__ = ["Experiment"]


@spec
class Experiment(Spec):
    """Everything that determines the numbers of a run: equal experiments give equal numbers.

    Attributes:
        task: The task to learn.
        model: The model, `task.model(block, depth)` or `task.spiking_model(network)`.
        training: The settings of the training.
    """

    task: Task
    model: ModuleSpec
    training: TrainConfig

    def __post_init__(self) -> None:
        check_kind(self, Task, "tasks.WordProblem()", task=self.task)
        check_kind(self, ModuleSpec, "task.model(block, depth)", model=self.model)
        check_kind(self, TrainConfig, "training.TrainConfig()", training=self.training)
        if isinstance(self.model, SpikingModelSpec):
            needed: ModuleSpec = self.task.spiking_model(self.model)
            call = "task.spiking_model(network)"
        else:
            needed = self.task.model(self.block, self.depth)
            call = "task.model(block, depth)"
        if self.model != needed:
            raise IncompatibleError(
                f"Experiment(task={self.task}): it needs {needed}, and was given {self.model}. Pass model={call}."
            )

    @property
    def digest(self) -> str:
        """A short hash that is the same for equal experiments."""
        numbers_alike = json.loads(self.to_json(), parse_int=float)  # 4 equals 4.0
        return hashlib.sha256(json.dumps(numbers_alike).encode()).hexdigest()[:12]

    @property
    def block(self) -> BlockSpec | SwiGLUBlockSpec:
        """The block that the model repeats."""
        block: Any = getattr(self.model, "block", None)
        if not isinstance(block, SwiGLUBlockSpec):
            check_kind(self, BlockSpec, "task.model(block, depth)", block=block)
        assert isinstance(block, BlockSpec | SwiGLUBlockSpec)
        return block

    @property
    def depth(self) -> int:
        """The number of blocks."""
        depth: int = self.model.depth  # type: ignore[attr-defined]
        return depth
