"""Compression: a whole sequence through one vector."""

import torch

from adptnet.nn import AutoEncoderSpec, BlockSpec, SwiGLUBlockSpec
from adptnet.spec import ModuleSpec, spec

from ..base import Batch, Split
from .base import MadTask

__all__ = ["MadCompression"]


@spec
class MadCompression(MadTask):
    """Random tokens and a compression token; all of them are to be told from the vector at the last step.

    The model is an auto-encoder (`nn.AutoEncoderSpec`). The compression token is asked for too, so that a blind guess
    scores about two classes in `vocabulary`.

    Attributes:
        vocabulary: Tokens in all; the last is the compression token, noise tokens come before it.
        length: Steps, the compression token included.
        training_sequences, test_sequences, seed: Of the fixed sets.
        noise: Share of the tokens replaced by noise; as in the reference, noise is asked for as well.
        noise_vocabulary: How many of the tokens are noise.
    """

    vocabulary: int = 16
    length: int = 32
    training_sequences: int = 12_800
    test_sequences: int = 1_280
    seed: int = 12345
    noise: float = 0.0
    noise_vocabulary: int = 0

    def __post_init__(self) -> None:
        self.check_noise(self.noise, self.noise_vocabulary)
        self.need(2 + self.noise_vocabulary, "the compression token, something to compress and noise")
        MadTask.__post_init__(self)

    @property
    def shortest(self) -> int:
        return 2

    @property
    def chance(self) -> float:
        return 2 / self.vocabulary

    def model(self, block: BlockSpec | SwiGLUBlockSpec, depth: int = 1) -> ModuleSpec:
        return AutoEncoderSpec(block, depth, self.vocabulary)

    def draw(self, size: int, generator: torch.Generator, *, length: int, split: Split = "train") -> Batch:
        ordinary = self.vocabulary - 1 - self.noise_vocabulary
        inputs = torch.randint(ordinary, (size, length), generator=generator)
        if self.noise:
            noisy = torch.rand(size, length, generator=generator) < self.noise
            noise = torch.randint(ordinary, self.vocabulary - 1, (size, length), generator=generator)
            inputs = torch.where(noisy, noise, inputs)
        inputs[:, -1] = self.vocabulary - 1
        return Batch(inputs, inputs.clone())
