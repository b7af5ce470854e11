"""A sequence model: encoder, residual blocks and head."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .._typing import Device, DType
from .._validate import check_lengths, make_validity_mask
from ..errors import InputError, SpecError
from ..ops._fx import Proxy, record_call
from ..spec import ModuleSpec, check_size, reject_unknown, reset_from_spec, spec, suggest_name
from .adpt_layer import LayerSpec
from .bidirectional import BidirectionalSpec
from .block import BlockSpec, Norm, NormName, ResidualBlock
from .generation import EARLIER_NAMES, Generation, Stop, generate
from .given import choose_depth, find_spec, make_layer, place
from .mixer import MixerSpec
from .packing import check_padded
from .states import LayerStates, make_initial_states, split_states
from .streaming import Streamable
from .swiglu import SwiGLUBlock, SwiGLUBlockSpec

__all__ = ["HeadName", "ModelSpec", "SequenceModel", "evaluation_mode"]

HeadName = Literal["token", "last", "mean"]


@spec
class ModelSpec(ModuleSpec):
    """A sequence model.

    Attributes:
        block: The residual block that is repeated.
        depth: Number of blocks.
        vocabulary: Number of different tokens, for token input; otherwise None.
        input_size: Number of features, for real-valued input; otherwise None.
        output_size: Outputs per step or per sequence; the vocabulary if not given.
        head: "token": an output at every step. "last": one at the last step. "mean": one from the mean over time.
    """

    block: BlockSpec | SwiGLUBlockSpec
    depth: int = 1
    vocabulary: int | None = None
    input_size: int | None = None
    output_size: int | None = None
    head: HeadName = "token"

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", find_spec(self.block))
        if not isinstance(self.block, (BlockSpec, SwiGLUBlockSpec)):
            raise SpecError(f"ModelSpec(block={type(self.block).__name__}): must be a BlockSpec(layer.spec).")
        check_size(self, depth=self.depth)
        if (self.vocabulary is None) == (self.input_size is None):
            raise SpecError(
                f"ModelSpec(vocabulary={self.vocabulary}, input_size={self.input_size}): pass one of them: "
                "vocabulary=120 for tokens, input_size=3 for real-valued input."
            )
        given = self.vocabulary if self.vocabulary is not None else self.input_size
        assert given is not None
        check_size(self, **{"vocabulary" if self.vocabulary is not None else "input_size": given})
        if self.output_size is None:
            if self.vocabulary is None:
                raise SpecError("ModelSpec(output_size=None): with real-valued input, pass output_size=.")
            object.__setattr__(self, "output_size", self.vocabulary)
        assert self.output_size is not None
        check_size(self, output_size=self.output_size)
        if self.head not in get_args(HeadName):
            raise SpecError(
                f"ModelSpec(head={self.head!r}) is unknown.{suggest_name(str(self.head), get_args(HeadName))}"
            )

    def build(self, *, device: Device = None, dtype: DType = None) -> "SequenceModel":
        model = SequenceModel.__new__(SequenceModel)
        model._setup(self, device, dtype)
        return model


class SequenceModel(Streamable):
    """A model from tokens or real-valued vectors to logits, with the state of every layer.

    Args:
        block: The spec of every block, such as `presets.text(64)` or `BlockSpec(layer.spec)`; or a layer or its spec,
            for a `SwiGLUBlockSpec` with RMS norm around it. The weights of a layer are copied into each block, as
            `nn.TransformerEncoder` does; pass `layer.spec` for weights of their own.
        depth: Number of blocks. The name `num_layers` is accepted too.
        vocabulary, input_size, output_size, head: See `ModelSpec`.
        norm, dropout: In place of those of the block; see `SwiGLUBlockSpec`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        block: BlockSpec | SwiGLUBlockSpec | LayerSpec | BidirectionalSpec | MixerSpec | nn.Module,
        *,
        depth: int = 1,
        vocabulary: int | None = None,
        input_size: int | None = None,
        output_size: int | None = None,
        head: HeadName = "token",
        norm: NormName | None = None,
        dropout: float | None = None,
        device: Device = None,
        dtype: DType = None,
        **others: Any,
    ):
        depth = choose_depth("SequenceModel", depth, others)
        known = ("depth", "vocabulary", "input_size", "output_size", "head", "norm", "dropout")
        reject_unknown("SequenceModel", others, known, layer="block", vocab_size="vocabulary")
        given = make_layer(block)
        described = find_spec(given)
        is_block = isinstance(described, (BlockSpec, SwiGLUBlockSpec))
        spec: Any = described if is_block else SwiGLUBlockSpec(described, expansion=2)
        changed = {name: value for name, value in (("norm", norm), ("dropout", dropout)) if value is not None}
        if changed and is_block and isinstance(given, nn.Module):
            raise SpecError(f"the block that you passed has its own {' and '.join(changed)}. Pass block.spec instead.")
        spec = dataclasses.replace(spec, **changed)
        self._setup(ModelSpec(spec, depth, vocabulary, input_size, output_size, head), device, dtype)
        if isinstance(given, nn.Module):
            for i, block in enumerate(self.blocks):
                own: Any = place(given, described, device, dtype)
                if is_block:
                    self.blocks[i] = own
                else:
                    block.layer = own

    def _setup(self, spec: ModelSpec, device: Device, dtype: DType) -> None:
        super().__init__()
        self.spec = spec
        width = spec.block.width
        self.encoder: nn.Module
        if spec.vocabulary is not None:
            self.encoder = nn.Embedding(spec.vocabulary, width, device=device, dtype=dtype)
            nn.init.normal_(self.encoder.weight, std=0.02)
        else:
            assert spec.input_size is not None
            self.encoder = nn.Linear(spec.input_size, width, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(spec.block.build(device=device, dtype=dtype) for _ in range(spec.depth))
        self.norm = Norm(spec.block.norm, width, device=device, dtype=dtype) if spec.block.prenorm else None
        assert spec.output_size is not None
        self.decoder = nn.Linear(width, spec.output_size, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, state: Any = None, *, lengths: Tensor | None = None, **run: Any
    ) -> tuple[Tensor, LayerStates]:
        """Return logits and the states of all layers.

        Args:
            x: (batch, time) tokens, or (batch, time, input_size).
            state: The states that an earlier call returned.
            lengths: (batch,) true lengths of right-padded sequences.
            run: Further keyword arguments of `RecurrentLayer.forward` for every layer: `reset`, `solver`, `adjoint`, ….

        Returns:
            Logits (batch, time, output_size) for the token head, (batch, output_size) for the others, and the states.
        """
        if isinstance(x, Proxy):
            return record_call(self, x, state, run, lengths=lengths)
        self._check(x)
        if run.get("cu_seqlens") is not None and self.spec.head != "token":
            raise InputError(
                f"head={self.spec.head!r} gives one output per sequence. Pass lengths= instead of cu_seqlens=."
            )
        lengths = check_lengths(lengths, x.shape[0], x.shape[1], x.device)
        if lengths is not None and x.is_floating_point():
            x = torch.where(make_validity_mask(lengths, x.shape[1]).unsqueeze(-1), x, 0.0)
        y = self.encoder(x)
        entering = split_states(self.blocks, state)
        leaving = []
        for block, before in zip(self.blocks, entering, strict=True):
            y, after = block(y, before, lengths=lengths, **run)
            leaving.append(after)
        return self._decode(y, lengths), LayerStates(leaving)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, LayerStates]:
        """Run one step.

        Args:
            x: (batch,) tokens or (batch, input_size).
            state: The states that an earlier call returned.

        Returns:
            Logits (batch, output_size) and the states.

        Raises:
            InputError: The head is "mean", which needs the whole sequence.
        """
        if self.spec.head == "mean":
            raise InputError('head="mean" needs the whole sequence and has no step. Call the model itself.')
        y = self.encoder(x)
        entering = split_states(self.blocks, state)
        leaving = []
        for block, before in zip(self.blocks, entering, strict=True):
            assert isinstance(block, (ResidualBlock, SwiGLUBlock))
            y, after = block.step(y, before)
            leaving.append(after)
        logits: Tensor = self.decoder(y if self.norm is None else self.norm(y))
        return logits, LayerStates(leaving)

    def initial_state(self, batch: int, *, device: Device = None, dtype: DType = None) -> LayerStates:
        """Return the state before the first step.

        Args:
            batch: Number of sequences.
            device: Device of the state; that of the parameters by default.
            dtype: Dtype of the state; that of the recurrence by default.
        """
        return make_initial_states(self.blocks, batch, device, dtype)

    def reset_parameters(self) -> None:
        """Reinitialize all parameters in place, as the constructor does."""
        reset_from_spec(self, self.spec)

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int = 20,
        *,
        do_sample: bool = True,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop: Stop | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Return `prompt` and tokens that continue it. The cost per token does not grow with the length.

        The arguments are those of transformers, but tokens are sampled by default.

        Args:
            prompt: (batch, time) tokens, at least one per sequence.
            max_new_tokens: Number of tokens to add, unless all sequences end before.
            do_sample: False takes the most likely token.
            temperature: Logits are divided by it before sampling; 0 takes the most likely token.
            top_k: Sample among the k most likely tokens only.
            top_p: Sample only among the most likely tokens whose probabilities first add up to p.
            eos_token_id: A token, or several, that ends a sequence.
            stop: A sequence of tokens, or several, that ends a sequence; or a function of the tokens so far, (batch,
                time), that returns which sequences end, (batch,) bool.
            pad_token_id: The token after the end of a sequence; the first of `eos_token_id` by default, 0 without any.
            generator: Random number generator.

        Returns:
            (batch, time + n) tokens, the prompt first; n is `max_new_tokens`, or less if all sequences ended.

        Raises:
            InputError: The model is not from tokens to the same tokens, or an argument is out of range.
            SpecError: An argument is unknown; the message suggests the right name.
        """
        known = ("do_sample", "temperature", "top_k", "top_p", "eos_token_id", "stop", "pad_token_id", "generator")
        reject_unknown("generate", unknown, ("max_new_tokens", *known), **EARLIER_NAMES)
        spec = self.spec
        if spec.vocabulary is None or spec.head != "token" or spec.output_size != spec.vocabulary:
            raise InputError(
                f"generate needs a model from tokens to the same tokens; this one has vocabulary={spec.vocabulary}, "
                f'output_size={spec.output_size}, head={spec.head!r}. Build it with vocabulary=..., head="token".'
            )
        with evaluation_mode(self):
            options = max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id, stop, pad_token_id, generator
            return generate(self, prompt, Generation(*options))

    def _decode(self, y: Tensor, lengths: Tensor | None) -> Tensor:
        keep = None if lengths is None else make_validity_mask(lengths, y.shape[1])
        y = y if self.norm is None else self.norm(y, keep)
        if self.spec.head == "last":
            last = torch.full((y.shape[0],), y.shape[1], device=y.device) if lengths is None else lengths
            y = y[torch.arange(y.shape[0], device=y.device), last - 1]
        elif self.spec.head == "mean":
            y = y.mean(1) if keep is None else (y * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)
        logits: Tensor = self.decoder(y)
        return logits

    def _check(self, x: Tensor) -> None:
        check_padded(x)
        if self.spec.vocabulary is not None:
            if x.dim() != 2 or x.dtype not in (torch.int64, torch.int32):
                raise InputError(
                    f"the model takes (batch, time) tokens, int64; got {x.dtype} of shape {tuple(x.shape)}."
                )
        elif x.dim() != 3 or x.shape[-1] != self.spec.input_size:
            raise InputError(f"the model takes (batch, time, {self.spec.input_size}); got shape {tuple(x.shape)}.")
        if x.shape[1] == 0 and self.spec.head != "token":
            raise InputError(f"head={self.spec.head!r} needs at least one step; got shape {tuple(x.shape)}.")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode within a `with` block, and restore the mode of every module afterwards.

    Args:
        model: Any module.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
