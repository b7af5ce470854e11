"""Forecasting of dynamical systems, with a horizon in Lyapunov times."""

import functools
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from adptnet.errors import InputError, SpecError
from adptnet.nn.model import evaluating
from adptnet.spec import check_nonnegative, check_positive, check_seed, check_size, spec

from .base import Batch, Scores, Split, Task
from .dynamics import largest_exponent, system_of, trajectories

__all__ = ["Forecast", "Horizon"]


class Horizon(NamedTuple):
    """How long forecasts hold: until the error, in standard deviations of the system, first exceeds the threshold."""

    lyapunov_times: Tensor  # (sequences,)
    full: float  # the time that was forecast, in Lyapunov times: none can hold for longer

    @property
    def mean(self) -> float:
        return float(self.lyapunov_times.mean())

    @property
    def median(self) -> float:
        return float(self.lyapunov_times.median())


@spec
class Forecast(Task):
    """The next sample of a system, at every step. Samples have mean 0 and variance 1 over the training trajectories.

    Attributes:
        system: "lorenz63", "rossler", "mackey-glass", or equations: "x' = v; v' = -x - 0.1*v".
        length: Steps of a sequence.
        dt: Time between two samples; the system's own if not given.
        count: Trajectories for training, and as many for validation and test each.
        samples: Of each trajectory.
        noise: Standard deviation of the noise on training inputs; a little makes a model's own forecasts steadier.
        seed: Of the trajectories.
    """

    system: str = "lorenz63"
    length: int = 200
    dt: float | None = None
    count: int = 32
    samples: int = 2_000
    noise: float = 0.0
    seed: int = 0

    metric: ClassVar[str] = "nrmse"
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss", "nrmse"})

    def __post_init__(self) -> None:
        check_size(self, length=self.length, count=self.count, samples=self.samples)
        check_nonnegative(self, noise=self.noise)
        check_seed(self, seed=self.seed)
        if self.dt is not None:
            check_positive(self, dt=self.dt)
        system_of(self.system, self.dt)
        if self.length >= self.samples:
            raise SpecError(
                f"Forecast(length={self.length}, samples={self.samples}): a sequence and the sample after it need "
                f"samples={self.length + 1} or more."
            )

    @property
    def input_size(self) -> int:
        return system_of(self.system, self.dt).observed

    @property
    def output_size(self) -> int:
        return self.input_size

    @property
    def chance(self) -> float:
        """The error of forecasting the mean."""
        return 1.0

    @property
    def lyapunov_time(self) -> float:
        """In which neighbouring trajectories part by a factor of e."""
        exponent = _exponent(self.system, self.dt)
        if exponent <= 0:
            raise InputError(
                f"the largest exponent of {self.system!r} is {exponent:.2g}: neighbours do not part, and there is no "
                "Lyapunov time to count in. Use the score nrmse."
            )
        return 1 / exponent

    def bank(self, split: Split) -> Tensor:
        """Every trajectory of a split, (count, samples, observed) float64."""
        return _bank(self.system, self.dt, self.count, self.samples, self.seed, split)

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        return self._windows("train", size, generator, length, self.noise)

    def _windows(
        self, split: Split, size: int, generator: torch.Generator, length: int | None, noise: float = 0.0
    ) -> Batch:
        length = self.length if length is None else length
        if size < 1 or not 1 <= length < self.samples:
            raise InputError(
                f"{size} sequences of {length} steps: there must be one at least, of 1 to {self.samples - 1} steps."
            )
        row = torch.randint(self.count, (size, 1), generator=generator)
        start = torch.randint(self.samples - length, (size, 1), generator=generator)
        windows = self.bank(split)[row, start + torch.arange(length + 1)].to(torch.get_default_dtype())
        inputs = windows[:, :-1]
        if noise:
            inputs = inputs + noise * torch.randn(inputs.shape, generator=generator)
        return Batch(inputs, windows[:, 1:])

    def evaluation(
        self, split: Split, size: int, batch_size: int, *, seed: int = 1, length: int | None = None
    ) -> Iterator[Batch]:
        if size < 1 or batch_size < 1:
            raise InputError(f"an evaluation on {size} sequences in batches of {batch_size}: both must be at least 1.")
        generator = torch.Generator().manual_seed(seed)
        for start in range(0, size, batch_size):
            yield self._windows(split, min(batch_size, size - start), generator, length)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error."""
        found = outputs if outputs.dtype == torch.float64 else outputs.float()
        return functional.mse_loss(found, targets.to(found))

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        error = (outputs.double() - targets.double()).square().mean()
        return {"nrmse": math.sqrt(float(error))}

    @torch.no_grad()
    def horizon(
        self, model: nn.Module, *, sequences: int = 32, threshold: float = 0.4, longest: float = 10.0, seed: int = 1
    ) -> Horizon:
        """How long `model` forecasts the test trajectories from its own outputs.

        It reads `length` samples, then each of its outputs is its next input.

        Args:
            model: With `step`, as `SequenceModel` has it.
            sequences: How many forecasts.
            threshold: The error at which a forecast has failed, in standard deviations.
            longest: Lyapunov times to go for at most; fewer if trajectories are shorter.
            seed: Which sequences.
        """
        check_positive(self, threshold=threshold, longest=longest)
        unit = self.lyapunov_time / system_of(self.system, self.dt).dt  # samples in a Lyapunov time
        steps = min(math.ceil(longest * unit), self.samples - self.length - 1)
        if steps < 1:
            raise InputError(
                f"samples={self.samples} leave nothing to forecast after {self.length}. Pass more samples."
            )
        generator = torch.Generator().manual_seed(seed)
        batch = self._windows("test", sequences, generator, self.length + steps)
        like = next(model.parameters())
        truth = batch.targets.to(like)
        with evaluating(model):
            outputs, state = model(batch.inputs[:, : self.length].to(like))
            forecast = outputs[:, -1]
            errors = []
            for t in range(self.length - 1, self.length - 1 + steps):
                errors.append((forecast - truth[:, t]).square().mean(-1).sqrt())
                forecast, state = model.step(forecast, state)  # type: ignore[operator]
        bad = torch.stack(errors, -1) > threshold
        held = torch.where(bad.any(-1), bad.long().argmax(-1), steps)
        return Horizon(held.double() / unit, steps / unit)


@functools.lru_cache(maxsize=8)
def _raw(system: str, dt: float | None, count: int, samples: int, seed: int, split: Split) -> Tensor:
    number = ("train", "validation", "test").index(split)
    own_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return torch.from_numpy(trajectories(system_of(system, dt), count, samples, seed=own_seed))


@functools.lru_cache(maxsize=8)
def _bank(system: str, dt: float | None, count: int, samples: int, seed: int, split: Split) -> Tensor:
    train = _raw(system, dt, count, samples, seed, "train")
    mean, deviation = train.mean((0, 1)), train.std((0, 1))
    if not bool((deviation > 1e-9 * mean.abs()).all()):
        raise InputError(
            f"{system!r} comes to rest: after its transient a variable does not move, so nothing is left to forecast."
        )
    return (_raw(system, dt, count, samples, seed, split) - mean) / deviation


@functools.lru_cache(maxsize=16)
def _exponent(system: str, dt: float | None) -> float:
    found = system_of(system, dt)
    return largest_exponent(found) if found.exponent is None else found.exponent
