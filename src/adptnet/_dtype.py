"""The dtype in which recurrences are computed."""

import torch

__all__ = ["compute_dtype"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a recurrence with parameters or inputs of `dtype` runs: at least float32.

    Args:
        dtype: The dtype of parameters or inputs.
    """
    return torch.promote_types(dtype, torch.float32)
