"""Recorders: where the training loop sends its numbers and checkpoints."""

import abc
from typing import Any

from ..tasks import Batch
from .divergence import Diagnosis
from .training_state import TrainingState

__all__ = ["NullRecorder", "Recorder"]


class Recorder(abc.ABC):
    """Base class of recorders. Every process calls every method at the same steps.

    Attributes:
        resume_hint: End of a sentence on an interrupted run: how to resume it.
    """

    resume_hint: str = "."

    @abc.abstractmethod
    def resume(self, state: TrainingState) -> list[float]:
        """Restore `state` from the newest checkpoint, if there is one, and return the losses up to there.

        Args:
            state: Restored in place.
        """

    @abc.abstractmethod
    def log(self, step: int, numbers: dict[str, Any]) -> None:
        """Record numbers after a step: nested dictionaries of numbers, lists and text.

        Args:
            step: The number of steps done.
            numbers: The numbers, by name.
        """

    @abc.abstractmethod
    def is_save_due(self, step: int) -> bool:
        """Return whether a checkpoint should be saved after this step.

        Args:
            step: The number of steps done.
        """

    @abc.abstractmethod
    def save(self, state: TrainingState) -> None:
        """Save a checkpoint.

        Args:
            state: The state of the run.
        """

    @abc.abstractmethod
    def save_snapshot(self, name: str, state: TrainingState) -> None:
        """Save the weights permanently, under `name`.

        Args:
            name: The name of the snapshot.
            state: The state of the run.
        """

    @abc.abstractmethod
    def save_failure(self, state: TrainingState, batch: Batch, diagnosis: Diagnosis) -> str:
        """Save what is needed to repeat a step that failed.

        Args:
            state: The state before the step.
            batch: The batch of the step.
            diagnosis: What was found.

        Returns:
            A sentence on where it was saved, with a space before it, for an error message; empty if nothing was.
        """


class NullRecorder(Recorder):
    """Records nothing."""

    def resume(self, state: TrainingState) -> list[float]:
        return []

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        pass

    def is_save_due(self, step: int) -> bool:
        return False

    def save(self, state: TrainingState) -> None:
        pass

    def save_snapshot(self, name: str, state: TrainingState) -> None:
        pass

    def save_failure(self, state: TrainingState, batch: Batch, diagnosis: Diagnosis) -> str:
        return ""
