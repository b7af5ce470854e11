"""One step of a spiking network for other programs: `torch.export` and ONNX, with the state in and out as tensors."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from .._io.files import drafted
from ..errors import IncompatibleError, InputError
from ..nn.layer import RecurrentLayer
from ..nn.spiking import SpikingModel

__all__ = ["StreamingStep", "export_step", "run_onnx", "write_onnx"]


class StreamingStep(nn.Module):
    """`model.step` with its state spelled out: a frame, the states and the position in; the answer and those out.

    Frames are (batch, channels), states (batch, numbers), one for each layer and one for the read-out; the position
    (batch,) counts steps. What it computes is what `model` computes along a whole sequence.
    """

    def __init__(self, model: SpikingModel):
        super().__init__()
        if not isinstance(model, SpikingModel):
            raise InputError(
                f"a streaming step is made of a SpikingModel; got {type(model).__name__}. "
                "Build one with nn.SpikingModelSpec."
            )
        if model.training:
            raise InputError("a batch norm has no statistics of one step. Call model.eval() first.")
        self.model = model

    @property
    def names(self) -> tuple[str, ...]:
        """Of what goes in, in order; what comes out is `output` and these again, with `next_` before the names."""
        states = (f"state_{i}" for i in range(len(self.model.layers) + 1))
        return "frame", *states, "position"

    def initial(self, batch: int = 1) -> tuple[Tensor, ...]:
        """The states and the position before the first frame."""
        layers: list[Any] = [*(layer.neurons for layer in self.model.layers), self.model.integrators]
        states = [layer.initial_state(batch) for layer in layers]
        return *(state.state for state in states), states[0].position

    def forward(self, frame: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        *states, position = carried
        after = []
        for layer, state in zip(self.model.layers, states, strict=False):
            frame, moved = _stepped(layer.neurons, layer.currents(frame), state, position)  # type: ignore[arg-type, operator]
            after.append(moved)
        integrated, moved = _stepped(self.model.integrators, self.model.decoder(frame), states[-1], position)
        answer = integrated.softmax(-1) if self.model.spec.readout == "softmax" else integrated
        return answer, *after, moved, position + 1


def _stepped(layer: RecurrentLayer, x: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """One step in plain operations: a fused one would be unknown elsewhere."""
    drive = layer.cell.prepare(x.to(state.dtype).unsqueeze(-2), position.unsqueeze(-1)).squeeze(-2)
    after = layer.cell.step(state, drive)
    shown = layer.cell.output(after)
    return (shown if layer.readout is None else layer.readout(shown)).to(x.dtype), after


def export_step(model: SpikingModel) -> torch.export.ExportedProgram:
    """A step as a `torch.export` program for any number of sequences, called as `StreamingStep` is.

    `torch.export.save(export_step(model), "step.pt2")` writes it; no adptnet is needed to run it.
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
    """Writes a step as an ONNX file, whole or not at all: pip install 'adptnet[onnx]'.

    Inputs and outputs have the names of `StreamingStep.names`; the first states are zeros.
    """
    _needed("onnx", "onnxscript")
    if any(getattr(module, "initial", "zero") != "zero" for module in model.modules()):
        raise IncompatibleError('write_onnx: the neurons start at initial="uniform". Build them with initial="zero".')
    step = StreamingStep(model)
    names = step.names
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)  # it tells of other libraries that are not there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
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
    with drafted(path) as draft:
        program.save(str(draft), external_data=False)


def run_onnx(path: str | Path, frames: npt.ArrayLike) -> npt.NDArray[np.floating]:
    """The answers at every step, (batch, time, classes), to frames (batch, time, channels): for checking an export."""
    runtime = _needed("onnxruntime")
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


def _needed(*names: str) -> Any:
    """The last of the modules; says how to get them if one is not there."""
    import importlib

    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            raise InputError(f"ONNX needs {name}: pip install 'adptnet[onnx]'.") from None
    return module
