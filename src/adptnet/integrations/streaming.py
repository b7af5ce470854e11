"""Export of layers and models by `torch.export` or ONNX, one step at a time or along whole sequences.

The state is explicit: inputs of a step are the inputs of the model, the states and the position; its outputs are the
outputs, the next states and the next position. Exported programs consist of standard operations and do not need
adptnet.
"""

import logging
import operator
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._io.files import replace_file
from ..errors import IncompatibleError, InputError
from ..nn.spiking_model import SpikingModel

__all__ = ["StreamingStep", "export_step", "run_onnx", "write_onnx", "write_onnx_sequence"]


class StreamingStep(nn.Module):
    """`model.step` with explicit state tensors: input, states and position in; output, states and position out.

    Inputs are (batch, features), or (batch,) tokens. States are (batch, ...), one or more for each layer. The position,
    (batch,), counts steps. Results equal those of `model` on the whole sequence.

    Args:
        model: A layer, block, stack, `SequenceModel` or `SpikingModel`, in evaluation mode.

    Raises:
        InputError: The model has no step: it is bidirectional, has the head "mean", or is not of this package.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        if not hasattr(model, "step") or not hasattr(model, "initial_state"):
            raise InputError(
                f"a StreamingStep wraps a layer or model that has step() and initial_state(); got "
                f"{type(model).__name__}. Build it with ADPTNet, Recurrent, Stack, SequenceModel or SpikingModel."
            )
        if model.training:
            raise InputError("dropout and batch norms depend on the mode. Call model.eval() first.")
        self.model: Any = model
        template = model.initial_state(2)  # type: ignore[operator]
        leaves, self._structure = pytree.tree_flatten(template)
        self._is_position = [not leaf.is_floating_point() for leaf in leaves]  # equal in all layers
        with torch.no_grad():
            model.step(self.example(2), template)  # type: ignore[operator]  # raises if the model has no step

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs, in order. The outputs are `output`, then the states and position with prefix `next_`."""
        count = len(self._is_position) - sum(self._is_position)
        return "input", *(f"state_{i}" for i in range(count)), "position"

    def example(self, batch: int) -> Tensor:
        """Return inputs of the right shape and dtype.

        Args:
            batch: Number of sequences.
        """
        spec: Any = getattr(self.model, "spec", None)
        like = next(self.model.parameters())
        if getattr(spec, "vocabulary", None) is not None:
            return torch.zeros(batch, dtype=torch.int64, device=like.device)
        features = getattr(spec, "input_size", None) or getattr(self.model, "width", None) or spec.width
        return torch.zeros(batch, features, dtype=like.dtype, device=like.device)

    def initial(self, batch: int = 1) -> tuple[Tensor, ...]:
        """Return the states and the position before the first step.

        Args:
            batch: Number of sequences.
        """
        return self._flatten(self.model.initial_state(batch))

    def forward(self, x: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        """Run one step.

        Args:
            x: (batch, features) or (batch,) tokens.
            carried: The states and the position.

        Returns:
            The output, the next states and the next position.
        """
        states, position = iter(carried[:-1]), carried[-1]
        leaves = [position if is_position else next(states) for is_position in self._is_position]
        output, after = self.model.step(x, pytree.tree_unflatten(leaves, self._structure))
        return output, *self._flatten(after)

    def _flatten(self, state: Any) -> tuple[Tensor, ...]:
        leaves = list(zip(pytree.tree_leaves(state), self._is_position, strict=True))
        position = next(leaf for leaf, is_position in leaves if is_position)
        return *(leaf for leaf, is_position in leaves if not is_position), position


def export_step(model: nn.Module) -> torch.export.ExportedProgram:
    """Return a step as a `torch.export` program for any batch size, with the call signature of `StreamingStep`.

    `torch.export.save(export_step(model), "step.pt2")` writes it. Running it does not need adptnet.

    Args:
        model: A model that `StreamingStep` accepts.
    """
    step = StreamingStep(model)
    return _export(step, step)


def write_onnx(model: nn.Module, path: str | Path) -> None:
    """Write a step as an ONNX file, atomically. Needs `pip install 'adptnet[onnx]'`.

    Inputs and outputs have the names of `StreamingStep.names`. The initial states are zeros.

    Args:
        model: A model that `StreamingStep` accepts.
        path: The file.

    Raises:
        IncompatibleError: The initial state is not zero.
        InputError: A package is missing.
    """
    _save(_convert(model), path)


def write_onnx_sequence(model: nn.Module, path: str | Path) -> None:
    """Write a model along whole sequences as an ONNX file, atomically: one `Scan` over its step.

    The input is (batch, time, features) or (batch, time) tokens, the output (batch, time, outputs), for any batch size
    and length. A sequence begins at step 0; for chunks of a longer one, use `write_onnx`.

    Args:
        model: A model that `StreamingStep` accepts.
        path: The file.

    Raises:
        IncompatibleError: The initial state is not zero.
        InputError: A package is missing.
    """
    _save(_scan_over(_convert(model)), path)


def run_onnx(path: str | Path, inputs: npt.ArrayLike) -> npt.NDArray[np.floating]:
    """Run an exported step along sequences, to check an export.

    Args:
        path: The file that `write_onnx` wrote.
        inputs: (batch, time, features), or (batch, time) tokens.

    Returns:
        The outputs at every step, (batch, time, outputs).
    """
    runtime = _import_required("onnxruntime")
    session = runtime.InferenceSession(str(path))
    first, *carried = session.get_inputs()
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
    given = np.asarray(inputs, kinds[first.type])
    expected = first.shape[1:]
    if given.ndim != 2 + len(expected) or list(given.shape[2:]) != expected:
        layout = ", ".join(["batch", "time", *map(str, expected)])
        raise InputError(f"inputs have shape {given.shape}; this step takes ({layout}).")
    state = [np.zeros((len(given), *put.shape[1:]), kinds[put.type]) for put in carried]
    answers = []
    for t in range(given.shape[1]):
        feed = {put.name: value for put, value in zip((first, *carried), (given[:, t], *state), strict=True)}
        answer, *state = session.run(None, feed)
        answers.append(answer)
    return np.stack(answers, 1)


def _convert(model: nn.Module) -> Any:
    """Return a step as a `ModelProto`."""
    _import_required("onnx", "onnxscript")
    step = StreamingStep(model)
    if any(bool(state.count_nonzero()) for state in step.initial(2)):
        hint = 'Build the neurons with initial="zero".' if isinstance(model, SpikingModel) else ""
        raise IncompatibleError(f"an ONNX step starts from zero states, and this model does not. {hint}".rstrip())
    names = step.names
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)  # it warns of other libraries that are not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about its own code
            warnings.simplefilter("ignore", DeprecationWarning)
            program: Any = torch.onnx.export(
                _fold_constants(export_step(model), step).run_decompositions(
                    {torch.ops.aten.softplus.default: _softplus}
                ),
                custom_translation_table={torch.ops.aten.scalar_tensor.default: _translate_scalar()},
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=["output", *(f"next_{name}" for name in names[1:])],
            )
    finally:
        registration.setLevel(level)
    return program.model_proto


def _export(program: nn.Module, step: StreamingStep) -> torch.export.ExportedProgram:
    """Export a program with the call signature of `step`."""
    batch, inputs = torch.export.Dim("batch"), (step.example(2), *step.initial(2))
    shapes: Any = tuple({0: batch} for _ in inputs)
    with torch.no_grad():
        return torch.export.export(
            program, inputs, dynamic_shapes=(shapes[0], shapes[1:]) if program is step else shapes
        )


def _fold_constants(program: torch.export.ExportedProgram, step: StreamingStep) -> torch.export.ExportedProgram:
    """Return a program in which PyTorch has evaluated everything that depends on parameters only.

    The exporter would evaluate it in NumPy, whose exp rounds differently. One unit in the last place of an eigenvalue
    0.9995 moves the state by up to 2,000 units.
    """
    module: Any = program.module(check_guards=False)
    known: dict[Any, Any] = {}
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "get_attr":
                known[node] = operator.attrgetter(node.target)(module)
            elif node.op == "call_function" and all(argument in known for argument in node.all_input_nodes):
                arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*arguments, **named)
    for node, value in known.items():
        if node.op == "call_function" and isinstance(value, Tensor) and not known.keys() >= node.users.keys():
            name = f"folded_{node.name}"
            module.register_buffer(name, value.detach().clone())
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(name))
    for node in reversed(known):
        if not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return _export(module, step)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Return softplus in operations that ONNX Runtime also has for float64; its own `Softplus` is for float32 only."""
    if x.dtype != torch.float64:
        return NotImplemented
    scaled = beta * x
    return (scaled.clamp(min=0) + torch.exp(-scaled.abs()).log1p()) / beta


def _translate_scalar() -> Any:
    """Return the translation of a Python number to ONNX. That of PyTorch rounds it to float32, also for float64."""
    from onnxscript import ir, opset20

    opset: Any = opset20

    def scalar(s: float, dtype: int, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
        return opset.Constant(value=ir.tensor(s, ir.DataType(dtype)))

    return scalar


def _scan_over(step: Any) -> Any:
    """Return a model that runs `step` along the time axis, from states of zero."""
    from onnx import TensorProto, checker, helper

    body, first, carried = step.graph, step.graph.input[0], step.graph.input[1:]
    nodes = [
        helper.make_node("Shape", ["input"], ["batch"], start=0, end=1),
        helper.make_node("Transpose", ["input"], ["by_time"], perm=[1, 0, *range(2, 1 + len(_shape(first)))]),
    ]
    for put in carried:
        kind, sizes = put.type.tensor_type.elem_type, _shape(put)[1:]
        tail = helper.make_tensor(f"sizes_of_{put.name}", TensorProto.INT64, [len(sizes)], sizes)
        zero = helper.make_tensor("zero", kind, [1], [0])
        nodes += [
            helper.make_node("Constant", [], [f"sizes_of_{put.name}"], value=tail),
            helper.make_node("Concat", ["batch", f"sizes_of_{put.name}"], [f"shape_of_{put.name}"], axis=0),
            helper.make_node("ConstantOfShape", [f"shape_of_{put.name}"], [f"initial_{put.name}"], value=zero),
        ]
    order = [*carried, first]
    inner = helper.make_graph(
        list(body.node),
        "step",
        [_copy(put) for put in order],
        [_copy(put) for put in (*body.output[1:], body.output[0])],
    )
    inner.initializer.extend(body.initializer)
    last = _shape(body.output[0])[1:]
    nodes += [
        helper.make_node(
            "Scan",
            [*(f"initial_{put.name}" for put in carried), "by_time"],
            [*(f"final_{put.name}" for put in carried), "outputs_by_time"],
            body=inner,
            num_scan_inputs=1,
        ),
        helper.make_node("Transpose", ["outputs_by_time"], ["output"], perm=[1, 0, *range(2, 2 + len(last))]),
    ]
    graph = helper.make_graph(
        nodes,
        "sequence",
        [
            helper.make_tensor_value_info(
                "input", first.type.tensor_type.elem_type, ["batch", "time", *_shape(first)[1:]]
            )
        ],
        [helper.make_tensor_value_info("output", body.output[0].type.tensor_type.elem_type, ["batch", "time", *last])],
    )
    model = helper.make_model(
        graph, opset_imports=step.opset_import, functions=step.functions, ir_version=step.ir_version
    )
    checker.check_model(model)
    return model


def _shape(put: Any) -> list[Any]:
    return [size.dim_param or size.dim_value for size in put.type.tensor_type.shape.dim]


def _copy(put: Any) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(put.name, put.type.tensor_type.elem_type, _shape(put))


def _save(model: Any, path: str | Path) -> None:
    with replace_file(path) as draft:
        Path(draft).write_bytes(model.SerializeToString())


def _import_required(*names: str) -> Any:
    """Import the modules and return the last; raise `InputError` with the command that installs a missing one."""
    import importlib

    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            raise InputError(f"ONNX needs {name}: pip install 'adptnet[onnx]'.") from None
    return module
