"""Language modelling on a text file, byte by byte or character by character."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from adptnet.errors import DataError, InputError, SpecError
from adptnet.spec import check_fraction, check_size, spec

from . import download
from .base import Batch, Scores, Split, Task, make_generator

__all__ = ["Text"]


@spec
class Text(Task):
    """Prediction of the next symbol of a text at every step. The text is split in order: training, validation, test.

    Attributes:
        path: A text file; by default tiny Shakespeare, which must be downloaded first (`adptnet data fetch
            tiny-shakespeare`).
        length: Steps per sequence.
        symbols: "bytes" (256 of them), or "characters" (those in the file, which must then be UTF-8).
        validation, test: Fractions of the text.
        carry: Let each row of a batch continue where it ended in the previous batch (`Batch.continues`), for training
            that carries the hidden state. Otherwise training sequences begin at random positions.
    """

    path: str | None = None
    length: int = 256
    symbols: Literal["characters", "bytes"] = "characters"
    validation: float = 0.05
    test: float = 0.05
    carry: bool = False

    metric: ClassVar[str] = "bits_per_character"
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss", "bits_per_character"})

    def __post_init__(self) -> None:
        check_size(self, length=self.length)
        if self.symbols not in ("characters", "bytes"):
            raise SpecError(f'Text(symbols={self.symbols!r}): pass symbols="characters" or symbols="bytes".')
        check_fraction(self, below="something must be left to train on", validation=self.validation, test=self.test)
        check_fraction(self, below="something must be left to train on", shares=self.validation + self.test)

    @property
    def vocabulary(self) -> int:
        return 256 if self.symbols == "bytes" else len(self._alphabet)

    @property
    def chance(self) -> float:
        return math.log2(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text, e.g. of a prompt.

        Args:
            text: The text.

        Returns:
            (time,) int64.

        Raises:
            InputError: The text has a character that the file does not have.
        """
        if self.symbols == "bytes":
            return torch.tensor(list(text.encode()), dtype=torch.int64)
        number = {character: i for i, character in enumerate(self._alphabet)}
        unknown = sorted(set(text) - set(number))
        if unknown:
            raise InputError(f"the file has no character {unknown[0]!r}. Leave it out, or use symbols='bytes'.")
        return torch.tensor([number[character] for character in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Return the text of (time,) tokens.

        Args:
            tokens: (time,) integers.
        """
        if self.symbols == "bytes":
            return bytes(tokens.tolist()).decode(errors="replace")
        return "".join(self._alphabet[token] for token in tokens.tolist())

    def part(self, split: Split) -> Tensor:
        """Return the tokens of a split, in order.

        Args:
            split: "train", "validation" or "test".

        Returns:
            (time,) tokens.
        """
        whole = _read_tokens(self._path, self.symbols)[0]
        ends = [0, *(int(len(whole) * share) for share in (1 - self.validation - self.test, 1 - self.test)), len(whole)]
        i = ("train", "validation", "test").index(split)
        return whole[ends[i] : ends[i + 1]]

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        length = self.length if length is None else length
        if size < 1 or length < 1:
            raise InputError(f"Text.batch(size={size}, length={length}): both must be at least 1.")
        tokens = self._require("train", length + 1)
        return _windows(tokens, torch.randint(len(tokens) - length, (size,), generator=generator), length)

    def training_batch(self, step: int, size: int, seed: int) -> Batch:
        if not self.carry:
            return Task.training_batch(self, step, size, seed)
        span = len(self._require("train", size * (2 * self.length + 1))) // size  # symbols per row
        steps = span // self.length - 1
        epoch, within = divmod(step, steps)
        shift = int(torch.randint(self.length, (), generator=make_generator(seed, epoch)))
        starts = torch.arange(size) * span + shift + within * self.length
        return _windows(self.part("train"), starts, self.length)._replace(continues=within > 0)

    def evaluation(
        self, split: Split, size: int, batch_size: int, *, seed: int = 1, length: int | None = None
    ) -> Iterator[Batch]:
        """Yield the first `size` consecutive sequences of the split, or all of them if there are fewer.

        With `carry`, rows continue from batch to batch: each row is a contiguous part of the text.
        """
        length = self.length if length is None else length
        if size < 1 or batch_size < 1 or length < 1:
            raise InputError(f"{size} sequences of {length} steps in batches of {batch_size}: all must be at least 1.")
        tokens = self._require(split, length + 1)
        count = min(size, (len(tokens) - 1) // length)
        if not self.carry:
            for indices in torch.arange(count).split(batch_size):
                yield _windows(tokens, indices * length, length)
            return
        rows = min(batch_size, count)
        for number in range(count // rows):
            starts = (torch.arange(rows) * (count // rows) + number) * length
            yield _windows(tokens, starts, length)._replace(continues=number > 0)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        loss = functional.cross_entropy(outputs.flatten(0, -2).double(), targets.flatten())
        right = (outputs.argmax(-1) == targets).double()
        return {"bits_per_character": float(loss) / math.log(2), "accuracy": float(right.mean())}

    @property
    def _path(self) -> Path:
        return download.find_data("tiny-shakespeare") if self.path is None else Path(self.path)

    @property
    def _alphabet(self) -> str:
        return _read_tokens(self._path, self.symbols)[1]

    def _require(self, split: Split, needed: int) -> Tensor:
        """Return the tokens of a split; raise `InputError` if there are fewer than `needed`."""
        tokens = self.part(split)
        if len(tokens) < needed:
            raise InputError(
                f"the {split} split of {self._path} has {len(tokens):,} symbols, but {needed:,} are needed. Use a "
                f"longer text, a smaller length or batch, or a larger fraction for this split."
            )
        return tokens


def _windows(tokens: Tensor, starts: Tensor, length: int) -> Batch:
    rows = tokens[starts.unsqueeze(-1) + torch.arange(length + 1)].long()
    return Batch(rows[:, :-1], rows[:, 1:])


@functools.lru_cache(maxsize=4)
def _read_tokens(path: Path, symbols: str) -> tuple[Tensor, str]:
    """Return the tokens of a file and the characters that they denote."""
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a regular file. Pass the path of a text file.")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Pass the path of a text file.") from None
    if not content:
        raise DataError(f"{path} is empty.")
    if symbols == "bytes":
        return torch.frombuffer(bytearray(content), dtype=torch.uint8), ""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}. Read it with symbols='bytes'.") from None
    points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    distinct, tokens = points.unique(return_inverse=True)
    return tokens.int(), "".join(chr(point) for point in distinct.tolist())
