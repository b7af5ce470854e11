"""Pytrees of tensors as one flat tensor, and back."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import IncompatibleError, InputError
from ..spec import check_size

__all__ = ["Layout"]


class Layout(NamedTuple):
    """The structure of a pytree and the shape of each of its tensors, without batch dimensions."""

    template: Any  # a pytree of the same structure. A TreeSpec itself could not be copied
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of_template(cls, owner: object, template: Any) -> tuple["Layout", Tensor]:
        """Return the layout of a template, and its flat initial state.

        Args:
            owner: The cell, for messages.
            template: A pytree of sizes, for zeros, and of tensors.
        """
        leaves, structure = pytree.tree_flatten(template)
        parts = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                check_size(owner, state=leaf)
            parts.append(leaf.detach() if isinstance(leaf, Tensor) else torch.zeros(leaf))
        if not parts:
            raise IncompatibleError(
                f"state={template!r} holds no tensors. Pass sizes, e.g. state={{'h': 64, 'c': 64}}."
            )
        layout = cls(pytree.tree_unflatten([0] * len(parts), structure), tuple(tuple(part.shape) for part in parts))
        dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]
        dtype = dtypes[0] if dtypes else torch.get_default_dtype()
        return layout, torch.cat([part.reshape(-1).to(dtype) for part in parts])

    @classmethod
    def of_values(cls, values: Any, leading: int) -> "Layout":
        """Return the layout of a pytree of tensors.

        Args:
            values: The pytree.
            leading: Number of leading dimensions, such as batch and time, that every tensor has.

        Raises:
            InputError: A leaf is not a tensor with so many dimensions.
        """
        leaves, structure = pytree.tree_flatten(values)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.dim() < leading:
                given = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise InputError(f"prepare must return tensors (batch, time, ...); got {given}.")
        shapes = tuple(tuple(leaf.shape[leading:]) for leaf in leaves)
        return cls(pytree.tree_unflatten([0] * len(leaves), structure), shapes)

    @property
    def structure(self) -> pytree.TreeSpec:
        """The structure of the pytree."""
        return pytree.tree_structure(self.template)

    @property
    def size(self) -> int:
        """Number of entries of the flat tensor."""
        return sum(map(math.prod, self.shapes))

    @property
    def is_tensor(self) -> bool:
        """Whether the pytree is a single tensor."""
        return isinstance(self.template, int)

    def ravel(self, tree: Any, leading: torch.Size | None) -> Tensor:
        """Return a pytree as one tensor (*leading, size).

        Args:
            tree: A pytree of this structure.
            leading: The leading dimensions of every tensor; those of the first tensor if None.

        Raises:
            InputError: The structure or a shape is another one.
        """
        leaves, structure = pytree.tree_flatten(tree)
        if structure != self.structure:
            raise InputError(f"the state is {_describe(structure)}; this cell has {_describe(self.structure)}.")
        parts = []
        for leaf, shape in zip(leaves, self.shapes, strict=True):
            if not isinstance(leaf, Tensor):
                raise InputError(f"the state holds a {type(leaf).__name__}; this cell needs tensors.")
            if leading is None:
                leading = leaf.shape[: leaf.dim() - len(shape)]
            if tuple(leaf.shape) != (*leading, *shape):
                expected = (*leading, *shape)
                raise InputError(f"a tensor of the state has shape {tuple(leaf.shape)}; this cell needs {expected}.")
            parts.append(leaf.reshape(*leading, math.prod(shape)))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def unravel(self, flat: Tensor) -> Any:
        """Return the pytree of a flat tensor.

        Args:
            flat: (..., size).
        """
        parts = flat.split([math.prod(shape) for shape in self.shapes], -1)
        leaves = [part.reshape(*flat.shape[:-1], *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return pytree.tree_unflatten(leaves, self.structure)


def _describe(structure: pytree.TreeSpec) -> str:
    sizes = pytree.tree_unflatten(["·"] * structure.num_leaves, structure)
    return str(sizes).replace("'·'", "·")
