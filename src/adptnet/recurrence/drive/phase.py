"""The input-driven phase: a rotation of each pair of state dimensions by an angle that the input sets."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..._typing import Device, DType, Vector
from ...spec import Spec, check_nonnegative, spec
from ..spectra import BlockDiagonal

__all__ = ["InputPhase", "Phase", "unpack_phase"]


@spec
class InputPhase(Spec):
    """Rotates each pair of state dimensions after M by an angle φ = W u + b of the projected input u.

    The step is x_t = P(u_t) M x_{t-1} + drive_t with P = blockdiag R(φ_i). P is orthogonal and does not depend on the
    state, so the timescales and every bound stay as they are (bounds.md, section 3). With real eigenvalues M is
    symmetric and cannot rotate a state on its own.

    Attributes:
        std: Standard deviation of the initial angles, in radians, for inputs u with independent entries of variance 1.
            Near 0, the layer starts as the one without a phase.
    """

    std: float = 0.01

    def __post_init__(self) -> None:
        check_nonnegative(self, std=self.std)

    def build(self, state_size: int, *, device: Device = None, dtype: DType = None) -> "Phase":
        """Build the phase.

        Args:
            state_size: State dimension, even.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """
        return Phase(self, state_size, device, dtype)


class Phase(nn.Module):
    """The angles φ = W u + b of an input-driven phase.

    Args:
        spec: The spec.
        state_size: State dimension n, even.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(self, spec: InputPhase, state_size: int, device: Device, dtype: DType):
        super().__init__()
        pairs = state_size // 2
        weight = torch.empty(pairs, state_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight.normal_(std=spec.std * state_size**-0.5))
        self.bias = nn.Parameter(torch.zeros(pairs, device=device, dtype=dtype))

    def forward(self, u: Vector, dt: Tensor | None = None) -> Vector:
        """Return cos φ and sin φ of each pair, next to each other.

        Args:
            u: The projected input, (*b, n).
            dt: The length of each step, (*b, 1), by which the angles are multiplied; None if all are 1.

        Returns:
            (*b, n), as `unpack_phase` takes it.
        """
        angle = functional.linear(u, self.weight.to(u.dtype), self.bias.to(u.dtype))
        angle = angle if dt is None else angle * dt
        return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)


def unpack_phase(phase: Tensor) -> BlockDiagonal:
    """Return P as blocks [[cos φ, -sin φ], [sin φ, cos φ]].

    Args:
        phase: cos φ and sin φ of each pair, (*b, n).
    """
    cos, sin = phase[..., ::2], phase[..., 1::2]
    return BlockDiagonal(cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1))
