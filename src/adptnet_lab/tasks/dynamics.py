"""Dynamical systems: integrated by Runge and Kutta's fourth-order method, in float64."""

import abc
import functools

import numpy as np

from adptnet.errors import InputError
from adptnet.spec import nearest

from .equations import Field, Numbers, parsed

__all__ = ["SYSTEMS", "Delay", "Equations", "System", "largest_exponent", "runge_kutta", "system_of", "trajectories"]


def runge_kutta(field: Field, state: Numbers, dt: float) -> Numbers:
    """One step of dx/dt = field(x)."""
    first = field(state)
    second = field(state + dt / 2 * first)
    third = field(state + dt / 2 * second)
    fourth = field(state + dt * third)
    return state + dt / 6 * (first + 2 * second + 2 * third + fourth)


class System(abc.ABC):
    """Something that moves: many states at once, (trajectories, n)."""

    dt: float  # time between two samples
    observed: int  # numbers of a sample
    exponent: float | None = None  # largest Lyapunov exponent, in 1 / time, where it is known

    @abc.abstractmethod
    def start(self, count: int, generator: np.random.Generator) -> Numbers:
        """States to start from, different ones."""

    @abc.abstractmethod
    def step(self, state: Numbers) -> Numbers:
        """The states one sample later."""

    @abc.abstractmethod
    def sample(self, state: Numbers) -> Numbers:
        """What is seen of the states, (trajectories, observed)."""


class Equations(System):
    """Ordinary differential equations, all of whose variables are seen.

    Args:
        text: Such as "x' = v; v' = -x".
        dt: Time between two samples.
        substeps: Steps of the integrator between two samples.
        centre: Around which trajectories start; the origin if not given.
        exponent: The largest Lyapunov exponent, if it is known.
    """

    def __init__(
        self,
        text: str,
        *,
        dt: float,
        substeps: int = 5,
        centre: tuple[float, ...] | None = None,
        exponent: float | None = None,
    ):
        self.names, self.field = parsed(text)
        self.dt, self.substeps, self.exponent = dt, substeps, exponent
        self.observed = len(self.names)
        self.centre = centre or (0.0,) * self.observed

    def start(self, count: int, generator: np.random.Generator) -> Numbers:
        return np.asarray(self.centre) + generator.uniform(-1, 1, (count, self.observed))

    def step(self, state: Numbers) -> Numbers:
        for _ in range(self.substeps):
            state = runge_kutta(self.field, state, self.dt / self.substeps)
        return state

    def sample(self, state: Numbers) -> Numbers:
        return state


class Delay(System):
    """The Mackey-Glass equation, x' = 0.2 x(t-τ) / (1 + x(t-τ)¹⁰) - 0.1 x, with τ = 17; one number is seen.

    The state is x on a grid over the last τ (and a little more); between grid points a cubic goes through four.
    """

    exponent = 0.0052  # by `largest_exponent`, also with steps half and twice as long; published: 0.005 to 0.007
    observed = 1

    def __init__(self, *, dt: float = 1.0, delay: float = 17.0, substeps: int = 10):
        self.dt, self.substeps = dt, substeps
        self.lag = round(delay * substeps / dt)
        if abs(self.lag * dt / substeps - delay) > 1e-9 * delay:
            raise InputError(f"the delay {delay} must be a multiple of dt / {substeps}; dt={dt}. Pass dt=1.0.")

    def start(self, count: int, generator: np.random.Generator) -> Numbers:
        return np.repeat(generator.uniform(0.5, 1.5, (count, 1)), self.lag + 2, axis=1)

    def step(self, state: Numbers) -> Numbers:
        dt = self.dt / self.substeps
        state = np.concatenate((state, np.empty((len(state), self.substeps))), 1)
        for i in range(self.substeps):
            now = self.lag + 1 + i  # the grid point of the present; τ ago is `lag` points before
            before, here, after, beyond = (state[:, i + k] for k in range(4))
            midway = (9 * (here + after) - before - beyond) / 16
            inflow = [0.2 * x / (1 + x**10) for x in (here, midway, after)]
            x = state[:, now]
            first = inflow[0] - 0.1 * x
            second = inflow[1] - 0.1 * (x + dt / 2 * first)
            third = inflow[1] - 0.1 * (x + dt / 2 * second)
            fourth = inflow[2] - 0.1 * (x + dt * third)
            state[:, now + 1] = x + dt / 6 * (first + 2 * second + 2 * third + fourth)
        return state[:, self.substeps :]

    def sample(self, state: Numbers) -> Numbers:
        return state[:, -1:]


SYSTEMS = ("lorenz63", "rossler", "mackey-glass")


@functools.lru_cache(maxsize=16)
def system_of(name: str, dt: float | None = None) -> System:
    """A system by its name, one of `SYSTEMS`, or by its equations; `dt` is the time between two samples."""
    if name == "lorenz63":
        text = "x' = 10*(y - x); y' = x*(28 - z) - y; z' = x*y - 8/3*z"
        return Equations(text, dt=dt or 0.02, substeps=2, centre=(0.0, 0.0, 25.0), exponent=0.9056)
    if name == "rossler":
        text = "x' = -y - z; y' = x + 0.2*y; z' = 0.2 + z*(x - 5.7)"
        return Equations(text, dt=dt or 0.1, substeps=5, exponent=0.0714)
    if name == "mackey-glass":
        return Delay(dt=dt or 1.0)
    if "=" in name:
        return Equations(name, dt=dt or 0.02)
    raise InputError(
        f"there is no system {name!r}.{nearest(name, SYSTEMS)} Or write its equations: \"x' = v; v' = -x\"."
    )


def trajectories(system: System, count: int, steps: int, *, seed: int, transient: int = 1000) -> Numbers:
    """Samples of `count` trajectories after the transient, (count, steps, observed)."""
    state = system.start(count, np.random.default_rng(seed))
    samples = np.empty((count, steps, system.observed))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for t in range(-transient, steps):
            state = system.step(state)
            if t % 100 == 0 or t == steps - 1:
                _check_finite(state, (t + transient + 1) * system.dt)
            if t >= 0:
                samples[:, t] = system.sample(state)
    return samples


def _check_finite(state: Numbers, time: float) -> None:
    if not np.isfinite(state).all():
        raise InputError(
            f"the trajectories are not finite after a time of {time:.3g}: the equations run away, or dt is too long "
            "for them. Pass a smaller dt."
        )


def largest_exponent(system: System, *, count: int = 16, steps: int = 2000, seed: int = 0) -> float:
    """The largest Lyapunov exponent, in 1 / time: how fast neighbours part, their distance renewed at every sample."""
    generator = np.random.default_rng(seed)
    state = system.start(count, generator)
    for _ in range(1000):
        state = system.step(state)
    distance = 1e-8 * np.linalg.norm(state, axis=-1, keepdims=True).mean()
    offset = generator.standard_normal(state.shape)
    total, counted = 0.0, 0
    for t in range(steps):
        offset *= distance / np.linalg.norm(offset, axis=-1, keepdims=True)
        moved = system.step(np.concatenate((state, state + offset)))
        state, offset = moved[:count], moved[count:] - moved[:count]
        if t >= steps // 10:  # by then the offset points along the fastest direction
            total += float(np.log(np.linalg.norm(offset, axis=-1) / distance).mean())
            counted += 1
    _check_finite(state, (1000 + steps) * system.dt)
    return total / (counted * system.dt)
