"""Basilar membrane: its transfer function from sound to velocity at each place (Sieroka, Dosch and Rupp 2006).

The constants are in centimetres, grams and seconds. Channel 0 is the base, which responds to the highest frequencies.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from adptnet.errors import InputError

__all__ = ["LENGTH", "compute_transfer_function"]

Complex = npt.NDArray[np.complexfloating]

STIFFNESS = 1e9  # C0, at the base
DECLINE = 3.0  # α, 1/cm: the stiffness falls as exp(-α x)
OFFSET = 3500.0  # a
DENSITY = 1.0  # ρ
HEIGHT = 0.1  # h
MASS = 0.05  # m
DAMPING = 0.15  # δ
LENGTH = 3.5  # cm


@lru_cache(maxsize=4)
def compute_transfer_function(samples: int, rate: int, channels: int, single: bool) -> Complex:
    """Return the transfer function from the spectrum of a sound to the velocity of each channel.

    This takes some seconds for 700 channels and one second of sound, so results are cached.

    Args:
        samples: Length of the sound.
        rate: Samples per second.
        channels: Places along the membrane.
        single: Return complex64 instead of complex128.

    Returns:
        (channels, samples // 2 + 1), read-only.
    """
    special = _import_special()
    frequency = 2 * np.pi * np.linspace(1, rate // 2, samples // 2 + 1)
    places = np.linspace(0, LENGTH, channels)
    base = _pressure(special, np.zeros(1), frequency)
    zeta = 2 * frequency / DECLINE * np.sqrt(2 / (HEIGHT * STIFFNESS))
    impedance = np.sqrt(2 * STIFFNESS / HEIGHT) * (1j * special.j0(zeta) + special.y0(zeta))
    impedance = impedance / (special.j1(zeta) - 1j * special.y1(zeta))
    response = np.empty((channels, len(frequency)), np.complex64 if single else np.complex128)
    for start in range(0, channels, 64):
        at = slice(start, start + 64)
        pressure = _pressure(special, places[at], frequency)
        response[at] = 2 * frequency / _stiffness(places[at], frequency) * pressure * (impedance / base)
    response.flags.writeable = False
    return response


def _import_special() -> Any:
    try:
        from scipy import special
    except ImportError:
        raise InputError("the cochlea needs scipy, for Hankel functions: pip install 'adptnet[events]'.") from None
    return special


def _stiffness(places: npt.NDArray[np.float64], frequency: npt.NDArray[np.float64]) -> Complex:
    """Return ξ, (channels, frequencies)."""
    x = places[:, None]
    resistance = DAMPING * np.sqrt(STIFFNESS * MASS)
    elastic = STIFFNESS * np.exp(-DECLINE * x) - OFFSET - MASS * frequency**2
    return np.asarray(elastic - 1j * frequency * resistance * np.exp(-DECLINE * x / 2))


def _pressure(special: Any, places: npt.NDArray[np.float64], frequency: npt.NDArray[np.float64]) -> Any:
    """Return the pressure √(G/g) H₀(G), with the phase G in closed form."""
    x = places[:, None]
    resistance = DAMPING * np.sqrt(STIFFNESS * MASS)
    wave = frequency * np.sqrt(DENSITY / (HEIGHT * _stiffness(places, frequency)))
    wave_at_base = frequency * np.sqrt(DENSITY / (HEIGHT * _stiffness(np.zeros(1), frequency)))
    root = np.sqrt(OFFSET + MASS * frequency**2)
    damped = np.exp(-DECLINE * x / 2) * resistance
    at_base = -DECLINE * np.sqrt(STIFFNESS - OFFSET - frequency * (MASS * frequency + 1j * resistance))
    at_base = at_base + 1j * DECLINE * (2 * OFFSET + frequency * (2 * MASS * frequency + 1j * resistance)) / (2 * root)
    at_place = -2 * np.sqrt(_stiffness(places, frequency))
    at_place = at_place + 1j * (2 * OFFSET + frequency * (2 * MASS * frequency + 1j * damped)) / root
    at_place = DECLINE / 2 * np.exp(DECLINE * x / 2) * at_place
    phase = 2 * wave_at_base / DECLINE
    phase = phase - 2 * np.sqrt(2) * 1j * frequency / (DECLINE * np.sqrt(2 * HEIGHT) * root) * np.log(
        at_base / at_place
    )
    return np.sqrt(phase / wave) * special.hankel1(0, phase)
