"""What a run leaves behind while it goes on, as the loop sees it."""

import abc
from typing import Any

from ..tasks import Batch
from .failure import Diagnosis
from .state import TrainingState

__all__ = ["Keeper", "Nowhere"]


class Keeper(abc.ABC):
    """Keeps numbers and checkpoints. Every process calls every method, at the same steps."""

    how_to_go_on: str = "."  # the end of a sentence

    @abc.abstractmethod
    def resume(self, state: TrainingState) -> list[float]:
        """Takes `state` back to the newest checkpoint, if there is one; returns the losses up to there."""

    @abc.abstractmethod
    def log(self, step: int, numbers: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    def wants_save(self, step: int) -> bool: ...

    @abc.abstractmethod
    def save(self, state: TrainingState) -> None: ...

    @abc.abstractmethod
    def snapshot(self, name: str, state: TrainingState) -> None:
        """Keeps the weights for good."""

    @abc.abstractmethod
    def fail(self, state: TrainingState, batch: Batch, diagnosis: Diagnosis) -> str:
        """Keeps what is needed to run the failed step again; returns a sentence that says where."""


class Nowhere(Keeper):
    """Keeps nothing."""

    def resume(self, state: TrainingState) -> list[float]:
        return []

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        pass

    def wants_save(self, step: int) -> bool:
        return False

    def save(self, state: TrainingState) -> None:
        pass

    def snapshot(self, name: str, state: TrainingState) -> None:
        pass

    def fail(self, state: TrainingState, batch: Batch, diagnosis: Diagnosis) -> str:
        return ""
