"""Hugging Face models around the encoder, the blocks and the norm of a `SequenceModel`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from ...errors import InputError
from ...nn.model import SequenceModel
from ...nn.states import LayerStates, split_states
from .cache import RecurrentCache
from .config import ADPTNetConfig

__all__ = ["ADPTNetForCausalLM", "ADPTNetForSequenceClassification", "ADPTNetModel"]


class _ADPTNetPreTrainedModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """Base class: what transformers needs to know to build, load and split the models."""

    config_class = ADPTNetConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("ResidualBlock", "SwiGLUBlock")
    _supports_assign_param_buffer = True
    _keys_to_ignore_on_load_unexpected = None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the tensors that a checkpoint lacks: those of the backbone as the package does."""
        if not isinstance(self, ADPTNetModel):
            super()._init_weights(module)
            return
        tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        missing = [name for name, tensor in tensors.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if missing:
            place = next(name for name, part in self.named_modules() if part is module)
            with torch.device("cpu"):
                fresh = self.config.to_spec().build().get_submodule(place)
            for name in missing:
                tensors[name].copy_(getattr(fresh, name))


class ADPTNetModel(_ADPTNetPreTrainedModel):
    """Encoder, blocks and final norm: tokens in, hidden states out.

    Args:
        config: The configuration.
    """

    def __init__(self, config: ADPTNetConfig):
        super().__init__(config)
        model = config.to_spec().build()
        if next(model.parameters()).is_meta and any(map(parametrize.is_parametrized, model.modules())):
            with torch.device("cpu"):  # `from_pretrained` builds on meta, where orthogonal matrices have no values
                model = config.to_spec().build()
        self.encoder, self.blocks, self.norm = model.encoder, model.blocks, model.norm
        if not torch.empty(0).is_meta:  # `from_pretrained` replaces tensors, and initializes those without this mark
            for tensor in (*self.parameters(), *self.buffers()):
                tensor._is_hf_initialized = True
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of the tokens."""
        return self.encoder

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of the tokens.

        Args:
            value: The new embedding.
        """
        self.encoder = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Run the model along a sequence.

        Args:
            input_ids: (batch, time) tokens.
            attention_mask: (batch, time): 1 for tokens, 0 for padding on the left or on the right, which has no effect
                on the other steps. With a cache that holds states, the mask is ignored: there is no padding within a
                sequence.
            inputs_embeds: (batch, time, hidden_size) in place of `input_ids`.
            past_key_values: The cache that an earlier call returned.
            use_cache: Whether to return the cache.
            output_hidden_states: Whether to return the embeddings and the output of every block.
            return_dict: Whether to return an object rather than a tuple.
            kwargs: Arguments of attention models, which are ignored: `position_ids`, ….

        Returns:
            The normed hidden states (batch, time, hidden_size), the cache, and the hidden states of all blocks.

        Raises:
            InputError: Not exactly one of `input_ids` and `inputs_embeds` is given, or the mask has gaps.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("pass exactly one of input_ids= and inputs_embeds=.")
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if past_key_values is not None and not isinstance(past_key_values, RecurrentCache):
            raise InputError(
                f"past_key_values is a {type(past_key_values).__name__}; this model takes a RecurrentCache. "
                "Pass the cache that the model returned, or None."
            )
        embeddings = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
        before = None if past_key_values is None else past_key_values.states
        mask = _check_mask(attention_mask, embeddings) if before is None else None
        hidden, states, seen = self._run_blocks(embeddings, mask, before)
        normed = hidden if self.norm is None else self.norm(hidden, mask)
        if use_cache:
            past_key_values = RecurrentCache() if past_key_values is None else past_key_values
            past_key_values.record(states, embeddings, mask, lambda x, m, s: self._run_blocks(x, m, s)[1])
        output = BaseModelOutputWithPast(
            last_hidden_state=normed,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*seen, normed) if show else None,
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _run_blocks(
        self, x: Tensor, mask: Tensor | None, state: LayerStates | None
    ) -> tuple[Tensor, LayerStates, tuple[Tensor, ...]]:
        """Return the output of the last block, the states of all blocks, and the input of every block."""
        lengths, restore = None, None
        if mask is not None:
            x, lengths, restore = _align_left(x, mask)
        seen, leaving = [], []
        for block, before in zip(self.blocks, split_states(self.blocks, state), strict=True):
            seen.append(x)
            if self.gradient_checkpointing and self.training:
                x, after = self._gradient_checkpointing_func(
                    lambda y, s, block=block: block(y, s, lengths=lengths), x, before
                )
            else:
                x, after = block(x, before, lengths=lengths)
            leaving.append(after)
        if restore is not None:
            x, seen = restore(x), [restore(y) for y in seen]
        return x, LayerStates(leaving), tuple(seen)


class ADPTNetForCausalLM(_ADPTNetPreTrainedModel, GenerationMixin):  # type: ignore[misc, unused-ignore]
    """A language model: logits of the next token at every step.

    Args:
        config: The configuration.
    """

    _tied_weights_keys = {"lm_head.weight": "model.encoder.weight"}  # noqa: RUF012  read by transformers, never changed

    def __init__(self, config: ADPTNetConfig):
        super().__init__(config)
        self.model = ADPTNetModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @classmethod
    def from_sequence_model(cls, model: SequenceModel) -> "ADPTNetForCausalLM":
        """Return a language model that shares the parameters of `model`.

        Args:
            model: A model from tokens to the same tokens, with head "token".

        Raises:
            InputError: The model has other outputs.
        """
        spec = model.spec
        if spec.vocabulary is None or spec.head != "token" or spec.output_size != spec.vocabulary:
            raise InputError(
                f"a causal language model needs logits of every token at every step; this model has "
                f"vocabulary={spec.vocabulary}, output_size={spec.output_size}, head={spec.head!r}."
            )
        tied = isinstance(model.encoder, nn.Embedding) and model.decoder.weight is model.encoder.weight
        made = cls(ADPTNetConfig(spec=spec, tie_word_embeddings=tied))
        _share(made.model, model)
        made.lm_head = model.decoder
        return made

    def to_sequence_model(self) -> SequenceModel:
        """Return a `SequenceModel` that shares the parameters of this model."""
        return _to_sequence_model(self.model, self.lm_head, self.config.to_spec())

    def get_output_embeddings(self) -> nn.Module:
        """Return the map to the logits."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the map to the logits.

        Args:
            new_embeddings: The new map.
        """
        self.lm_head = new_embeddings  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits, and the loss if labels are given.

        Args:
            input_ids: See `ADPTNetModel.forward`.
            attention_mask: See `ADPTNetModel.forward`.
            inputs_embeds: See `ADPTNetModel.forward`.
            past_key_values: See `ADPTNetModel.forward`.
            labels: (batch, time) tokens, usually `input_ids` themselves; they are shifted by one step inside. Steps
                with label -100 do not count.
            use_cache: See `ADPTNetModel.forward`.
            output_hidden_states: See `ADPTNetModel.forward`.
            return_dict: See `ADPTNetModel.forward`.
            logits_to_keep: Compute logits of the last steps only, or of the steps with these indices; 0 for all.
            kwargs: Arguments of the loss, such as `num_items_in_batch`.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> None:
        """Make the cache of this model in place of one for attention."""
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = RecurrentCache()
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest, **named)


class ADPTNetForSequenceClassification(_ADPTNetPreTrainedModel):
    """A classifier of sequences: one output per label from the last token, or from the mean if the spec's head is so.

    Args:
        config: The configuration; `num_labels` is the number of outputs.
    """

    def __init__(self, config: ADPTNetConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.pooling = "mean" if config.to_spec().head == "mean" else "last"
        self.model = ADPTNetModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @classmethod
    def from_sequence_model(cls, model: SequenceModel) -> "ADPTNetForSequenceClassification":
        """Return a classifier that shares the parameters of `model`.

        Args:
            model: A model of tokens with head "last" or "mean".

        Raises:
            InputError: The model has an output at every step.
        """
        if model.spec.head == "token":
            raise InputError('a classifier has one output per sequence. Build the model with head="last" or "mean".')
        made = cls(ADPTNetConfig(spec=model.spec, num_labels=model.spec.output_size))
        _share(made.model, model)
        made.score = model.decoder
        return made

    def to_sequence_model(self) -> SequenceModel:
        """Return a `SequenceModel` that shares the parameters of this model."""
        return _to_sequence_model(self.model, self.score, self.config.to_spec(output_size=self.num_labels))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Return logits (batch, num_labels), and the loss if labels are given.

        Args:
            input_ids: See `ADPTNetModel.forward`.
            attention_mask: See `ADPTNetModel.forward`. Without it, `config.pad_token_id` marks the padding.
            inputs_embeds: See `ADPTNetModel.forward`.
            past_key_values: See `ADPTNetModel.forward`.
            labels: (batch,) classes; numbers if `num_labels` is 1.
            use_cache: See `ADPTNetModel.forward`.
            output_hidden_states: See `ADPTNetModel.forward`.
            return_dict: See `ADPTNetModel.forward`.
            kwargs: Arguments of the loss.
        """
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = _mask_right_padding(input_ids, self.config.pad_token_id)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        pooled = _pool(outputs.last_hidden_state, attention_mask, self.pooling)
        logits = self.score(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        output = SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()


def _share(target: ADPTNetModel, model: SequenceModel) -> None:
    target.encoder, target.blocks, target.norm = model.encoder, model.blocks, model.norm


def _to_sequence_model(backbone: ADPTNetModel, head: nn.Linear, spec: Any) -> SequenceModel:
    model: SequenceModel = spec.build(device="meta")
    model.encoder, model.blocks, model.norm = backbone.encoder, backbone.blocks, backbone.norm
    model.decoder = head
    return model


def _check_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the mask as bool; None without padding."""
    if attention_mask is None:
        return None
    batch, steps = x.shape[:2]
    if tuple(attention_mask.shape) != (batch, steps):
        raise InputError(f"attention_mask has shape {tuple(attention_mask.shape)}; it must be ({batch}, {steps}).")
    mask = attention_mask.to(x.device).bool()
    return None if bool(mask.all()) else mask


def _align_left(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Move the tokens of each row to the left.

    Returns:
        The rows with padding on the right only, their lengths, and a function that moves outputs back.
    """
    steps = torch.arange(x.shape[1], device=x.device)
    start, lengths = mask.int().argmax(1, keepdim=True), mask.sum(1)
    if not bool((mask == ((steps >= start) & (steps < start + lengths.unsqueeze(1)))).all()):
        raise InputError("attention_mask has zeros between tokens; padding must be on the left or on the right.")
    if not bool(lengths.all()):
        raise InputError("attention_mask has a row without tokens. Remove this sequence from the batch.")
    if not bool(start.any()):
        return x, lengths, None
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    there, back = (steps + start) % x.shape[1], (steps - start) % x.shape[1]
    return x[rows, there], lengths, lambda y: torch.where(mask.unsqueeze(-1), y[rows, back], 0.0)


def _mask_right_padding(tokens: Tensor, pad: int) -> Tensor:
    """Return the mask of rows that end in pad tokens; at least the first token of each row counts."""
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    last = torch.where(tokens != pad, steps, 0).amax(1, keepdim=True)
    return (steps <= last).long()


def _pool(x: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    mask = None if attention_mask is None else attention_mask[:, -x.shape[1] :].to(x.device).bool()
    if pooling == "mean":
        return x.mean(1) if mask is None else (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    if mask is None:
        return x[:, -1]
    last = torch.where(mask, torch.arange(x.shape[1], device=x.device), 0).amax(1)
    return x[torch.arange(x.shape[0], device=x.device), last]
