"""Short causal depthwise convolution."""

import torch
from torch import Tensor, nn

from .._typing import Device, DType
from ..cells.base import count_positions
from .mixer import Steps

__all__ = ["ShortConvolution"]


class ShortConvolution(nn.Module):
    """Causal depthwise convolution y_t = Σ_j w_j x_{t-j} + b over the last `taps` steps of the sequence.

    Args:
        channels: Features in and out.
        taps: Length of the kernel.
        bias: Whether to add b.
        device, dtype: Of the parameters.
    """

    def __init__(self, channels: int, taps: int, *, bias: bool, device: Device, dtype: DType):
        super().__init__()
        bound = taps**-0.5  # the initialization of torch.nn.Conv1d
        self.weight = nn.Parameter(torch.empty(channels, taps, device=device, dtype=dtype).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, before: Tensor | None, steps: Steps) -> tuple[Tensor, Tensor]:
        """Convolve `x`.

        Args:
            x: (batch, time, channels).
            before: The last `taps` - 1 inputs of the previous call; None at the beginning.
            steps: Beginnings and ends of the sequences.

        Returns:
            Outputs, and the last `taps` - 1 inputs of each sequence, (batch, taps - 1, channels).
        """
        batch, count, channels = x.shape
        taps = self.weight.shape[1]
        earlier = x.new_zeros(batch, taps - 1, channels) if before is None else before
        whole = torch.cat((earlier, x), 1)
        since = torch.full((batch, count), taps, device=x.device)  # steps since the beginning, capped at `taps`
        if steps.reset is not None:
            since = count_positions(since[:, 0], count, steps.reset)
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
