"""Sequential image classification: one pixel per step (sec:scifar)."""

import functools
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from adptnet.errors import InputError, SpecError
from adptnet.spec import check_fraction, check_seed, check_size, spec

from . import download
from .base import Batch, FiniteTask, Scores, Split
from .images import Images, read_images

__all__ = ["SequentialImage"]

# Mean and deviation of CIFAR-10's training set, as used for state-space models: red, green, blue; and grey.
_CIFAR10 = {3: ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)), 1: ((122.6 / 255,), (61.0 / 255,))}
_GREY = (0.299, 0.587, 0.114)  # luminance of red, green, blue (ITU-R 601)


@spec
class SequentialImage(FiniteTask):
    """Classification of images read row by row, one pixel per step; the head averages over time.

    Attributes:
        data: "cifar10", which must be downloaded first (`adptnet data fetch cifar10`), or the path of an npz with
            x_train, y_train, x_test, y_test. CIFAR-10 is normalised by its usual constants, other images by their own.
        grey: One channel per pixel instead of three.
        permutation: Seed of a fixed permutation of the pixels; None reads them row by row.
        side: Average the images down to side × side.
        training_images, test_images: Number of images to use; all by default.
        validation: Fraction of the training images that is held out for validation.
        split_seed: Seed of that choice.
    """

    data: str = "cifar10"
    grey: bool = False
    permutation: int | None = None
    side: int | None = None
    training_images: int | None = None
    test_images: int | None = None
    validation: float = 0.1
    split_seed: int = 42

    head: ClassVar[Literal["token", "last", "mean"]] = "mean"

    def __post_init__(self) -> None:
        if not isinstance(self.data, str) or not self.data:
            raise SpecError(f"SequentialImage(data={self.data!r}): pass data='cifar10' or the path of an npz, as text.")
        for name in ("side", "training_images", "test_images"):
            if getattr(self, name) is not None:
                check_size(self, **{name: getattr(self, name)})
        if self.permutation is not None:
            check_seed(self, permutation=self.permutation)
        check_seed(self, split_seed=self.split_seed)
        check_fraction(self, below="at 1 nothing would be left to train on", validation=self.validation)

    @property
    def input_size(self) -> int:
        return 1 if self.grey else self._images.x_train.shape[-1]

    @property
    def output_size(self) -> int:
        """Number of classes."""
        return int(max(self._images.y_train.max(), self._images.y_test.max())) + 1

    @property
    def chance(self) -> float:
        return 1 / self.output_size

    @property
    def length(self) -> int:
        """Number of pixels."""
        _, height, width, _ = self._images.x_train.shape
        return height * width if self.side is None else self.side**2

    def size(self, split: Split) -> int:
        return len(_split_indices(self, split))

    def examples(self, split: Split, indices: Tensor, *, length: int | None = None) -> Batch:
        if length is not None and length != self.length:
            raise InputError(f"length={length}: these images have {self.length} pixels. Choose side= instead.")
        images = self._images
        chosen = _split_indices(self, split)[indices]
        x, y = (images.x_test, images.y_test) if split == "test" else (images.x_train, images.y_train)
        mean, deviation = _channel_statistics(self)
        pixels = (self._to_float(x[chosen]) - mean) / deviation
        sequence = pixels.flatten(1, 2)
        if self.permutation is not None:
            order = torch.randperm(sequence.shape[1], generator=torch.Generator().manual_seed(self.permutation))
            sequence = sequence[:, order]
        return Batch(sequence.to(torch.get_default_dtype()), y[chosen])

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return {"accuracy": float((outputs.argmax(-1) == targets).double().mean())}

    @property
    def _images(self) -> Images:
        return read_images(download.find_data("cifar10") if self.data == "cifar10" else Path(self.data))

    def _to_float(self, images: Tensor) -> Tensor:
        """Convert uint8 images to floats from 0 to 1, in grey and averaged down as the fields request.

        Images are (images, height, width, channels).
        """
        x = images.float() / 255
        if self.grey and x.shape[-1] == 3:
            x = (x * torch.tensor(_GREY, dtype=x.dtype)).sum(-1, keepdim=True)
        elif self.grey and x.shape[-1] != 1:
            raise InputError(f"grey=True needs red, green and blue; these images have {x.shape[-1]} channels.")
        if self.side is None:
            return x
        _, height, width, channels = x.shape
        if height % self.side or width % self.side:
            raise InputError(
                f"side={self.side} does not divide images of {height} × {width}; averaging needs whole tiles. "
                f"Pass side={next(n for n in range(self.side, 0, -1) if height % n == width % n == 0)}."
            )
        return x.reshape(-1, self.side, height // self.side, self.side, width // self.side, channels).mean((2, 4))


@functools.lru_cache(maxsize=16)
def _split_indices(task: SequentialImage, split: Split) -> Tensor:
    """Return the indices of the images of a split in the file."""
    images = task._images
    if split == "test":
        order, limit = torch.arange(len(images.x_test)), task.test_images
    else:
        total = len(images.x_train)
        held_out = int(task.validation * total)
        shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(task.split_seed))
        order = shuffled[: total - held_out] if split == "train" else shuffled[total - held_out :]
        limit = task.training_images if split == "train" else task.test_images
    if split != "validation" and limit is not None and limit > len(order):
        raise InputError(f"{limit} {split} images were requested, but there are {len(order)}.")
    return order if limit is None else order[:limit]


@functools.lru_cache(maxsize=16)
def _channel_statistics(task: SequentialImage) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel."""
    if task.data == "cifar10":
        mean, deviation = _CIFAR10[task.input_size]
        return torch.tensor(mean), torch.tensor(deviation)
    x = task._to_float(task._images.x_train[_split_indices(task, "train")])
    return x.mean((0, 1, 2)), x.std((0, 1, 2)).clamp(min=1e-6)
