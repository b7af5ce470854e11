"""TensorBoard and Weights & Biases, through accelerate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adptnet.errors import IncompatibleError

__all__ = ["Trackers"]


class Trackers:
    """The trackers asked for by name; each gets single numbers under names with slashes."""

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
            self._trackers[-1].store_init_configuration(dict(flattened(settings, textual=True)))

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(dict(flattened(numbers)), step=step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


def flattened(numbers: Any, prefix: str = "", *, textual: bool = False) -> list[tuple[str, Any]]:
    """Single numbers of a nested dictionary by path; text as well if asked for."""
    if isinstance(numbers, dict):
        return [
            item
            for key, value in numbers.items()
            for item in flattened(value, f"{prefix}/{key}" if prefix else str(key), textual=textual)
        ]
    kept = (int, float, str) if textual else (int, float)
    return [(prefix, numbers)] if isinstance(numbers, kept) else []
