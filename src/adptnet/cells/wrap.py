"""Cells made of a recurrent module of torch, or of any module with the signature of one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import IncompatibleError, InputError
from .base import Cell
from .function_cell import FunctionCell
from .torch_cell import CELLS, TorchCell, check_whole, describe

__all__ = ["as_cell", "from_torch", "is_time_first"]


def from_torch(module: nn.Module, *, state: Any = None, input_size: int | None = None) -> Cell:
    """Wrap a recurrent module as a cell, with the module's own parameters.

    - An `nn.RNNCell`, `nn.GRUCell` or `nn.LSTMCell`.
    - A whole `nn.RNN`, `nn.GRU` or `nn.LSTM`, in one direction: the states of all its layers are one state.
    - Any module with the signature of these cells, (input, hidden) -> hidden, where hidden is a tensor (batch, n) or a
      tuple of them, such as (h, c).

    The output is the hidden state h: of the last layer, and the first tensor of a tuple. The state is a flat tensor;
    `cell.unravel` returns it as torch does, and `state=` of a call takes either form.

    Args:
        module: The module.
        state: The sizes of the hidden state of a module that is not of torch, such as 64 or (64, 64). If not given, the
            module is called once, without a hidden state.
        input_size: Features of the input; the module's attribute `input_size` if not given.

    Raises:
        IncompatibleError: The module is bidirectional, has projections, or does not have the signature of a cell.
    """
    if isinstance(module, CELLS):
        return TorchCell(module)
    if isinstance(module, nn.RNNBase):
        check_whole(module)
        return TorchCell(module)
    if isinstance(module, Cell) or not isinstance(module, nn.Module):
        raise IncompatibleError(
            f"from_torch takes a module such as nn.GRUCell or nn.GRU; got {type(module).__name__}. "
            "For a function: cells.from_function(lambda state, input: ..., state_size=n)."
        )
    return _wrap_module(module, state, getattr(module, "input_size", None) if input_size is None else input_size)


def as_cell(system: object) -> Cell:
    """Return the cell of a layer, or of a module of `torch.nn`; a cell itself.

    Args:
        system: A cell, a layer with a cell, or an `nn.GRUCell`, `nn.GRU` or another recurrent module of torch.

    Raises:
        InputError: It is none of these; the message shows how to make a cell.
    """
    if isinstance(system, Cell):
        return system
    inner = getattr(system, "cell", None)
    if isinstance(system, nn.Module) and isinstance(inner, Cell):
        return inner
    if isinstance(system, nn.RNNCellBase | nn.RNNBase):
        return from_torch(system)
    raise InputError(
        f"a {getattr(system, '__name__', type(system).__name__)} is neither a layer nor a cell. Pass an ADPTNet or "
        "Recurrent layer, layer.cell, an nn.GRU or nn.GRUCell, cells.from_torch(module) for another module with the "
        "signature of nn.GRUCell, or cells.from_function(step, state_size=n) for a function."
    )


def is_time_first(system: object) -> bool:
    """Return whether a layer, or a recurrent module of torch, takes (time, batch, features).

    Args:
        system: A layer, a cell or a module.
    """
    return not isinstance(system, Cell) and getattr(system, "batch_first", True) is False


class _StateFirst(nn.Module):
    """A module with the signature of a torch cell, called as function(state, input)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, state: Any, inputs: Tensor) -> Any:
        return self.module(inputs, state)


def _wrap_module(module: nn.Module, state: Any, input_size: int | None) -> Cell:
    name = type(module).__name__
    if state is None:
        if input_size is None:
            raise IncompatibleError(
                f"{name} has no attribute input_size. Pass input_size=, or the sizes of its hidden state: "
                "state=64 or state=(64, 64)."
            )
        state = _probe_state(module, input_size)
    first = next(iter(pytree.tree_leaves(state)), None)
    size = first.numel() if isinstance(first, Tensor) else first
    return FunctionCell(_StateFirst(module), state, input_size, output_size=size)


def _probe_state(module: nn.Module, input_size: int) -> Any:
    """Return the sizes of the hidden state that a module returns for one input of zeros."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.zeros(1, input_size, dtype=like.dtype, device=like.device)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            after = module(x)
            again = module(x, after)
    except Exception as error:
        raise IncompatibleError(
            f"from_torch called {type(module).__name__} on an input of shape {tuple(x.shape)}, then again with the "
            f"hidden state that it returned, and it raised {type(error).__name__}: {error}. Pass the sizes of the "
            "hidden state, e.g. state=64 or state=(64, 64), or write "
            "cells.from_function(lambda state, input: ..., state=...)."
        ) from error
    finally:
        for part, training in modes:
            part.training = training
    leaves, structure = pytree.tree_flatten(after)
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    if (
        not leaves
        or structure != pytree.tree_structure(again)
        or not all(s and len(s) == 2 and s[0] == 1 for s in shapes)
    ):
        raise IncompatibleError(
            f"{type(module).__name__} returned {describe(after)} for an input of shape {tuple(x.shape)}. A module "
            "with the signature of nn.GRUCell returns its next hidden state: a tensor (batch, n), or a tuple of them. "
            "Write cells.from_function(lambda state, input: ..., state=...) for another."
        )
    return pytree.tree_unflatten([leaf.shape[-1] for leaf in leaves], structure)
