"""Recordings and outputs of reference programs, in the folder that the environment variable ADPTNET_DATA names."""

import os
from pathlib import Path

import pytest


def golden(name: str) -> Path:
    """Return the path of a file; skip the test if the file is not present."""
    folder = os.environ.get("ADPTNET_DATA")
    if not folder:
        pytest.skip(f"{name}: ADPTNET_DATA is not set to a folder of data")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{name} is not in {folder}")
    return path
