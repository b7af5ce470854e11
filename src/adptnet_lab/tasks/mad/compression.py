"""Compression: reconstruct a sequence from one vector."""

import torch

from adptnet.nn import AutoEncoderSpec, BlockSpec, SwiGLUBlockSpec
from adptnet.spec import ModuleSpec, spec

from ..base import Batch, Split
from .base import MadTask, StandardMadTask

__all__ = ["MadCompression"]


@spec
class MadCompression(StandardMadTask):
    """Random tokens and a compression token, all to be reconstructed from the vector at the last step.

    The model is an auto-encoder (`nn.AutoEncoderSpec`). The compression token is a target too, so that random guessing
    scores about 2 / `vocabulary`.

    Attributes:
        vocabulary: Number of tokens; the last is the compression token, noise tokens come before it.
        length: Steps, including the compression token.
        training_sequences: Size of the fixed training set.
        test_sequences: Size of the fixed validation set, and of the fixed test set.
        seed: Seed of the sets.
        noise: Fraction of the tokens replaced by noise; as in the reference, noise tokens are targets too.
        noise_vocabulary: Number of noise tokens.
    """

    length: int = 32
    noise: float = 0.0
    noise_vocabulary: int = 0

    def __post_init__(self) -> None:
        self.check_noise(self.noise, self.noise_vocabulary)
        self.check_vocabulary(2 + self.noise_vocabulary, "the compression token, something to compress and noise")
        MadTask.__post_init__(self)

    @property
    def minimum_length(self) -> int:
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
