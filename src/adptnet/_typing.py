"""Type aliases for the tensor shapes in signatures.

Time is dimension -2 and state is dimension -1 everywhere; `*b` is any number of leading dimensions. At run time the
aliases are plain tensors. The test suite imports jaxtyping before this module, which checks them at every call.
"""

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

__all__ = ["Column", "DType", "Device", "Matrix", "Position", "Positions", "Vector"]

Device = torch.device | str | None  # type of factory arguments; None is the default of torch
DType = torch.dtype | None

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Float, Int

    Column = Float[Tensor, "*b 1"]  # one value per vector
    Vector = Float[Tensor, "*b n"]  # a state, a key, a drive at one step
    Matrix = Float[Tensor, "*b n n"]
    Positions = Int[Tensor, "*b t"]  # steps since the sequence began, at every step
    Position = Int[Tensor, "*b"]
else:
    Column = Vector = Matrix = Positions = Position = Tensor
