"""Forecasting of dynamical systems, with a forecast horizon in Lyapunov times."""

import functools
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from adptnet.errors import InputError, SpecError
from adptnet.nn.model import evaluation_mode
from adptnet.spec import check_nonnegative, check_positive, check_seed, check_size, spec

from .base import Batch, Scores, Split, Task
from .dynamics import estimate_largest_exponent, make_system, simulate_trajectories

__all__ = ["Forecast", "Horizon"]


class Horizon(NamedTuple):
    """Forecast horizons: the time until the error, in standard deviations of the system, first exceeds a threshold."""

    lyapunov_times: Tensor  # (sequences,)
    full: float  # the forecast time, in Lyapunov times: an upper limit of every horizon

    @property
    def mean(self) -> float:
        return float(self.lyapunov_times.mean())

    @property
    def median(self) -> float:
        return float(self.lyapunov_times.median())


@spec
class Forecast(Task):
    """Prediction of the next sample of a dynamical system at every step.

    Samples are standardised to mean 0 and variance 1 over the training trajectories.

    Attributes:
        system: "lorenz63", "rossler", "mackey-glass", or equations: "x' = v; v' = -x - 0.1*v".
        length: Steps per sequence.
        dt: Time between two samples; the system's own by default.
        count: Trajectories for training; validation and test have as many each.
        samples: Samples per trajectory.
        noise: Standard deviation of noise on the training inputs; a little stabilises autoregressive forecasts.
        seed: Seed of the trajectories.
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
        make_system(self.system, self.dt)
        if self.length >= self.samples:
            raise SpecError(
                f"Forecast(length={self.length}, samples={self.samples}): a sequence and the sample after it need "
                f"samples={self.length + 1} or more."
            )

    @property
    def input_size(self) -> int:
        return make_system(self.system, self.dt).observed

    @property
    def output_size(self) -> int:
        return self.input_size

    @property
    def chance(self) -> float:
        """Error of predicting the mean."""
        return 1.0

    @property
    def lyapunov_time(self) -> float:
        """Time in which the distance of neighbouring trajectories grows by a factor of e."""
        exponent = _largest_exponent(self.system, self.dt)
        if exponent <= 0:
            raise InputError(
                f"the largest exponent of {self.system!r} is {exponent:.2g}: neighbouring trajectories do not "
                "diverge, so there is no Lyapunov time. Use the score nrmse."
            )
        return 1 / exponent

    def trajectories(self, split: Split) -> Tensor:
        """Return all trajectories of a split, (count, samples, observed) float64.

        Args:
            split: "train", "validation" or "test".
        """
        return _standardised_trajectories(self.system, self.dt, self.count, self.samples, self.seed, split)

    def batch(self, size: int, generator: torch.Generator, *, length: int | None = None) -> Batch:
        return self._windows("train", size, generator, length, self.noise)

    def _windows(
        self, split: Split, size: int, generator: torch.Generator, length: int | None, noise: float = 0.0
    ) -> Batch:
        length = self.length if length is None else length
        if size < 1 or not 1 <= length < self.samples:
            raise InputError(
                f"{size} sequences of {length} steps: there must be at least one, of 1 to {self.samples - 1} steps."
            )
        row = torch.randint(self.count, (size, 1), generator=generator)
        start = torch.randint(self.samples - length, (size, 1), generator=generator)
        windows = self.trajectories(split)[row, start + torch.arange(length + 1)].to(torch.get_default_dtype())
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
        """Return the mean squared error."""
        predictions = outputs if outputs.dtype == torch.float64 else outputs.float()
        return functional.mse_loss(predictions, targets.to(predictions))

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        error = (outputs.double() - targets.double()).square().mean()
        return {"nrmse": math.sqrt(float(error))}

    @torch.no_grad()
    def horizon(
        self, model: nn.Module, *, sequences: int = 32, threshold: float = 0.4, longest: float = 10.0, seed: int = 1
    ) -> Horizon:
        """Measure how long autoregressive forecasts of `model` stay accurate on the test trajectories.

        The model reads `length` samples; from then on each output is its next input.

        Args:
            model: A model with a `step` method, such as `SequenceModel`.
            sequences: Number of forecasts.
            threshold: Error at which a forecast has failed, in standard deviations.
            longest: Longest forecast, in Lyapunov times; less if the trajectories are shorter.
            seed: Seed of the choice of sequences.

        Raises:
            InputError: The system is not chaotic, or its trajectories are too short.
        """
        check_positive(self, threshold=threshold, longest=longest)
        unit = self.lyapunov_time / make_system(self.system, self.dt).dt  # samples per Lyapunov time
        steps = min(math.ceil(longest * unit), self.samples - self.length - 1)
        if steps < 1:
            raise InputError(
                f"samples={self.samples} leaves nothing to forecast after {self.length} steps. Pass more samples."
            )
        generator = torch.Generator().manual_seed(seed)
        batch = self._windows("test", sequences, generator, self.length + steps)
        like = next(model.parameters())
        truth = batch.targets.to(like)
        with evaluation_mode(model):
            outputs, state = model(batch.inputs[:, : self.length].to(like))
            forecast = outputs[:, -1]
            errors = []
            for t in range(self.length - 1, self.length - 1 + steps):
                errors.append((forecast - truth[:, t]).square().mean(-1).sqrt())
                forecast, state = model.step(forecast, state)  # type: ignore[operator]
        bad = torch.stack(errors, -1) > threshold
        accurate = torch.where(bad.any(-1), bad.long().argmax(-1), steps)
        return Horizon(accurate.double() / unit, steps / unit)


@functools.lru_cache(maxsize=8)
def _raw_trajectories(system: str, dt: float | None, count: int, samples: int, seed: int, split: Split) -> Tensor:
    number = ("train", "validation", "test").index(split)
    own_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return torch.from_numpy(simulate_trajectories(make_system(system, dt), count, samples, seed=own_seed))


@functools.lru_cache(maxsize=8)
def _standardised_trajectories(
    system: str, dt: float | None, count: int, samples: int, seed: int, split: Split
) -> Tensor:
    train = _raw_trajectories(system, dt, count, samples, seed, "train")
    mean, deviation = train.mean((0, 1)), train.std((0, 1))
    if not bool((deviation > 1e-9 * mean.abs()).all()):
        raise InputError(
            f"{system!r} comes to rest: after its transient a variable is constant, so nothing is left to forecast."
        )
    return (_raw_trajectories(system, dt, count, samples, seed, split) - mean) / deviation


@functools.lru_cache(maxsize=16)
def _largest_exponent(system: str, dt: float | None) -> float:
    simulated = make_system(system, dt)
    return estimate_largest_exponent(simulated) if simulated.exponent is None else simulated.exponent
