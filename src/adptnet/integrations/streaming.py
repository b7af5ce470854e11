"""Export of one step of a spiking network by `torch.export` or ONNX, with the state as explicit tensors."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from .._io.files import replace_file
from ..errors import IncompatibleError, InputError
from ..nn.layer import RecurrentLayer
from ..nn.spiking_model import SpikingModel

__all__ = ["StreamingStep", "export_step", "run_onnx", "write_onnx"]


class StreamingStep(nn.Module):
    """`model.step` with explicit state tensors: frame, states and position in; output, states and position out.

    Frames are (batch, channels). States are (batch, state_size), one for each layer and one for the read-out. The
    position, (batch,), counts steps. Results equal those of `model` on the whole sequence.

    Args:
        model: The network, in evaluation mode.
    """

    def __init__(self, model: SpikingModel):
        super().__init__()
        if not isinstance(model, SpikingModel):
            raise InputError(
                f"a StreamingStep wraps a SpikingModel; got {type(model).__name__}. Build one with nn.SpikingModelSpec."
            )
        if model.training:
            raise InputError("a batch norm cannot train on one step. Call model.eval() first.")
        self.model = model

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs, in order. The outputs are `output`, then the states and position with prefix `next_`."""
        states = (f"state_{i}" for i in range(len(self.model.layers) + 1))
        return "frame", *states, "position"

    def initial(self, batch: int = 1) -> tuple[Tensor, ...]:
        """Return the states and the position before the first frame, for `batch` sequences.

        Args:
            batch: Number of sequences.
        """
        layers: list[Any] = [*(layer.neurons for layer in self.model.layers), self.model.integrators]
        states = [layer.initial_state(batch) for layer in layers]
        return *(state.state for state in states), states[0].position

    def forward(self, frame: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        """Run one step.

        Args:
            frame: (batch, channels).
            carried: The states and the position.

        Returns:
            The output (batch, classes), the next states and the next position.
        """
        *states, position = carried
        after = []
        for layer, state in zip(self.model.layers, states, strict=False):
            frame, following = _run_step(layer.neurons, layer.currents(frame), state, position)  # type: ignore[arg-type, operator]
            after.append(following)
        integrated, following = _run_step(self.model.integrators, self.model.decoder(frame), states[-1], position)
        answer = integrated.softmax(-1) if self.model.spec.readout == "softmax" else integrated
        return answer, *after, following, position + 1


def _run_step(layer: RecurrentLayer, x: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Run one step in torch operations alone, because other programs do not have the fused ones."""
    drive = layer.cell.prepare(x.to(state.dtype).unsqueeze(-2), position.unsqueeze(-1)).squeeze(-2)
    after = layer.cell.step(state, drive)
    shown = layer.cell.output(after)
    return (shown if layer.readout is None else layer.readout(shown)).to(x.dtype), after


def export_step(model: SpikingModel) -> torch.export.ExportedProgram:
    """Return a step as a `torch.export` program for any batch size, with the call signature of `StreamingStep`.

    `torch.export.save(export_step(model), "step.pt2")` writes it. Running it does not need adptnet.

    Args:
        model: The network, in evaluation mode.
    """
    step = StreamingStep(model)
    like = next(model.parameters())
    frame = torch.zeros(2, model.spec.input_size, dtype=like.dtype, device=like.device)
    carried = step.initial(2)
    batch = torch.export.Dim("batch")
    with torch.no_grad():
        return torch.export.export(
            step, (frame, *carried), dynamic_shapes=({0: batch}, tuple({0: batch} for _ in carried))
        )


def write_onnx(model: SpikingModel, path: str | Path) -> None:
    """Write a step as an ONNX file, atomically. Needs `pip install 'adptnet[onnx]'`.

    Inputs and outputs have the names of `StreamingStep.names`. The initial states are zeros.

    Args:
        model: The network, in evaluation mode.
        path: The file.

    Raises:
        IncompatibleError: The neurons do not start from zero.
        InputError: A package is missing.
    """
    _import_required("onnx", "onnxscript")
    if any(getattr(module, "initial", "zero") != "zero" for module in model.modules()):
        raise IncompatibleError('write_onnx: the neurons start at initial="uniform". Build them with initial="zero".')
    step = StreamingStep(model)
    names = step.names
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)  # it warns of other libraries that are not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about its own code
            warnings.simplefilter("ignore", DeprecationWarning)
            program: Any = torch.onnx.export(
                export_step(model),
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=["output", *(f"next_{name}" for name in names[1:])],
            )
    finally:
        registration.setLevel(level)
    with replace_file(path) as draft:
        program.save(str(draft), external_data=False)


def run_onnx(path: str | Path, frames: npt.ArrayLike) -> npt.NDArray[np.floating]:
    """Run an exported step along sequences, to check an export.

    Args:
        path: The file that `write_onnx` wrote.
        frames: (batch, time, channels).

    Returns:
        The outputs at every step, (batch, time, classes).
    """
    runtime = _import_required("onnxruntime")
    session = runtime.InferenceSession(str(path))
    first, *carried = session.get_inputs()
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
    given = np.asarray(frames, kinds[first.type])
    if given.ndim != 3 or given.shape[-1] != first.shape[-1]:
        raise InputError(f"frames have shape {given.shape}; this network takes (batch, time, {first.shape[-1]}).")
    state = [np.zeros((len(given), *put.shape[1:]), kinds[put.type]) for put in carried]
    answers = []
    for t in range(given.shape[1]):
        feed = {put.name: value for put, value in zip((first, *carried), (given[:, t], *state), strict=True)}
        answer, *state = session.run(None, feed)
        answers.append(answer)
    return np.stack(answers, 1)


def _import_required(*names: str) -> Any:
    """Import the modules and return the last; raise `InputError` with the command that installs a missing one."""
    import importlib

    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            raise InputError(f"ONNX needs {name}: pip install 'adptnet[onnx]'.") from None
    return module
