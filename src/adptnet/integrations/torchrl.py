"""Recurrent memory for TorchRL: a layer as a tensordict module that resets its state where an episode begins.

Needs `pip install 'adptnet[rl]'`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError

try:
    from tensordict import TensorDictBase, unravel_key
    from tensordict.nn import TensorDictModuleBase, dispatch
    from torchrl.data import Unbounded
    from torchrl.envs import TensorDictPrimer
    from torchrl.modules.tensordict_module.rnn import recurrent_mode
except ImportError as error:
    raise ImportError("adptnet.integrations.torchrl needs torchrl: pip install 'adptnet[rl]'.") from error

__all__ = ["ADPTModule"]

_Key = str | tuple[str, ...]
_LARGEST_POSITION = 2**24  # integers that float32 holds exactly


class ADPTModule(TensorDictModuleBase):  # type: ignore[misc]
    """A layer or model with the call of TorchRL's `GRUModule`; the entry "is_init" becomes the argument `reset`.

    In sequential mode, the default, each element is one step and the state is read and written. Under
    `torchrl.modules.set_recurrent_mode(True)`, as in losses, the last dimension is time: the layer runs along it in one
    call, from the state at the first step, and begins anew wherever "is_init" is true. No trajectory is split or
    padded. The written state is then that after the last step; at other steps it is zero.

    The state is one tensor (batch, `state_size`): the states of all layers, then the position.

    Args:
        layer: An `ADPTNet`, `Recurrent`, `Stack` or `SequenceModel`, batch first.
        in_keys: Keys of the features and of the state before the step.
        out_keys: Keys of the outputs and of the state after the step; ("next", key of the state before) by default.
        default_recurrent_mode: The mode outside of `set_recurrent_mode`.

    Raises:
        InputError: The layer has no step, or the number of keys is wrong.
    """

    def __init__(
        self,
        layer: nn.Module,
        in_keys: Sequence[_Key] = ("observation", "memory"),
        out_keys: Sequence[_Key] | None = None,
        *,
        default_recurrent_mode: bool = False,
    ):
        super().__init__()
        if not hasattr(layer, "step") or not hasattr(layer, "initial_state"):
            raise InputError(
                f"ADPTModule wraps a layer that has step() and initial_state(); got {type(layer).__name__}. "
                "Build it with ADPTNet, Recurrent, Stack or SequenceModel."
            )
        if getattr(layer, "batch_first", True) is not True:
            raise InputError("ADPTModule: TorchRL puts the batch first. Build the layer with batch_first=True.")
        if len(in_keys) != 2:
            raise InputError(f"ADPTModule(in_keys={list(in_keys)}): two keys, of the features and of the state.")
        if out_keys is None:
            state_key = in_keys[1] if isinstance(in_keys[1], tuple) else (in_keys[1],)
            out_keys = ("embedding", ("next", *state_key))
        if len(out_keys) != 2:
            raise InputError(f"ADPTModule(out_keys={list(out_keys)}): two keys, of the outputs and of the next state.")
        self.layer: Any = layer
        self.in_keys = [*(unravel_key(key) for key in in_keys), "is_init"]
        self.out_keys = [unravel_key(key) for key in out_keys]
        self.default_recurrent_mode = default_recurrent_mode
        leaves, self._structure = pytree.tree_flatten(layer.initial_state(1))  # type: ignore[operator]
        self._is_position = [not leaf.is_floating_point() for leaf in leaves]
        self._shapes = [leaf.shape[1:] for leaf in leaves]
        self._dtype = next(leaf.dtype for leaf in leaves if leaf.is_floating_point())

    @property
    def state_size(self) -> int:
        """Size of the state in a tensordict."""
        sizes: list[int] = [shape.numel() for shape in self._shapes]
        return 1 + sum(size for size, is_position in zip(sizes, self._is_position, strict=True) if not is_position)

    @property
    def recurrent_mode(self) -> bool:
        """Whether a call runs along the last dimension in one call."""
        mode = recurrent_mode()
        return self.default_recurrent_mode if mode is None else bool(mode)

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that adds the state to an environment.

        Raises:
            InputError: The key of the next state is not ("next", key of the state).
        """
        state_key, after = self.in_keys[1], self.out_keys[1]
        expected = ("next", *(state_key if isinstance(state_key, tuple) else (state_key,)))
        if after != expected:
            raise InputError(f"ADPTModule(out_keys=[..., {after!r}]): a primer needs the key {expected!r}.")
        return TensorDictPrimer({state_key: Unbounded((self.state_size,), dtype=self._dtype)}, expand_specs=True)

    @dispatch  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write outputs and the next state to `tensordict`, and return it.

        Args:
            tensordict: Has the features and "is_init"; without a state, sequences begin at the initial state.

        Raises:
            InputError: In recurrent mode, `tensordict` has no dimension of time.
        """
        shape = tensordict.shape
        x = tensordict.get(self.in_keys[0])
        before = tensordict.get(self.in_keys[1], None)
        features = x.shape[len(shape) :]
        starts = tensordict.get("is_init").reshape(shape)
        if self.recurrent_mode:
            if not shape:
                raise InputError("recurrent mode runs along the last batch dimension; the tensordict has none.")
            rows = (-1, shape[-1])
            first = None if before is None else before.reshape(*rows, self.state_size)[:, 0]
            sequences = x.reshape(*rows, *features)
            state = self._unflatten(first, len(sequences), starts.reshape(rows)[:, 0])
            output, after = self.layer(sequences, state, reset=starts.reshape(rows))
            last = self._flatten(after).unsqueeze(1)
            memory = nn.functional.pad(last, (0, 0, shape[-1] - 1, 0))
        else:
            steps = x.reshape(-1, *features)
            first = None if before is None else before.reshape(-1, self.state_size)
            output, after = self.layer.step(steps, self._unflatten(first, len(steps), starts.reshape(-1)))
            memory = self._flatten(after)
        tensordict.set(self.out_keys[0], output.reshape(*shape, output.shape[-1]))
        tensordict.set(self.out_keys[1], memory.reshape(*shape, self.state_size))
        return tensordict

    def _flatten(self, state: Any) -> Tensor:
        leaves = pytree.tree_leaves(state)
        parts = [leaf.flatten(1) for leaf, skip in zip(leaves, self._is_position, strict=True) if not skip]
        position = next(leaf for leaf, is_position in zip(leaves, self._is_position, strict=True) if is_position)
        return torch.cat([*parts, position.unsqueeze(-1).clamp(max=_LARGEST_POSITION).to(parts[0].dtype)], -1)

    def _unflatten(self, flat: Tensor | None, batch: int, starts: Tensor) -> Any:
        """Return the state of the layer; sequences for which `starts` is true have the initial state."""
        initial = self.layer.initial_state(batch)
        if flat is None:
            return initial
        leaves, begin = [], 0
        position = flat[:, -1].round().long()
        for fresh, shape, is_position in zip(pytree.tree_leaves(initial), self._shapes, self._is_position, strict=True):
            size = shape.numel()
            kept = position if is_position else flat[:, begin : begin + size].reshape(batch, *shape).to(fresh.dtype)
            begin += 0 if is_position else size
            leaves.append(torch.where(starts.reshape(batch, *(1 for _ in shape)), fresh, kept))
        return pytree.tree_unflatten(leaves, self._structure)
