"""β, the strength of the non-linearity: fixed, or trainable within a range; one for all heads, or one per head."""

import math

import torch
from torch import Tensor, nn

from .._typing import Device, DType
from ..errors import SpecError
from ..optim import NoDecay
from ..spec import Spec, check_nonnegative, spec

__all__ = ["Beta", "BetaValue", "TrainableBeta"]


@spec
class TrainableBeta(Spec):
    """A trainable β. The value in use is clipped to [minimum, maximum]; the parameter itself may lie outside.

    Attributes:
        initial: Initial value; a tuple for one β per head.
        minimum: Smallest value used.
        maximum: Largest value used; None for no limit.
        straight_through: Whether the gradient passes through the clip unchanged, so that a β outside the range can
            return to it. If false, the gradient is zero outside the range, as in the paper's program.
    """

    initial: float | tuple[float, ...] = 0.125
    minimum: float = 0.0
    maximum: float | None = None
    straight_through: bool = True

    def __post_init__(self) -> None:
        check_nonnegative(self, minimum=self.minimum)
        if self.maximum is not None:
            check_nonnegative(self, maximum=self.maximum)
        for value in self.initial if isinstance(self.initial, tuple) else (self.initial,):
            check_nonnegative(self, initial=value)
            if not self.minimum <= value <= (math.inf if self.maximum is None else self.maximum):
                raise SpecError(
                    f"{self}: needs minimum <= initial <= maximum. Pass minimum=0.0, maximum=None for no range."
                )


BetaValue = float | tuple[float, ...] | TrainableBeta


def count_heads(value: BetaValue) -> int | None:
    """Return the number of heads that `value` lists; None if it is one number for all heads.

    Args:
        value: β of a spec.
    """
    numbers = value.initial if isinstance(value, TrainableBeta) else value
    return len(numbers) if isinstance(numbers, tuple) else None


def is_zero(value: BetaValue) -> bool:
    """Return whether β is fixed at zero for every head.

    Args:
        value: β of a spec.
    """
    return not isinstance(value, TrainableBeta) and not any(value if isinstance(value, tuple) else (value,))


class Beta(NoDecay):
    """The β of a cell. A call returns the value in use; `parameter` is the unclipped parameter, or None if β is fixed.

    Args:
        value: A fixed β, a tuple with one per head, or a `TrainableBeta`.
        device: Device of the parameter.
        dtype: Dtype of the parameter.
    """

    def __init__(self, value: BetaValue, *, device: Device = None, dtype: DType = None):
        super().__init__()
        self.value = value
        self.parameter: nn.Parameter | None = None
        if isinstance(value, TrainableBeta):
            dtype = dtype or torch.get_default_dtype()
            self.parameter = nn.Parameter(torch.tensor(value.initial, device=device, dtype=dtype))

    def forward(self, like: Tensor) -> float | Tensor:
        """Return the value in use.

        Args:
            like: A tensor whose dtype and device a fixed tuple of values takes; a parameter takes its dtype.

        Returns:
            A float if β is one fixed number; otherwise a tensor, () for one β and (heads, 1) for one per head.
        """
        if isinstance(self.value, TrainableBeta) and self.parameter is not None:
            raw = self.parameter.to(like.dtype)
            used = raw.clamp(self.value.minimum, self.value.maximum)
            if self.value.straight_through:
                used = used.detach() + (raw - raw.detach())
            return used.reshape(()) if used.numel() == 1 else used.unsqueeze(-1)
        if isinstance(self.value, tuple):
            # Filled on the device: a tensor of the tuple would be copied there, and a GPU would wait for it.
            used = torch.stack([torch.full((), value, dtype=like.dtype, device=like.device) for value in self.value])
            return used.reshape(()) if used.numel() == 1 else used.unsqueeze(-1)
        assert isinstance(self.value, (int, float))
        return float(self.value)

    def report(self) -> dict[str, list[float]]:
        """Return the unclipped values ("raw") and the values in use ("used"), one for each head."""
        raw = self.value if self.parameter is None else self.parameter.detach()
        used = self(torch.zeros((), dtype=torch.float64))
        flat = [torch.as_tensor(v, dtype=torch.float64).detach().reshape(-1).tolist() for v in (raw, used)]
        return {"raw": flat[0], "used": flat[1]}

    def extra_repr(self) -> str:
        return repr(self.value)
