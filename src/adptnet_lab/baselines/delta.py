"""DeltaNet and Gated DeltaNet: fast weights updated by the delta rule (eq:delta_rule)."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adptnet._typing import Device, DType
from adptnet.nn.convolution import ShortConvolution
from adptnet.nn.mixer import Mixer, MixerSpec, Steps, check_heads
from adptnet.optim import NoDecay
from adptnet.spec import check_size, spec

from .fast_weights import scan_fast_weights

__all__ = ["DeltaNet", "DeltaNetMixer", "GatedDeltaNet", "GatedDeltaNetMixer"]


@spec
class DeltaNet(MixerSpec):
    """DeltaNet, S_t = (I - β_t k_t k_t') S_{t-1} + β_t k_t v_t' with unit keys and queries (Yang et al., 2024).

    Attributes:
        width: Features in and out, and total size of the keys and of the values.
        num_heads: Number of heads.
        taps: Kernel length of the convolutions on query, key and value.
    """

    width: int
    num_heads: int = 4
    taps: int = 4

    def __post_init__(self) -> None:
        check_heads(self, self.num_heads, width=self.width)
        check_size(self, taps=self.taps)

    def build(self, *, device: Device = None, dtype: DType = None) -> "DeltaNetMixer":
        return DeltaNetMixer(self, device=device, dtype=dtype)


@spec
class GatedDeltaNet(MixerSpec):
    """DeltaNet with a decaying matrix, S_t = α_t (I - β_t k_t k_t') S_{t-1} + β_t k_t v_t', with an output gate.

    Attributes:
        width: Features in and out, and total size of the keys and of the values.
        num_heads: Number of heads.
        taps: Kernel length of the convolutions on query, key and value.
    """

    width: int
    num_heads: int = 4
    taps: int = 4

    def __post_init__(self) -> None:
        check_heads(self, self.num_heads, width=self.width)
        check_size(self, taps=self.taps)

    def build(self, *, device: Device = None, dtype: DType = None) -> "GatedDeltaNetMixer":
        return GatedDeltaNetMixer(self, device=device, dtype=dtype)


class _DeltaRuleInputs(nn.Module):
    """Query, key, value and strength β of the delta rule; query and key have unit norm in each head."""

    def __init__(self, spec: DeltaNet | GatedDeltaNet, device: Device, dtype: DType):
        super().__init__()
        self.num_heads = spec.num_heads
        self.enter = nn.Linear(spec.width, 3 * spec.width, bias=False, device=device, dtype=dtype)
        self.convolution = ShortConvolution(3 * spec.width, spec.taps, bias=False, device=device, dtype=dtype)
        self.strength = nn.Linear(spec.width, spec.num_heads, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, before: Tensor | None, steps: Steps) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        mixed, recent = self.convolution(self.enter(x), before, steps)
        query, key, value = functional.silu(mixed).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        unit = functional.normalize
        return unit(query, dim=-1), unit(key, dim=-1), value, torch.sigmoid(self.strength(x)), recent


class DeltaNetMixer(Mixer):
    """Module of `DeltaNet`: y_t = W norm(S_t' q_t).

    Args:
        spec: The spec of the layer.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: DeltaNet, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        self.written = _DeltaRuleInputs(spec, device, dtype)
        self.norm = nn.RMSNorm(spec.width // spec.num_heads, device=device, dtype=dtype)
        self.leave = nn.Linear(spec.width, spec.width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        before, memory = (None, None) if parts is None else parts
        query, key, value, strength, recent = self.written(x, before, steps)
        read, memory = scan_fast_weights(query, key, value, memory, steps, strength=strength)
        outputs: Tensor = self.leave(self.norm(read).flatten(-2).to(x.dtype))
        return outputs, (recent, memory)


class GatedDeltaNetMixer(Mixer):
    """Module of `GatedDeltaNet`: y_t = W (norm(S_t' q_t) ⊙ SiLU(G x_t)), α_t = exp(-a softplus(U x_t + b)) per head.

    Args:
        spec: The spec of the layer.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: GatedDeltaNet, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.written = _DeltaRuleInputs(spec, device, dtype)
        self.step_size = nn.Linear(spec.width, spec.num_heads, bias=False, **factory_kwargs)
        self.rates = _Rates(spec.num_heads, device, dtype)
        self.gate = nn.Linear(spec.width, spec.width, bias=False, **factory_kwargs)
        self.norm = nn.RMSNorm(spec.width // spec.num_heads, **factory_kwargs)
        self.leave = nn.Linear(spec.width, spec.width, bias=False, **factory_kwargs)

    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        before, memory = (None, None) if parts is None else parts
        query, key, value, strength, recent = self.written(x, before, steps)
        dt = functional.softplus(self.step_size(x) + self.rates.bias)
        decay = (-self.rates.log_rate.exp() * dt).exp().unsqueeze(-1)
        read, memory = scan_fast_weights(query, key, value, memory, steps, decay=decay, strength=strength)
        outputs: Tensor = self.leave((self.norm(read).flatten(-2) * functional.silu(self.gate(x))).to(x.dtype))
        return outputs, (recent, memory)


class _Rates(NoDecay):
    """Decay of each head: initial rates from 1 to 16, step sizes from 0.001 to 0.1."""

    def __init__(self, num_heads: int, device: Device, dtype: DType):
        super().__init__()
        rate = torch.empty(num_heads, device=device, dtype=dtype).uniform_(1, 16)
        self.log_rate = nn.Parameter(rate.log())
        dt = torch.empty(num_heads, device=device, dtype=dtype).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # inverse softplus of dt
