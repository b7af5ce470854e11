"""`adptnet export RUN FILE`: write a trained model as a program that runs without adptnet."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tyro.conf import Positional

import adptnet
from adptnet._io.files import replace_file
from adptnet.errors import InputError
from adptnet.integrations.streaming import export_step, write_onnx, write_onnx_sequence

from ..training import load_model

__all__ = ["Export", "run"]


@dataclass(frozen=True)
class Export:
    """Write a trained model as a program that runs without adptnet."""

    run: Positional[Path]
    """Folder of the run, or a file that adptnet.save wrote."""
    file: Positional[Path]
    """File to write: step.onnx for ONNX, step.pt2 for torch.export."""
    sequence: bool = False
    """Export whole sequences instead of one step with the state as input and output (ONNX only)."""


def run(options: Export) -> None:
    """Write the file.

    Args:
        options: The options.

    Raises:
        InputError: The file has another suffix, or `sequence` is set for torch.export.
    """
    kind = options.file.suffix
    if kind not in (".onnx", ".pt2"):
        raise InputError(f"{options.file}: the suffix must be .onnx for ONNX or .pt2 for torch.export.")
    if options.sequence and kind == ".pt2":
        raise InputError("--sequence is for ONNX. For torch, call torch.export.export(model, (x,)) in Python.")
    model = (adptnet.load(options.run) if options.run.is_file() else load_model(options.run)).eval()
    if kind == ".onnx":
        (write_onnx_sequence if options.sequence else write_onnx)(model, options.file)
    else:
        program = export_step(model)
        with replace_file(options.file) as draft:
            torch.export.save(program, draft)
    print(f"wrote {options.file} ({options.file.stat().st_size / 1e6:.1f} MB)")
