"""A projection of several heads, each on its own part of the state."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .base import Projection, bind_map

__all__ = ["Heads"]


class Heads(Projection):
    """A block-diagonal map: head i maps part i of the input to part i of the output.

    Args:
        projections: The projection of each head.
    """

    def __init__(self, projections: list[Projection]):
        super().__init__(sum(p.in_features for p in projections), sum(p.out_features for p in projections))
        self.projections = nn.ModuleList(projections)

    def dense(self) -> Tensor:
        blocks: Tensor = torch.block_diag(*(projection.dense() for projection in self.split_heads()))
        return blocks

    def bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        maps = [bind_map(projection, dtype) for projection in self.projections]
        return lambda x: torch.cat([f(part) for f, part in zip(maps, x.chunk(len(maps), -1), strict=True)], -1)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return tuple(self.projections)

    def is_stock(self) -> bool:
        # A kernel applies the projection of each head by itself, which a subclass may define otherwise.
        return type(self).bind is Heads.bind and super().is_stock()

    @property
    def macs(self) -> int:
        return sum(projection.macs for projection in self.split_heads())

    def split_heads(self) -> list[Projection]:
        return [projection for projection in self.projections if isinstance(projection, Projection)]
