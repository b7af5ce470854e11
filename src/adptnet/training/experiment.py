"""An experiment: a task, a model for it and the settings of its training. What config.json holds."""

from typing import Any

from ..errors import IncompatibleError
from ..nn import LayerSpec
from ..nn.bidirectional import BidirectionalSpec
from ..nn.block import BlockSpec
from ..nn.model import ModelSpec
from ..spec import Spec, check_kind, spec
from ..tasks import Task
from .config import TrainConfig

__all__ = ["Experiment", "model_for"]


@spec
class Experiment(Spec):
    """All that decides the numbers of a run; equal experiments give equal numbers.

    Attributes:
        task: What is learnt.
        model: What learns it.
        training: How.
    """

    task: Task
    model: ModelSpec
    training: TrainConfig

    def __post_init__(self) -> None:
        check_kind(self, Task, "tasks.WordProblem()", task=self.task)
        check_kind(self, ModelSpec, "training.model_for(task, layer)", model=self.model)
        check_kind(self, TrainConfig, "training.TrainConfig()", training=self.training)
        for name, needed in _ends(self.task).items():
            given = getattr(self.model, name)
            if given != needed:
                raise IncompatibleError(
                    f"Experiment(task={self.task}): it needs a model with {name}={needed!r}, and this one has "
                    f"{name}={given!r}. Pass model=training.model_for(task, layer)."
                )


def model_for(task: Task, layer: LayerSpec | BidirectionalSpec, *, depth: int = 1, **block: Any) -> ModelSpec:
    """A model around `layer` with the ends that `task` needs; `block` as `BlockSpec` takes it."""
    return ModelSpec(BlockSpec(layer, **block), depth=depth, **_ends(task))


def _ends(task: Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in ("vocabulary", "input_size", "output_size", "head")}
