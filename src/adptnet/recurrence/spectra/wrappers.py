"""Wrappers that modify a spectrum: some eigenvalues negative, some fixed at zero."""

import torch
from torch import Tensor

from ..._typing import Device, DType
from ...spec import check_fraction, check_kind, check_seed, spec
from .base import BlockDiagonal, Spectrum, SpectrumSpec
from .continuous import Linspace

__all__ = ["ContinuousPM", "Negative", "Sparse"]


@spec
class Negative(SpectrumSpec):
    """Negates a fraction of the eigenvalues, evenly spaced along the state; the moduli do not change.

    Zeros of a `Sparse` spectrum do not count: `Negative(Sparse(...), 0.5)` negates half of the others.

    Attributes:
        spectrum: The spectrum that is modified.
        fraction: The fraction of the eigenvalues that are negated, from 0 to 1.
    """

    spectrum: SpectrumSpec = Linspace()
    fraction: float = 0.5

    def __post_init__(self) -> None:
        check_kind(self, SpectrumSpec, "spectra.Linspace()", spectrum=self.spectrum)
        if self.fraction != 1 or isinstance(self.fraction, bool):
            check_fraction(self, below="1 negates all of them", fraction=self.fraction)

    @property
    def is_complex(self) -> bool:
        return self.spectrum.is_complex

    @property
    def has_negative(self) -> bool:
        return self.fraction > 0

    @property
    def grows(self) -> bool:
        return self.spectrum.grows

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        inner = self.spectrum.build(state_size, expansion=expansion, device=device, dtype=dtype)
        return NegativeSpectrum(inner, self.fraction)


class NegativeSpectrum(Spectrum):
    """A spectrum with some eigenvalues negated.

    Args:
        spectrum: The spectrum that is modified.
        fraction: The fraction of the eigenvalues that are negated.
    """

    negative: Tensor

    def __init__(self, spectrum: Spectrum, fraction: float):
        super().__init__()
        self.spectrum = spectrum
        self.register_buffer("negative", _mark_evenly(spectrum, fraction))

    def forward(self, dt: Tensor | None = None) -> BlockDiagonal:
        lambda_bar = self.spectrum(dt)
        sign = 1 - 2 * self.negative.to(lambda_bar.real.dtype)
        return BlockDiagonal(sign * lambda_bar.real, None if lambda_bar.imag is None else sign * lambda_bar.imag)

    def log_modulus(self, dt: Tensor | None = None) -> Tensor:
        return self.spectrum.log_modulus(dt)

    def zero_order_hold(self, dt: Tensor | None = None) -> BlockDiagonal:
        return self.spectrum.zero_order_hold(dt)

    def log_step(self) -> Tensor | None:
        return self.spectrum.log_step()


def _mark_evenly(spectrum: Spectrum, fraction: float) -> Tensor:
    """Return a mask of `fraction` of the non-zero eigenvalues, as evenly spaced as possible: every other one for ½."""
    alive = spectrum.log_modulus().detach() > -torch.inf
    pair = 1 if spectrum().imag is None else 2
    rank = alive[::pair].cumsum(0).double()  # 1, 2, 3, … along the non-zero ones
    marked = alive[::pair] & ((rank * fraction + 1e-9).floor() > ((rank - 1) * fraction + 1e-9).floor())
    return marked.repeat_interleave(pair)


def ContinuousPM(dt_min: float = 1e-3, dt_max: float = 1e-1) -> Negative:
    """Return `Linspace` with alternating signs: `continuous_pm` (plus/minus) of the paper's sweep at length 32.

    The paper does not define it.

    Args:
        dt_min: The smallest step size.
        dt_max: The largest step size.
    """
    return Negative(Linspace(dt_min=dt_min, dt_max=dt_max), 0.5)


@spec
class Sparse(SpectrumSpec):
    """Sets a random fraction of the eigenvalues to zero; they stay zero during training.

    Attributes:
        spectrum: The spectrum that is modified.
        fraction: The fraction of the eigenvalues that are zero, below 1. At least one eigenvalue stays.
        seed: The seed of the random choice.
    """

    spectrum: SpectrumSpec = Linspace()
    fraction: float = 0.75
    seed: int = 0

    def __post_init__(self) -> None:
        check_kind(self, SpectrumSpec, "spectra.Linspace()", spectrum=self.spectrum)
        check_fraction(
            self,
            below="at 1 the state would have no memory (for a layer without memory use nn.Linear)",
            fraction=self.fraction,
        )
        check_seed(self, seed=self.seed)

    @property
    def is_complex(self) -> bool:
        return self.spectrum.is_complex

    @property
    def has_negative(self) -> bool:
        return self.spectrum.has_negative

    @property
    def grows(self) -> bool:
        return self.spectrum.grows

    def build(self, state_size: int, *, expansion: int = 1, device: Device = None, dtype: DType = None) -> Spectrum:
        inner = self.spectrum.build(state_size, expansion=expansion, device=device, dtype=dtype)
        return SparseSpectrum(inner, self.fraction, self.seed)


class SparseSpectrum(Spectrum):
    """A spectrum with some eigenvalues fixed at zero.

    Args:
        spectrum: The spectrum that is modified.
        fraction: The fraction of the eigenvalues that are zero.
        seed: The seed of the random choice.
    """

    silent: Tensor

    def __init__(self, spectrum: Spectrum, fraction: float, seed: int):
        super().__init__()
        self.spectrum = spectrum
        lambda_bar = spectrum()
        pair = 1 if lambda_bar.imag is None else 2
        count = lambda_bar.real.shape[-1] // pair
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        silent = torch.zeros(count, dtype=torch.bool)
        silent[order[: min(round(fraction * count), count - 1)]] = True
        self.register_buffer("silent", silent.repeat_interleave(pair).to(lambda_bar.real.device))

    def forward(self, dt: Tensor | None = None) -> BlockDiagonal:
        return self._fill_silent(self.spectrum(dt), 0.0)

    def log_modulus(self, dt: Tensor | None = None) -> Tensor:
        return self.spectrum.log_modulus(dt).masked_fill(self.silent, -torch.inf)

    def zero_order_hold(self, dt: Tensor | None = None) -> BlockDiagonal:
        return self._fill_silent(self.spectrum.zero_order_hold(dt), 1.0)

    def log_step(self) -> Tensor | None:
        return self.spectrum.log_step()

    def _fill_silent(self, blocks: BlockDiagonal, value: float) -> BlockDiagonal:
        imag = None if blocks.imag is None else blocks.imag.masked_fill(self.silent, 0.0)
        return BlockDiagonal(blocks.real.masked_fill(self.silent, value), imag)
