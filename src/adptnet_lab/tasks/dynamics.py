"""Dynamical systems, integrated by the classical fourth-order Runge-Kutta method in float64."""

import abc
import functools

import numpy as np

from adptnet.errors import InputError
from adptnet.spec import suggest_name

from .equations import Field, Numbers, parse_equations

__all__ = [
    "SYSTEMS",
    "DynamicalSystem",
    "MackeyGlass",
    "ODESystem",
    "estimate_largest_exponent",
    "make_system",
    "runge_kutta_step",
    "simulate_trajectories",
]


def runge_kutta_step(field: Field, state: Numbers, dt: float) -> Numbers:
    """Return the state of dx/dt = field(x) one Runge-Kutta step later.

    Args:
        field: Right-hand side.
        state: (..., n).
        dt: Length of the step.
    """
    first = field(state)
    second = field(state + dt / 2 * first)
    third = field(state + dt / 2 * second)
    fourth = field(state + dt * third)
    return state + dt / 6 * (first + 2 * second + 2 * third + fourth)


class DynamicalSystem(abc.ABC):
    """Base class of dynamical systems; states are batched, (trajectories, n)."""

    dt: float  # time between two samples
    observed: int  # observed variables
    exponent: float | None = None  # largest Lyapunov exponent, in 1 / time, if known

    @abc.abstractmethod
    def start(self, count: int, generator: np.random.Generator) -> Numbers:
        """Draw `count` different initial states.

        Args:
            count: Number of trajectories.
            generator: Source of randomness.

        Returns:
            (count, n).
        """

    @abc.abstractmethod
    def step(self, state: Numbers) -> Numbers:
        """Return the states one sample later.

        Args:
            state: (trajectories, n).

        Returns:
            (trajectories, n).
        """

    @abc.abstractmethod
    def sample(self, state: Numbers) -> Numbers:
        """Return the observed variables of the states, (trajectories, observed).

        Args:
            state: (trajectories, n).
        """


class ODESystem(DynamicalSystem):
    """A system of ordinary differential equations, fully observed.

    Args:
        text: The equations, such as "x' = v; v' = -x".
        dt: Time between two samples.
        substeps: Integrator steps between two samples.
        centre: Centre of the cube from which initial states are drawn; the origin by default.
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
        self.names, self.field = parse_equations(text)
        self.dt, self.substeps, self.exponent = dt, substeps, exponent
        self.observed = len(self.names)
        self.centre = centre or (0.0,) * self.observed

    def start(self, count: int, generator: np.random.Generator) -> Numbers:
        return np.asarray(self.centre) + generator.uniform(-1, 1, (count, self.observed))

    def step(self, state: Numbers) -> Numbers:
        for _ in range(self.substeps):
            state = runge_kutta_step(self.field, state, self.dt / self.substeps)
        return state

    def sample(self, state: Numbers) -> Numbers:
        return state


class MackeyGlass(DynamicalSystem):
    """The Mackey-Glass delay equation, x' = 0.2 x(t-τ) / (1 + x(t-τ)¹⁰) - 0.1 x, with τ = 17 and x observed.

    The state is x on a grid over the last τ (and one point more). The value midway between two grid points comes from
    cubic interpolation.

    Args:
        dt: Time between two samples.
        delay: τ, a multiple of dt / substeps.
        substeps: Integrator steps between two samples.
    """

    # By `estimate_largest_exponent`, also with steps half and twice as long; published values are 0.005 to 0.007.
    exponent = 0.0052
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
            now = self.lag + 1 + i  # grid point of the present; time t - τ is `lag` points earlier
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
def make_system(name: str, dt: float | None = None) -> DynamicalSystem:
    """Return a system by its name or its equations.

    Args:
        name: One of `SYSTEMS`, or equations such as "x' = v; v' = -x".
        dt: Time between two samples; the system's own by default.

    Raises:
        InputError: The name is unknown, or the equations cannot be parsed.
    """
    if name == "lorenz63":
        text = "x' = 10*(y - x); y' = x*(28 - z) - y; z' = x*y - 8/3*z"
        return ODESystem(text, dt=dt or 0.02, substeps=2, centre=(0.0, 0.0, 25.0), exponent=0.9056)
    if name == "rossler":
        text = "x' = -y - z; y' = x + 0.2*y; z' = 0.2 + z*(x - 5.7)"
        return ODESystem(text, dt=dt or 0.1, substeps=5, exponent=0.0714)
    if name == "mackey-glass":
        return MackeyGlass(dt=dt or 1.0)
    if "=" in name:
        return ODESystem(name, dt=dt or 0.02)
    raise InputError(
        f"there is no system {name!r}.{suggest_name(name, SYSTEMS)} Or write its equations: \"x' = v; v' = -x\"."
    )


def simulate_trajectories(
    system: DynamicalSystem, count: int, steps: int, *, seed: int, transient: int = 1000
) -> Numbers:
    """Simulate trajectories and return their samples after the transient, (count, steps, observed).

    Args:
        system: What to simulate.
        count: Number of trajectories.
        steps: Samples per trajectory.
        seed: Seed of the initial states.
        transient: Samples to discard first.

    Raises:
        InputError: A trajectory diverges.
    """
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
            f"the trajectories are not finite after a time of {time:.3g}: the equations diverge, or dt is too large "
            "for them. Pass a smaller dt."
        )


def estimate_largest_exponent(system: DynamicalSystem, *, count: int = 16, steps: int = 2000, seed: int = 0) -> float:
    """Estimate the largest Lyapunov exponent, in 1 / time, from the separation of neighbouring trajectories.

    Their distance is rescaled at every sample (Benettin's method).

    Args:
        system: What to simulate.
        count: Number of pairs of trajectories.
        steps: Samples per trajectory; the first tenth is discarded.
        seed: Seed of the initial states and offsets.
    """
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
        if t >= steps // 10:  # by then the offset is aligned with the fastest-growing direction
            total += float(np.log(np.linalg.norm(offset, axis=-1) / distance).mean())
            counted += 1
    _check_finite(state, (1000 + steps) * system.dt)
    return total / (counted * system.dt)
