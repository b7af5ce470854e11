"""Gated linear attention: fast weights that forget, each row at a rate that depends on the input."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from adptnet._typing import Device, DType
from adptnet.nn.mixer import Mixer, MixerSpec, Steps, check_heads
from adptnet.spec import check_size, spec

from .fast_weights import fast_weights

__all__ = ["GatedLinearAttention", "GatedLinearAttentionMixer"]

SLOWNESS = 16.0  # the root that is taken of the gate, so that it starts near 1


@spec
class GatedLinearAttention(MixerSpec):
    """S_t = diag(α_t) S_{t-1} + k_t v_t' (Yang et al., 2023).

    Attributes:
        width: Features in and out, and of all values together.
        num_heads: Heads.
        key_width: Of all keys together; half the width if not given.
        rank: Of the gate's map.
    """

    width: int
    num_heads: int = 4
    key_width: int | None = None
    rank: int = 16

    def __post_init__(self) -> None:
        check_heads(self, self.num_heads, width=self.width)
        if self.key_width is None:
            heads = self.num_heads
            object.__setattr__(self, "key_width", max(heads, self.width // 2 // heads * heads))
        assert self.key_width is not None
        check_heads(self, self.num_heads, key_width=self.key_width)
        check_size(self, rank=self.rank)

    def build(self, *, device: Device = None, dtype: DType = None) -> "GatedLinearAttentionMixer":
        return GatedLinearAttentionMixer(self, device=device, dtype=dtype)


class GatedLinearAttentionMixer(Mixer):
    """y_t = W (norm(S_t' q_t / √d) ⊙ SiLU(G x_t)), α_t = sigmoid(U V x_t + b)^(1/16)."""

    def __init__(self, spec: GatedLinearAttention, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        width, keys = spec.width, spec.key_width
        assert keys is not None
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Linear(width, keys, bias=False, **made)
        self.key = nn.Linear(width, keys, bias=False, **made)
        self.value = nn.Linear(width, width, bias=False, **made)
        self.forget = nn.Sequential(nn.Linear(width, spec.rank, bias=False, **made), nn.Linear(spec.rank, keys, **made))
        self.gate = nn.Linear(width, width, bias=False, **made)
        self.norm = nn.RMSNorm(width // spec.num_heads, **made)
        self.leave = nn.Linear(width, width, bias=False, **made)

    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert isinstance(self.spec, GatedLinearAttention)
        heads = (self.spec.num_heads, -1)
        query, key, value = (part(x).unflatten(-1, heads) for part in (self.query, self.key, self.value))
        decay = (functional.logsigmoid(self.forget(x)) / SLOWNESS).exp().unflatten(-1, heads)
        before = None if parts is None else parts[0]
        read, state = fast_weights(query * query.shape[-1] ** -0.5, key, value, before, steps, decay=decay)
        outputs: Tensor = self.leave((self.norm(read).flatten(-2) * functional.silu(self.gate(x))).to(x.dtype))
        return outputs, (state,)
