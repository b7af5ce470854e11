"""Fast weights: a matrix that is written to and read from at every step."""

import torch
from torch import Tensor

from adptnet.nn.mixer import Steps
from adptnet.recurrence.spectra.base import compute_dtype

__all__ = ["fast_weights"]


def fast_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: Tensor | None,
    steps: Steps,
    *,
    decay: Tensor | None = None,
    strength: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = D_t S_{t-1} + k_t v_t', or with a strength β the delta rule; y_t = S_t' q_t (eq:delta_rule).

    The delta rule writes what is not there yet: S_t = F_t + β_t k_t (v_t - F_t' k_t)' with F_t = D_t S_{t-1}.

    Args:
        query, key: (batch, time, heads, keys).
        value: (batch, time, heads, values).
        before: S as an earlier call left it, (batch, heads, keys, values).
        steps: Where sequences begin and end.
        decay: D_t, (batch, time, heads, keys), or 1 for the last dimension; no decay if not given.
        strength: β_t, (batch, time, heads).

    Returns:
        Outputs (batch, time, heads, values), and S at the true end, which is kept in at least float32.
    """
    narrow, wide = value.dtype, compute_dtype(value.dtype)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    decay, strength = (None if part is None else part.to(wide) for part in (decay, strength))
    state = before if before is not None else torch.zeros_like(key[:, 0].unsqueeze(-1) * value[:, 0].unsqueeze(-2))
    outputs = []
    for t in range(query.shape[1]):
        moved = state if steps.reset is None else torch.where(steps.reset[:, t, None, None, None], 0.0, state)
        moved = moved if decay is None else moved * decay[:, t].unsqueeze(-1)
        written = value[:, t]
        if strength is not None:
            known = (moved * key[:, t].unsqueeze(-1)).sum(-2)
            written = strength[:, t].unsqueeze(-1) * (written - known)
        moved = moved + key[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append((moved * query[:, t].unsqueeze(-1)).sum(-2))
        state = moved if steps.inside is None else torch.where(steps.inside[:, t, None, None, None], moved, state)
    return torch.stack(outputs, 1).to(narrow), state
