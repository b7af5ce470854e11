"""Gated linear attention: fast weights with an input-dependent decay of each row."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from adptnet._typing import Device, DType
from adptnet.nn.mixer import Mixer, MixerSpec, Steps, check_heads
from adptnet.spec import check_size, spec

from .fast_weights import scan_fast_weights

__all__ = ["GatedLinearAttention", "GatedLinearAttentionMixer"]

SLOWNESS = 16.0  # order of the root taken of the gate, so that it starts near 1


@spec
class GatedLinearAttention(MixerSpec):
    """Gated linear attention, S_t = diag(α_t) S_{t-1} + k_t v_t' (Yang et al., 2023).

    Attributes:
        width: Features in and out, and total size of the values.
        num_heads: Number of heads.
        key_width: Total size of the keys; half the width by default.
        rank: Rank of the gate's matrix.
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
    """Module of `GatedLinearAttention`: y_t = W (norm(S_t' q_t / √d) ⊙ SiLU(G x_t)).

    The decay is α_t = sigmoid(U V x_t + b)^(1/16).

    Args:
        spec: The spec of the layer.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: GatedLinearAttention, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.spec = spec
        width, keys = spec.width, spec.key_width
        assert keys is not None
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Linear(width, keys, bias=False, **factory_kwargs)
        self.key = nn.Linear(width, keys, bias=False, **factory_kwargs)
        self.value = nn.Linear(width, width, bias=False, **factory_kwargs)
        self.forget = nn.Sequential(
            nn.Linear(width, spec.rank, bias=False, **factory_kwargs), nn.Linear(spec.rank, keys, **factory_kwargs)
        )
        self.gate = nn.Linear(width, width, bias=False, **factory_kwargs)
        self.norm = nn.RMSNorm(width // spec.num_heads, **factory_kwargs)
        self.leave = nn.Linear(width, width, bias=False, **factory_kwargs)

    def mix(self, x: Tensor, parts: tuple[Tensor, ...] | None, steps: Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert isinstance(self.spec, GatedLinearAttention)
        heads = (self.spec.num_heads, -1)
        query, key, value = (part(x).unflatten(-1, heads) for part in (self.query, self.key, self.value))
        decay = (functional.logsigmoid(self.forget(x)) / SLOWNESS).exp().unflatten(-1, heads)
        before = None if parts is None else parts[0]
        read, state = scan_fast_weights(query * query.shape[-1] ** -0.5, key, value, before, steps, decay=decay)
        outputs: Tensor = self.leave((self.norm(read).flatten(-2) * functional.silu(self.gate(x))).to(x.dtype))
        return outputs, (state,)
