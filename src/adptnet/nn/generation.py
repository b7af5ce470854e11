"""Generation of tokens: sampling, and where sequences end."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["EARLIER_NAMES", "Generation", "Stop", "generate"]

Stop = Sequence[int] | Sequence[Sequence[int]] | Callable[[Tensor], Tensor]
EARLIER_NAMES = {"steps": "max_new_tokens", "max_length": "max_new_tokens", "stop_sequences": "stop"}


@dataclasses.dataclass(frozen=True)
class Generation:
    """The options of `SequenceModel.generate`, which documents them."""

    max_new_tokens: int = 20
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    eos_token_id: int | Sequence[int] | None = None
    stop: Stop | None = None
    pad_token_id: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        count, k, p = self.max_new_tokens, self.top_k, self.top_p
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InputError(f"generate(max_new_tokens={count!r}): must be a number of tokens, an integer >= 0.")
        if not self.temperature >= 0 or (k is not None and k < 1) or (p is not None and not 0 < p <= 1):
            raise InputError(
                f"temperature={self.temperature}, top_k={k}, top_p={p}: temperature must be >= 0, top_k >= 1, and "
                "top_p in (0, 1]."
            )

    @property
    def ends(self) -> list[int]:
        """The tokens that end a sequence."""
        eos = self.eos_token_id
        return [] if eos is None else [int(eos)] if isinstance(eos, int) else [int(token) for token in eos]

    @property
    def padding(self) -> int:
        """The token after the end of a sequence."""
        return self.pad_token_id if self.pad_token_id is not None else next(iter(self.ends), 0)


@torch.no_grad()
def generate(model: Any, prompt: Tensor, options: Generation) -> Tensor:
    """Return `prompt` and the tokens that continue it, (batch, time + n).

    Args:
        model: A model from tokens to logits with `step`, in evaluation mode.
        prompt: (batch, time) tokens.
        options: How to sample, and where to end.
    """
    if prompt.dim() != 2 or prompt.shape[1] < 1:
        raise InputError(f"prompt is (batch, time) with at least one token each; got shape {tuple(prompt.shape)}.")
    stream = model.streaming(len(prompt))
    logits, stream.state = model(prompt)
    last, length = logits[:, -1], prompt.shape[1]
    tokens = torch.cat((prompt, prompt.new_empty(len(prompt), options.max_new_tokens)), 1)
    has_ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    can_end = options.eos_token_id is not None or options.stop is not None
    for end in range(length + 1, tokens.shape[1] + 1):
        new = torch.where(has_ended, options.padding, _sample(last, options).squeeze(-1))
        tokens[:, end - 1] = new
        if can_end:
            has_ended = has_ended | _find_ends(tokens[:, :end], length, options)
            if bool(has_ended.all()):
                return tokens[:, :end]
        last = stream(new)
    return tokens


def _sample(logits: Tensor, options: Generation) -> Tensor:
    """Return one token for each sequence, (batch, 1)."""
    if options.temperature == 0 or not options.do_sample:
        return logits.argmax(-1, keepdim=True)
    above = logits - logits.amax(-1, keepdim=True)  # at most 0, so that no temperature overflows
    logits = above / options.temperature
    if options.top_k is not None:
        floor = logits.topk(min(options.top_k, logits.shape[-1]), -1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if options.top_p is not None:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        is_beyond = ordered.cumsum(-1) - ordered >= options.top_p  # the most likely token always stays
        logits = logits.masked_fill(is_beyond.gather(-1, order.argsort(-1)), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=options.generator)


def _find_ends(tokens: Tensor, start: int, options: Generation) -> Tensor:
    """Return which sequences end with their last token, (batch,). Tokens before `start` are those of the prompt."""
    ended = torch.isin(tokens[:, -1], torch.tensor(options.ends, dtype=tokens.dtype, device=tokens.device))
    if callable(options.stop):
        return ended | torch.as_tensor(options.stop(tokens), device=tokens.device).bool()
    stops: Any = () if options.stop is None else options.stop
    if len(stops) and not isinstance(stops[0], Sequence):
        stops = (stops,)
    for stop in stops:
        if len(stop) and tokens.shape[1] - start >= len(stop):
            ended = ended | (tokens[:, -len(stop) :] == torch.tensor(stop, device=tokens.device)).all(-1)
    return ended
