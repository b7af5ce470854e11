"""Step by step with the state kept between calls: for frames, sensor readings or tokens as they arrive."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..cells.base import select_rows
from ..errors import InputError

__all__ = ["Streamable", "Streaming"]


class Streaming:
    """A layer or model that runs one step at a time, without gradients, and keeps the state.

    Made by `layer.streaming(batch)`. Each step has the result of `step`, and so that of the whole sequence. A step of a
    layer that the compiled kernel supports is one call of it: eigenvalues, gain and β are evaluated once, and again
    when the bytes of their parameters change. All other parameters are read at every step, so that training in between
    takes effect at the next one. A module with dropout or batch norm must be in evaluation mode, as for `step`.

    Args:
        module: A layer or model that has `step`.
        batch: Number of sequences that run side by side.

    Raises:
        InputError: `batch` is not an integer >= 0.
    """

    def __init__(self, module: nn.Module, batch: int = 1):
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
            raise InputError(f"streaming(batch={batch!r}): must be a number of sequences, an integer >= 0.")
        self._step: Any = module.step
        self._module, self._batch, self._state = module, batch, None
        self._is_on_cpu = _find_device(module) == torch.device("cpu")

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self._batch

    @property
    def state(self) -> Any:
        """The state after the last step, as `step` returns it; None for the initial state. It can be kept and set."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        rows = {tuple(t.shape[:1]) for t in pytree.tree_leaves(state) if isinstance(t, Tensor)}
        if state is not None and rows != {(self._batch,)}:
            raise InputError(
                f"the state must be one that an earlier call returned for {self._batch} sequences, or None for the "
                f"initial state; got {type(state).__name__} of {_describe(rows)}. Call streaming(batch) for another "
                "number."
            )
        self._state = state

    def __call__(self, x: Tensor) -> Tensor:
        """Run one step and keep the state.

        Args:
            x: (batch, features), or (batch,) tokens, as `step` takes them.

        Returns:
            The outputs, without gradients.

        Raises:
            InputError: `x` has another number of sequences, or the wrong shape, dtype or device.
        """
        if not isinstance(x, Tensor) or x.shape[:1] != (self._batch,):
            given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"this stream takes one step of {self._batch} sequences, ({self._batch}, …); got {given}. "
                "Call streaming(batch) for another number."
            )
        if not (x.is_cpu and self._is_on_cpu):  # devices are compared only where they may differ
            self._check_device(x)
        y: Tensor
        if torch.is_grad_enabled():
            with torch.no_grad():
                y, self._state = self._step(x, self._state)
        else:
            y, self._state = self._step(x, self._state)
        return y

    def select(self, rows: Any) -> None:
        """Keep some sequences only, e.g. for beam search or when others have ended.

        Args:
            rows: Indices, which may repeat, a mask, or a slice.

        Raises:
            InputError: `rows` is not one-dimensional, or not of integers or booleans.
        """
        count = len(select_rows(torch.arange(self._batch), rows))
        self._state = None if self._state is None else self._state.select(rows)
        self._batch = count

    def reset(self) -> None:
        """Return to the initial state."""
        self._state = None

    def _check_device(self, x: Tensor) -> None:
        device = _find_device(self._module)  # the module may have been moved
        self._is_on_cpu = device == torch.device("cpu")
        if device is not None and x.device != device:
            raise InputError(f"x is on {x.device}, the parameters are on {device}. Move one of them.")

    def __repr__(self) -> str:
        return f"Streaming({type(self._module).__name__}, batch={self._batch})"


class Streamable(nn.Module):
    """Base class of the modules that have `step`."""

    def streaming(self, batch: int = 1) -> Streaming:
        """Return a stepper that keeps the state: `stream = layer.streaming(1)`, then `y = stream(x)` for each step.

        Args:
            batch: Number of sequences that run side by side.
        """
        return Streaming(self, batch)


def _find_device(module: nn.Module) -> torch.device | None:
    """Return the device of the parameters; None without parameters."""
    parameter = next(module.parameters(), None)
    return None if parameter is None else parameter.device


def _describe(rows: set[tuple[int, ...]]) -> str:
    counts = sorted(row[0] if row else 0 for row in rows)
    return f"{' and '.join(map(str, counts))} sequences" if counts else "no tensors"
