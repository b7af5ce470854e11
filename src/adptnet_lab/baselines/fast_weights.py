"""Fast weights: a matrix-valued state with one write and one read per step."""

import torch
from torch import Tensor

from adptnet._dtype import compute_dtype
from adptnet.nn.mixer import Steps

__all__ = ["scan_fast_weights"]


def scan_fast_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: Tensor | None,
    steps: Steps,
    *,
    decay: Tensor | None = None,
    strength: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run S_t = D_t S_{t-1} + k_t v_t', or the delta rule if a strength β is given, and y_t = S_t' q_t (eq:delta_rule).

    The delta rule writes the difference from the stored value: S_t = F_t + β_t k_t (v_t - F_t' k_t)' with
    F_t = D_t S_{t-1}.

    Args:
        query, key: (batch, time, heads, keys).
        value: (batch, time, heads, values).
        before: S at the end of the previous call, (batch, heads, keys, values); zero by default.
        steps: Beginnings and ends of the sequences.
        decay: D_t, (batch, time, heads, keys or 1); no decay by default.
        strength: β_t, (batch, time, heads).

    Returns:
        Outputs (batch, time, heads, values), and S at the end of each sequence, in float32 or wider.
    """
    narrow, wide = value.dtype, compute_dtype(value.dtype)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    decay, strength = (None if part is None else part.to(wide) for part in (decay, strength))
    state = before if before is not None else torch.zeros_like(key[:, 0].unsqueeze(-1) * value[:, 0].unsqueeze(-2))
    outputs = []
    for t in range(query.shape[1]):
        matrix = state if steps.reset is None else torch.where(steps.reset[:, t, None, None, None], 0.0, state)
        matrix = matrix if decay is None else matrix * decay[:, t].unsqueeze(-1)
        written = value[:, t]
        if strength is not None:
            stored = (matrix * key[:, t].unsqueeze(-1)).sum(-2)
            written = strength[:, t].unsqueeze(-1) * (written - stored)
        matrix = matrix + key[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append((matrix * query[:, t].unsqueeze(-1)).sum(-2))
        state = matrix if steps.inside is None else torch.where(steps.inside[:, t, None, None, None], matrix, state)
    return torch.stack(outputs, 1).to(narrow), state
