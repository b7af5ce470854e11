"""The cache of generation: the hidden states of all layers, which can go back by some tokens."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ...errors import InputError
from ...nn.states import LayerStates

__all__ = ["RecurrentCache"]

HISTORY = 128  # tokens that can be removed again; assisted decoding removes at most its number of candidates

Run = Callable[[Tensor, Tensor | None, LayerStates | None], LayerStates]


class _Call(NamedTuple):
    """One call of the model, kept to run its first tokens again."""

    before: LayerStates | None
    embeddings: Tensor  # (batch, time, width)
    mask: Tensor | None  # (batch, time)


class RecurrentCache(Cache):  # type: ignore[misc, unused-ignore]
    """The hidden states after the tokens so far. Its size does not grow with the sequence.

    To remove tokens, as assisted decoding does, it goes back to the state before the call that processed them and runs
    the remaining tokens of that call again. The embeddings of at least the last `HISTORY` tokens are kept for this.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: LayerStates | None = None
        self._seen = 0
        self._calls: deque[_Call] = deque()
        self._run: Run | None = None

    def record(self, states: LayerStates, embeddings: Tensor, mask: Tensor | None, run: Run) -> None:
        """Store the states after a call.

        Args:
            states: The states after the call.
            embeddings: The inputs of the first block, (batch, time, width).
            mask: (batch, time) bool, False for padding; None without padding.
            run: Function of embeddings, mask and states that returns the states after these tokens.
        """
        self._calls.append(_Call(self.states, embeddings.detach(), mask))
        self.states, self._run = states.detach(), run
        self._seen += embeddings.shape[1]
        while sum(call.embeddings.shape[1] for call in self._calls) - self._calls[0].embeddings.shape[1] >= HISTORY:
            self._calls.popleft()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: Minus the number of tokens.

        Raises:
            InputError: These tokens are no longer stored.
        """
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove.")
        count = -tokens_to_remove
        kept = sum(call.embeddings.shape[1] for call in self._calls)
        if count > kept:
            raise InputError(f"crop({tokens_to_remove}): only the last {kept} tokens can be removed.")
        self._seen -= count
        while count:
            call = self._calls.pop()
            rest = call.embeddings.shape[1] - count
            self.states, count = call.before, max(0, -rest)
            if rest > 0:
                embeddings, mask = call.embeddings[:, :rest], None if call.mask is None else call.mask[:, :rest]
                assert self._run is not None
                with torch.no_grad():
                    self.states = self._run(embeddings, mask, call.before).detach()
                self._calls.append(_Call(call.before, embeddings, mask))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those of some rows, which may repeat: for beam search.

        Args:
            beam_idx: Row indices.
        """
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some sequences.

        Args:
            indices: Row indices.
        """
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence.

        Args:
            repeats: Number of copies.
        """
        if self._calls:
            rows = torch.arange(self._calls[-1].embeddings.shape[0]).repeat_interleave(repeats)
            self._select(rows)

    def reset(self) -> None:
        """Forget all tokens."""
        self.states, self._seen = None, 0
        self._calls.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, padding included.

        Args:
            layer_idx: Ignored: all layers have seen the same tokens.
        """
        return self._seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no longest sequence.

        Args:
            layer_idx: Ignored.
        """
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the cache holds states.

        Args:
            layer_idx: Ignored.
            state_idx: Ignored.
        """
        return self.states is not None

    def _select(self, rows: Tensor) -> None:
        def pick(value: Any) -> Any:
            if value is None:
                return None
            return value.select(rows) if isinstance(value, LayerStates) else value[rows.to(value.device)]

        self.states = pick(self.states)
        self._calls = deque(_Call(*map(pick, call)) for call in self._calls)
