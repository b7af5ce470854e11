"""Check that the `prepare` function of a user's cell treats each step on its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError

__all__ = ["check_prepare"]

BATCH, STEPS = 2, 6


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Context manager that sets all submodules to evaluation mode, where a batch norm treats each row on its own."""
    parts = list(module.modules())
    before = [part.training for part in parts]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.training = training


def check_prepare(cell: nn.Module, prepare: Callable[[Tensor], Any], input_size: int, like: Tensor) -> None:
    """Raise `InputError` if the result of `prepare` for a step depends on other steps, other sequences or its index.

    A cell calls `prepare` for whole sequences or for single steps, which must give the same drive. A function that is
    random, or that raises for all inputs tried here, is not tested. Modules are tested in evaluation mode.

    Args:
        cell: The cell, which contains the modules that `prepare` uses.
        prepare: A function of inputs (batch, time, input_size).
        input_size: Features of the input.
        like: A tensor with the dtype and device of the inputs.
    """
    if like.is_meta:
        return
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(BATCH, STEPS, input_size, generator=generator, device="cpu")
    for inputs in (normal.to(like), (normal > 0).to(like)):  # zeros and ones may be indices of an embedding
        parts = [inputs, inputs, *(inputs[-1:, t : t + 1] for t in range(STEPS))]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _evaluation_mode(cell):
                whole, again, *steps = [_flatten(prepare(part)) for part in parts]
        except Exception:
            continue
        is_random = any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(whole, again, strict=False))
        for values, *single in zip(whole, *steps, strict=False):
            if not is_random and not _is_close(torch.cat(single, 1), values[-1:]):
                raise InputError(
                    "the result of prepare= for a step alone is not that for the same step in a sequence: it couples "
                    "steps, for example by a convolution over time, or sequences, or it depends on the index of the "
                    "step. A layer would then compute single steps and sequences differently. Apply to the inputs "
                    "before the call what couples steps, or keep the earlier steps in the hidden state."
                )
        return


def _flatten(values: Any) -> list[Tensor]:
    """Return the leaves of a pytree of tensors (batch, time, ...), integers as floating-point numbers."""
    leaves = pytree.tree_leaves(values)
    return [leaf if leaf.is_floating_point() or leaf.is_complex() else leaf.double() for leaf in leaves]


def _is_close(single: Tensor, whole: Tensor) -> bool:
    """Return whether two results (1, time, ...) differ by rounding errors only, in every channel."""
    if single.shape != whole.shape:
        return False
    single, whole = single.nan_to_num(), whole.nan_to_num()
    allowed = torch.finfo(whole.dtype).eps ** 0.5 * whole.abs().amax(1, keepdim=True)
    return bool(((single - whole).abs() <= allowed).all())
