"""Wrappers that vary a spectrum: some eigenvalues negative, some zero for good."""

import torch
from torch import Tensor

from ..._typing import Device, DType
from ...spec import check_fraction, check_kind, check_seed, spec
from .base import BlockDiagonal, Spectrum, SpectrumSpec
from .continuous import Linspace

__all__ = ["ContinuousPM", "Negative", "Sparse"]


@spec
class Negative(SpectrumSpec):
    """A fraction of the eigenvalues gets the opposite sign, spread evenly; magnitudes stay.

    Zeros of a `Sparse` spectrum do not count: `Negative(Sparse(...), 0.5)` turns half of the others.
    """

    spectrum: SpectrumSpec = Linspace()
    fraction: float = 0.5

    def __post_init__(self) -> None:
        check_kind(self, SpectrumSpec, "spectra.Linspace()", spectrum=self.spectrum)
        if self.fraction != 1 or isinstance(self.fraction, bool):
            check_fraction(self, below="1 itself turns them all", fraction=self.fraction)

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
    negative: Tensor

    def __init__(self, spectrum: Spectrum, fraction: float):
        super().__init__()
        self.spectrum = spectrum
        self.register_buffer("negative", _spread(spectrum, fraction))

    def forward(self, dt: Tensor | None = None) -> BlockDiagonal:
        lambda_bar = self.spectrum(dt)
        sign = 1 - 2 * self.negative.to(lambda_bar.real.dtype)
        return BlockDiagonal(sign * lambda_bar.real, None if lambda_bar.imag is None else sign * lambda_bar.imag)

    def log_modulus(self, dt: Tensor | None = None) -> Tensor:
        return self.spectrum.log_modulus(dt)

    def hold(self, dt: Tensor | None = None) -> BlockDiagonal:
        return self.spectrum.hold(dt)


def _spread(spectrum: Spectrum, fraction: float) -> Tensor:
    """Marks `fraction` of the non-zero eigenvalues, as evenly as whole numbers allow: every other one for a half."""
    alive = spectrum.log_modulus().detach() > -torch.inf
    pair = 1 if spectrum().imag is None else 2
    rank = alive[::pair].cumsum(0).double()  # 1, 2, 3, … along the non-zero ones
    marked = alive[::pair] & ((rank * fraction + 1e-9).floor() > ((rank - 1) * fraction + 1e-9).floor())
    return marked.repeat_interleave(pair)


def ContinuousPM(dt_min: float = 1e-3, dt_max: float = 1e-1) -> Negative:
    """The `continuous_pm` of the paper's L = 32 sweep, which it does not define: `Linspace` with alternating signs."""
    return Negative(Linspace(dt_min=dt_min, dt_max=dt_max), 0.5)


@spec
class Sparse(SpectrumSpec):
    """A fraction of the eigenvalues is zero and stays so; which ones is drawn once, from `seed`."""

    spectrum: SpectrumSpec = Linspace()
    fraction: float = 0.75
    seed: int = 0

    def __post_init__(self) -> None:
        check_kind(self, SpectrumSpec, "spectra.Linspace()", spectrum=self.spectrum)
        check_fraction(
            self,
            below="at 1 nothing would be remembered (for no memory at all use a plain linear layer)",
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
        return self._filled(self.spectrum(dt), 0.0)

    def log_modulus(self, dt: Tensor | None = None) -> Tensor:
        return self.spectrum.log_modulus(dt).masked_fill(self.silent, -torch.inf)

    def hold(self, dt: Tensor | None = None) -> BlockDiagonal:
        return self._filled(self.spectrum.hold(dt), 1.0)

    def _filled(self, blocks: BlockDiagonal, value: float) -> BlockDiagonal:
        imag = None if blocks.imag is None else blocks.imag.masked_fill(self.silent, 0.0)
        return BlockDiagonal(blocks.real.masked_fill(self.silent, value), imag)
