"""β, the one dial of the non-linearity: a fixed number, or a trainable one with a range."""

import math

import torch
from torch import Tensor, nn

from .errors import SpecError
from .marks import NoDecay
from .spec import Spec, check_nonnegative, spec

__all__ = ["Beta", "TrainableBeta"]


@spec
class TrainableBeta(Spec):
    """A β that learns. The value used is clipped to [minimum, maximum]; the parameter itself may lie outside.

    The gradient passes the clip unchanged, so that a β outside the range can come back.
    """

    initial: float = 0.125
    minimum: float = 0.0
    maximum: float | None = None

    def __post_init__(self) -> None:
        check_nonnegative(self, initial=self.initial, minimum=self.minimum)
        if self.maximum is not None:
            check_nonnegative(self, maximum=self.maximum)
        if not self.minimum <= self.initial <= (math.inf if self.maximum is None else self.maximum):
            raise SpecError(
                f"{self}: needs minimum <= initial <= maximum. Pass minimum=0.0, maximum=None for no range."
            )


class Beta(NoDecay):
    """The β of a cell. Calling it gives the value in use; `parameter` is the raw one, or None when fixed."""

    def __init__(
        self,
        value: float | TrainableBeta,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.value = value
        self.parameter: nn.Parameter | None = None
        if isinstance(value, TrainableBeta):
            self.parameter = nn.Parameter(torch.tensor(float(value.initial), device=device, dtype=dtype))

    def forward(self) -> float | Tensor:
        if isinstance(self.value, TrainableBeta) and self.parameter is not None:
            raw = self.parameter
            return raw + (raw.clamp(self.value.minimum, self.value.maximum) - raw).detach()
        assert isinstance(self.value, (int, float))
        return float(self.value)

    def extra_repr(self) -> str:
        return repr(self.value)
