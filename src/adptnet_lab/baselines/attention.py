"""Causal softmax attention with rotary position embeddings (eq:self-attention)."""

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
    """Causal softmax attention. Its state, the key-value cache, grows with the sequence.

    Attributes:
        width: Features in and out.
        num_heads: Heads, each of an even size.
        base: Base of the wavelengths of the rotary position embeddings.
    """

    width: int
    num_heads: int = 4
    base: float = 10_000.0

    def __post_init__(self) -> None:
        check_heads(self, self.num_heads, width=self.width)
        check_positive(self, base=self.base)
        if self.width // self.num_heads % 2:
            raise SpecError(
                f"Attention(width={self.width}, num_heads={self.num_heads}): rotary positions rotate pairs, but a head "
                f"has {self.width // self.num_heads} features. Pass width={2 * self.num_heads} or a multiple of it."
            )

    def build(self, *, device: Device = None, dtype: DType = None) -> "AttentionMixer":
        return AttentionMixer(self, device=device, dtype=dtype)


class AttentionMixer(Mixer):
    """Module of `Attention`: y_t = W Σ_s softmax_s(q_t · k_s / √d) v_s over the steps s ≤ t of the sequence.

    Args:
        spec: The spec of the layer.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: Attention, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        self.enter = nn.Linear(spec.width, 3 * spec.width, bias=False, device=device, dtype=dtype)
        self.leave = nn.Linear(spec.width, spec.width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert isinstance(self.spec, Attention)
        heads = self.enter(x).unflatten(-1, (3, self.spec.num_heads, -1))  # (batch, time, 3, heads, size)
        query, key = (_rotate(heads[:, :, i], steps.position, self.spec.base) for i in (0, 1))
        value = heads[:, :, 2]
        batch, count = x.shape[:2]
        valid = torch.ones(batch, count, dtype=torch.bool, device=x.device) if steps.inside is None else steps.inside
        # Number the sequences of each row: the incoming state belongs to 0, and each reset begins the next.
        sequence = torch.zeros_like(valid, dtype=torch.int64) if steps.reset is None else steps.reset.cumsum(-1)
        key_sequence = sequence
        order = torch.arange(count, device=x.device)
        visible = valid.unsqueeze(1) & (order <= order.unsqueeze(-1))
        if parts is not None:
            key, value = torch.cat((parts[0], key), 1), torch.cat((parts[1], value), 1)
            key_sequence = torch.cat((torch.zeros_like(parts[2], dtype=torch.int64), sequence), 1)
            visible = torch.cat((parts[2].unsqueeze(1).expand(-1, count, -1), visible), 2)
            valid = torch.cat((parts[2], valid), 1)
        mask = visible & (key_sequence.unsqueeze(1) == sequence.unsqueeze(2))
        if steps.inside is not None:
            mask = mask | ~steps.inside.unsqueeze(-1)  # in the padding, attend to any step: an empty row would give NaN
        y = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask.unsqueeze(1)
        )
        outputs: Tensor = self.leave(y.transpose(1, 2).flatten(-2))
        return outputs, (key, value, valid & (key_sequence == steps.last(sequence).unsqueeze(-1)))


def _rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Apply rotary position embeddings to `x`, (batch, time, heads, size): rotate each pair by position · frequency."""
    size = x.shape[-1]
    frequency = base ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float64) / size)
    phase = position.unsqueeze(-1) * frequency
    cos, sin = (part.to(x.dtype).unsqueeze(2) for part in (phase.cos(), phase.sin()))
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((cos * first - sin * second, cos * second + sin * first), -1).flatten(-2)
