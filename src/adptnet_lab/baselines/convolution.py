"""A short causal convolution over each channel."""

import torch
from torch import Tensor, nn

from adptnet._typing import Device, DType
from adptnet.cells.base import positions
from adptnet.nn.mixer import Steps

__all__ = ["ShortConvolution"]


class ShortConvolution(nn.Module):
    """y_t = Σ_j w_j x_{t-j} + b over the last `taps` steps of the sequence."""

    def __init__(self, channels: int, taps: int, *, bias: bool, device: Device, dtype: DType):
        super().__init__()
        reach = taps**-0.5  # as torch starts a convolution
        self.weight = nn.Parameter(torch.empty(channels, taps, device=device, dtype=dtype).uniform_(-reach, reach))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, before: Tensor | None, steps: Steps) -> tuple[Tensor, Tensor]:
        """Outputs, and the last `taps` - 1 inputs of each sequence, (batch, taps - 1, channels)."""
        batch, count, channels = x.shape
        taps = self.weight.shape[1]
        earlier = x.new_zeros(batch, taps - 1, channels) if before is None else before
        whole = torch.cat((earlier, x), 1)
        since = torch.full((batch, count), taps, device=x.device)  # steps back to the beginning, as far as it matters
        if steps.reset is not None:
            since = positions(since[:, 0], count, steps.reset)
        y = torch.zeros_like(x) if self.bias is None else self.bias.expand_as(x)
        for back in range(taps):
            start = taps - 1 - back
            term = whole[:, start : start + count] * self.weight[:, start]
            y = y + (term if steps.reset is None else torch.where((since >= back).unsqueeze(-1), term, 0.0))
        ends = torch.full((batch,), count, device=x.device) if steps.lengths is None else steps.lengths
        offset = torch.arange(taps - 1, device=x.device)
        kept = whole[torch.arange(batch, device=x.device).unsqueeze(-1), ends.unsqueeze(-1) + offset]
        own = steps.last(since).unsqueeze(-1) >= taps - 2 - offset
        return y, torch.where(own.unsqueeze(-1), kept, 0.0)
