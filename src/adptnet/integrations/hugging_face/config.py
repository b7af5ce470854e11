"""The configuration of a Hugging Face model: a `ModelSpec` as JSON, with the names that transformers expects."""

import dataclasses
import json
from typing import Any

from transformers import PreTrainedConfig

from ...errors import SpecError
from ...nn import ADPTNet, SequenceModel
from ...nn.model import ModelSpec
from ...spec import Spec

__all__ = ["ADPTNetConfig"]


class ADPTNetConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]
    """Configuration of the Hugging Face classes.

    Pass `spec`, or sizes for a model of `ADPTNet` layers with default settings.

    Args:
        vocab_size: Number of tokens. It replaces that of the spec, as after `resize_token_embeddings`.
        hidden_size: Width of the layers; with `spec` it must be that of the spec.
        num_hidden_layers: Number of blocks; with `spec` it must be that of the spec.
        spec: A `ModelSpec` for tokens, or its JSON as a dict.
        kwargs: Fields of `PreTrainedConfig`, such as `num_labels`, `pad_token_id` or `tie_word_embeddings`.

    Raises:
        SpecError: The spec is not a `ModelSpec` for tokens, or contradicts a size.
    """

    model_type = "adptnet"

    spec: dict[str, Any] | None = None
    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 2
    use_cache: bool = True
    tie_word_embeddings: bool = False

    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        num_hidden_layers: int | None = None,
        spec: ModelSpec | dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if spec is None:
            layer = ADPTNet(type(self).hidden_size if hidden_size is None else hidden_size, device="meta").spec
            assert layer is not None
            depth = type(self).num_hidden_layers if num_hidden_layers is None else num_hidden_layers
            model = SequenceModel(layer, depth=depth, vocabulary=type(self).vocab_size, device="meta").spec
        else:
            model = spec if isinstance(spec, ModelSpec) else _read(spec)
        if model.vocabulary is None:
            raise SpecError("ADPTNetConfig(spec=...): the model must take tokens. Build it with vocabulary=.")
        sizes = {"hidden_size": model.block.width, "num_hidden_layers": model.depth}
        for name, size in (("hidden_size", hidden_size), ("num_hidden_layers", num_hidden_layers)):
            if size is not None and size != sizes[name]:
                raise SpecError(f"ADPTNetConfig({name}={size}): the spec has {sizes[name]}. Drop {name}=.")
        kwargs.setdefault("use_cache", True)
        kwargs.setdefault("tie_word_embeddings", False)
        vocab_size = model.vocabulary if vocab_size is None else vocab_size
        super().__init__(spec=json.loads(model.to_json()), vocab_size=vocab_size, **sizes, **kwargs)

    def to_spec(self, output_size: int | None = None) -> ModelSpec:
        """Return the spec of the `SequenceModel`.

        Args:
            output_size: Number of outputs; the vocabulary if None.
        """
        assert self.spec is not None
        size = self.vocab_size if output_size is None else output_size
        return dataclasses.replace(_read(self.spec), vocabulary=self.vocab_size, output_size=size)


def _read(document: dict[str, Any]) -> ModelSpec:
    model = Spec.from_json(json.dumps(document))
    if not isinstance(model, ModelSpec):
        raise SpecError(f"ADPTNetConfig(spec={type(model).__name__}): must be a ModelSpec, model.spec.")
    return model
