"""Mamba: the selective state-space model."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adptnet._dtype import compute_dtype
from adptnet._typing import Device, DType
from adptnet.nn.convolution import ShortConvolution
from adptnet.nn.mixer import Mixer, MixerSpec, Steps
from adptnet.ops.linear_scan import linear_scan
from adptnet.optim import NoDecay
from adptnet.spec import check_size, spec

__all__ = ["Mamba", "MambaMixer"]


@spec
class Mamba(MixerSpec):
    """Diagonal state-space model whose step size, input and output maps depend on the input (Gu and Dao, 2023).

    Attributes:
        width: Features in and out.
        state_size: State dimensions per inner channel.
        expand: Inner channels per feature.
        taps: Kernel length of the convolution before the recurrence.
        rank: Rank of the step sizes; a sixteenth of the width, rounded up, by default.
    """

    width: int
    state_size: int = 16
    expand: int = 2
    taps: int = 4
    rank: int | None = None

    def __post_init__(self) -> None:
        check_size(self, width=self.width, state_size=self.state_size, expand=self.expand, taps=self.taps)
        if self.rank is None:
            object.__setattr__(self, "rank", math.ceil(self.width / 16))
        check_size(self, rank=self.rank)

    def build(self, *, device: Device = None, dtype: DType = None) -> "MambaMixer":
        return MambaMixer(self, device=device, dtype=dtype)


class MambaMixer(Mixer):
    """Module of `Mamba`: h_t = exp(Δ_t A) h_{t-1} + Δ_t u_t B_t, y_t = C_t · h_t + D u_t, between two gated maps.

    Args:
        spec: The spec of the layer.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: Mamba, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        assert spec.rank is not None
        inner = spec.expand * spec.width
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.enter = nn.Linear(spec.width, 2 * inner, bias=False, **factory_kwargs)
        self.convolution = ShortConvolution(inner, spec.taps, bias=True, device=device, dtype=dtype)
        self.select = nn.Linear(inner, spec.rank + 2 * spec.state_size, bias=False, **factory_kwargs)
        self.step_size = nn.Linear(spec.rank, inner, **factory_kwargs)
        self.modes = _Modes(inner, spec.state_size, device, dtype)
        self.leave = nn.Linear(inner, spec.width, bias=False, **factory_kwargs)
        with torch.no_grad():
            nn.init.uniform_(self.step_size.weight, -(spec.rank**-0.5), spec.rank**-0.5)
            dt = (torch.rand_like(self.step_size.bias) * math.log(100) + math.log(1e-3)).exp()  # from 0.001 to 0.1
            self.step_size.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse softplus of dt

    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert isinstance(self.spec, Mamba)
        assert self.spec.rank is not None
        u, gate = self.enter(x).chunk(2, -1)
        u, recent = self.convolution(u, None if parts is None else parts[0], steps)
        u = functional.silu(u)
        low, write, read = self.select(u).split((self.spec.rank, self.spec.state_size, self.spec.state_size), -1)
        wide = compute_dtype(u.dtype)  # dtype of the recurrence, also if weights or autocast are narrower
        dt = functional.softplus(self.step_size(low).to(wide))
        transition = (dt.unsqueeze(-1) * -self.modes.log_decay.to(wide).exp()).exp()
        offset = (dt * u).unsqueeze(-1) * write.unsqueeze(-2)
        before = None if parts is None else parts[1].flatten(-2)
        states = linear_scan(transition.flatten(-2), offset.flatten(-2), before, reset=steps.reset)
        states = states.unflatten(-1, self.modes.log_decay.shape)
        y = (states * read.unsqueeze(-2)).sum(-1) + self.modes.skip * u
        outputs: Tensor = self.leave((y * functional.silu(gate)).to(x.dtype))
        return outputs, (recent, steps.last(states).clone())


class _Modes(NoDecay):
    """Decay rates of the modes, 1 to n in each channel (S4D-Real), and the skip connection."""

    def __init__(self, channels: int, state_size: int, device: Device, dtype: DType):
        super().__init__()
        decay = torch.arange(1, state_size + 1, device=device, dtype=dtype or torch.get_default_dtype())
        self.log_decay = nn.Parameter(decay.log().repeat(channels, 1))
        self.skip = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
