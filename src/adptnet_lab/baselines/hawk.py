"""Hawk's recurrent block: the real-gated linear recurrent unit (eq:hawk_rec)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adptnet._dtype import compute_dtype
from adptnet._typing import Device, DType
from adptnet.nn.convolution import ShortConvolution
from adptnet.nn.mixer import Mixer, MixerSpec, Steps, check_heads
from adptnet.ops.linear_scan import linear_scan
from adptnet.optim import NoDecay
from adptnet.spec import check_size, spec

__all__ = ["Hawk", "HawkMixer"]

SHARPNESS = 8.0  # c: at a gate of 1 the decay is the eighth power of a
STEEPEST = 1000.0  # largest derivative of the square root


@spec
class Hawk(MixerSpec):
    """A gated branch times a linear recurrence whose decay and input are gated (De et al., 2024).

    Both gates are sigmoids, as in the public code; the paper speaks of softplus (deviations.md, point 19).

    Attributes:
        width: Features in and out.
        state_size: State dimensions; `width` by default.
        num_heads: Blocks of the block-diagonal gate matrices.
        taps: Kernel length of the convolution before the recurrence.
    """

    width: int
    state_size: int | None = None
    num_heads: int = 1
    taps: int = 4

    def __post_init__(self) -> None:
        if self.state_size is None:
            object.__setattr__(self, "state_size", self.width)
        assert self.state_size is not None
        check_size(self, width=self.width, taps=self.taps)
        check_heads(self, self.num_heads, state_size=self.state_size)

    def build(self, *, device: Device = None, dtype: DType = None) -> "HawkMixer":
        return HawkMixer(self, device=device, dtype=dtype)


class HawkMixer(Mixer):
    """Module of `Hawk`: h_t = a_t ⊙ h_{t-1} + √(1 - a_t²) ⊙ i_t ⊙ x_t, a_t = a^(8 r_t).

    A sequence begins with h_0 = i_0 ⊙ x_0.

    Args:
        spec: The spec of the layer.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: Hawk, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        size = spec.state_size
        assert size is not None
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.branch = nn.Linear(spec.width, size, **factory_kwargs)
        self.enter = nn.Linear(spec.width, size, **factory_kwargs)
        self.convolution = ShortConvolution(size, spec.taps, bias=True, device=device, dtype=dtype)
        nn.init.normal_(self.convolution.weight, std=(0.01 / spec.taps) ** 0.5)
        block = size // spec.num_heads
        shape = (2, spec.num_heads, block, block)  # input gate and decay gate
        self.gate_weight = nn.Parameter(torch.empty(shape, **factory_kwargs).normal_(std=block**-0.5))
        self.gate_bias = nn.Parameter(torch.zeros(2, size, **factory_kwargs))
        self.decay = _Decay(size, device, dtype)
        self.leave = nn.Linear(size, spec.width, **factory_kwargs)

    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        u, recent = self.convolution(self.enter(x), None if parts is None else parts[0], steps)
        heads = u.unflatten(-1, (self.gate_weight.shape[1], -1))
        gates = torch.einsum("bthi,ghij->gbthj", heads, self.gate_weight).flatten(-2)
        wide = compute_dtype(u.dtype)  # dtype of the recurrence, also if weights or autocast are narrower
        input_gate, decay_gate = torch.sigmoid((gates + self.gate_bias[:, None, None]).to(wide))
        log_decay = -SHARPNESS * decay_gate * functional.softplus(self.decay.raw.to(wide))
        beginning = (steps.position == 0).unsqueeze(-1)
        gain = torch.where(beginning, 1.0, _BoundedSqrt.apply(-torch.expm1(2 * log_decay)))  # type: ignore[no-untyped-call]
        before = None if parts is None else parts[1]
        states = linear_scan(log_decay.exp(), gain * input_gate * u, before, reset=steps.reset)
        branch = functional.gelu(self.branch(x), approximate="tanh")
        outputs: Tensor = self.leave((states * branch).to(x.dtype))
        return outputs, (recent, steps.last(states).clone())


class _Decay(NoDecay):
    """Decay a = exp(-softplus(raw)), initialised uniformly by area over the ring from 0.9 to 0.999."""

    def __init__(self, size: int, device: Device, dtype: DType):
        super().__init__()
        squared = torch.empty(size, device=device, dtype=dtype).uniform_(0.9**2, 0.999**2)
        self.raw = nn.Parameter(torch.log(torch.expm1(-0.5 * squared.log())))


class _BoundedSqrt(torch.autograd.Function):
    """Square root whose derivative is at most `STEEPEST`, which is part of the model's definition."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = (4 * x).clamp(min=STEEPEST**-2).rsqrt()
        return gradients[0] * slope
