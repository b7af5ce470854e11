"""Files of real recordings and of other programs' outputs, in the folder that ADPTNET_DATA names."""

import os
from pathlib import Path

import pytest


def golden(name: str) -> Path:
    """The path of a file; skips the test where it is not at hand."""
    folder = os.environ.get("ADPTNET_DATA")
    if not folder:
        pytest.skip(f"{name}: ADPTNET_DATA names no folder of data")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{name} is not in {folder}")
    return path
