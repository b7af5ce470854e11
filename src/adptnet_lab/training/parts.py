"""The parts of a batch: one for each process and each turn of the accumulation, from the same whole."""

from collections.abc import Iterator

from torch import Tensor

from adptnet.errors import IncompatibleError

from ..tasks import Batch
from ..tasks.base import IGNORED
from .places import Place

__all__ = ["parts_of"]


def parts_of(batch: Batch, place: Place, accumulation: int) -> Iterator[tuple[Batch, float]]:
    """This process's parts of a batch, each with its share of the loss. The shares of all processes sum to one."""
    pieces = place.count * accumulation
    if len(batch.inputs) < pieces:
        raise IncompatibleError(
            f"a batch of {len(batch.inputs)} cannot be cut into {pieces} parts ({place.count} processes, "
            f"accumulation {accumulation}). Raise batch_size or lower accumulation."
        )
    total = _counted(batch.targets)
    names = [name for name in ("inputs", "targets", "lengths") if getattr(batch, name) is not None]
    split = {name: getattr(batch, name).tensor_split(pieces) for name in names}
    for piece in range(place.rank * accumulation, (place.rank + 1) * accumulation):
        part = batch._replace(**{name: parts[piece] for name, parts in split.items()})
        yield part, _counted(part.targets) / max(1, total)


def _counted(targets: Tensor) -> int:
    """How many targets the mean of a loss is over."""
    return targets.numel() if targets.is_floating_point() else int((targets != IGNORED).sum())
