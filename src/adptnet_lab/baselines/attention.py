"""Softmax attention, causal, with rotary positions (eq:self-attention)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from adptnet._typing import Device, DType
from adptnet.errors import SpecError
from adptnet.nn.mixer import Mixer, MixerSpec, Steps, check_heads
from adptnet.spec import check_positive, spec

__all__ = ["Attention", "AttentionMixer"]


@spec
class Attention(MixerSpec):
    """Softmax attention to the steps before. Its state grows with the sequence.

    Attributes:
        width: Features in and out.
        num_heads: Heads, each of an even size.
        base: Of the rotary positions' wavelengths.
    """

    width: int
    num_heads: int = 4
    base: float = 10_000.0

    def __post_init__(self) -> None:
        check_heads(self, self.num_heads, width=self.width)
        check_positive(self, base=self.base)
        if self.width // self.num_heads % 2:
            raise SpecError(
                f"Attention(width={self.width}, num_heads={self.num_heads}): rotary positions turn pairs, and a head "
                f"has {self.width // self.num_heads} numbers. Pass width={2 * self.num_heads} or a multiple of it."
            )

    def build(self, *, device: Device = None, dtype: DType = None) -> "AttentionMixer":
        return AttentionMixer(self, device=device, dtype=dtype)


class AttentionMixer(Mixer):
    """y_t = W Σ_s softmax_s(q_t · k_s / √d) v_s over the steps s ≤ t of the sequence."""

    def __init__(self, spec: Attention, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        self.enter = nn.Linear(spec.width, 3 * spec.width, bias=False, device=device, dtype=dtype)
        self.leave = nn.Linear(spec.width, spec.width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert isinstance(self.spec, Attention)
        heads = self.enter(x).unflatten(-1, (3, self.spec.num_heads, -1))  # (batch, time, 3, heads, size)
        query, key = (_turned(heads[:, :, i], steps.position, self.spec.base) for i in (0, 1))
        value = heads[:, :, 2]
        batch, count = x.shape[:2]
        there = torch.ones(batch, count, dtype=torch.bool, device=x.device) if steps.inside is None else steps.inside
        # Numbers of the sequences in a row: what came before has 0, and each reset begins another.
        number = torch.zeros_like(there, dtype=torch.int64) if steps.reset is None else steps.reset.cumsum(-1)
        numbers = number
        order = torch.arange(count, device=x.device)
        seen = there.unsqueeze(1) & (order <= order.unsqueeze(-1))
        if parts is not None:
            key, value = torch.cat((parts[0], key), 1), torch.cat((parts[1], value), 1)
            numbers = torch.cat((torch.zeros_like(parts[2], dtype=torch.int64), number), 1)
            seen = torch.cat((parts[2].unsqueeze(1).expand(-1, count, -1), seen), 2)
            there = torch.cat((parts[2], there), 1)
        own = seen & (numbers.unsqueeze(1) == number.unsqueeze(2))
        if steps.inside is not None:
            own = own | ~steps.inside.unsqueeze(-1)  # past the end any step will do: an empty row would give NaN
        y = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=own.unsqueeze(1)
        )
        outputs: Tensor = self.leave(y.transpose(1, 2).flatten(-2))
        return outputs, (key, value, there & (numbers == steps.last(number).unsqueeze(-1)))


def _turned(x: Tensor, position: Tensor, base: float) -> Tensor:
    """`x` (batch, time, heads, size) with each pair turned by its position over a wavelength of its own."""
    size = x.shape[-1]
    frequency = base ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float64) / size)
    phase = position.unsqueeze(-1) * frequency
    cos, sin = (part.to(x.dtype).unsqueeze(2) for part in (phase.cos(), phase.sin()))
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((cos * first - sin * second, cos * second + sin * first), -1).flatten(-2)
