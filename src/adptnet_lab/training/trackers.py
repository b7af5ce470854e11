"""Experiment trackers, TensorBoard and Weights & Biases, through accelerate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adptnet.errors import IncompatibleError

__all__ = ["Trackers"]


class Trackers:
    """Trackers that receive single numbers under names with slashes.

    Args:
        names: "tensorboard", "wandb" or both.
        folder: The folder of the run, whose name is that of the run.
        settings: The settings of the run, as JSON.

    Raises:
        IncompatibleError: accelerate or the tracker is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]):
        self._trackers: list[Any] = []
        for name in names:
            try:
                from accelerate.tracking import TensorBoardTracker, WandBTracker

                if name == "tensorboard":
                    self._trackers.append(TensorBoardTracker(folder.name, logging_dir=str(folder / "tensorboard")))
                else:
                    self._trackers.append(WandBTracker(folder.name, dir=str(folder)))
                self._trackers[-1].start()
            except ImportError:
                raise IncompatibleError(
                    f"--keep.track {name} needs accelerate and {name}: pip install 'adptnet[train]' {name}."
                ) from None
            self._trackers[-1].store_init_configuration(dict(_flatten(settings, with_text=True)))

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        """Send the single numbers of a nested dictionary to every tracker.

        Args:
            step: The number of steps done.
            numbers: The numbers, by name.
        """
        for tracker in self._trackers:
            tracker.log(dict(_flatten(numbers)), step=step)

    def close(self) -> None:
        """Finish every tracker."""
        for tracker in self._trackers:
            tracker.finish()


def _flatten(numbers: Any, prefix: str = "", *, with_text: bool = False) -> list[tuple[str, Any]]:
    """Return the single numbers of a nested dictionary by path, and its texts if requested."""
    if isinstance(numbers, dict):
        return [
            item
            for key, value in numbers.items()
            for item in _flatten(value, f"{prefix}/{key}" if prefix else str(key), with_text=with_text)
        ]
    kept = (int, float, str) if with_text else (int, float)
    return [(prefix, numbers)] if isinstance(numbers, kept) else []
