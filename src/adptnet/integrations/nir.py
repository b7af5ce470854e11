"""Exact export to NIR, the neuromorphic intermediate representation.

NIR has leaky integrators, thresholds and linear maps in continuous time; it has no product of two signals. So it cannot
express a state-dependent rotation (β ≠ 0) or a reset by subtraction. Exact means: with steps of `dt`, the input held
constant during each, and the feedback of a slow memory delayed by one step, the graph gives the same spikes.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .._io.files import replace_file
from ..cells import SpikingADPT, SpikingADPTCell
from ..cells.coupled import CoupledCell
from ..cells.spiking import LIFCell, Sigmoid
from ..cells.structure import find_eigenvalues
from ..errors import IncompatibleError, InputError
from ..nn.block import Norm
from ..nn.spiking_model import SpikingModel
from ..recurrence.conjugates import Diagonal
from ..recurrence.projections import Projection
from ..recurrence.projections.base import Biased

__all__ = ["run_nir", "to_nir", "write_nir"]


def to_nir(model: SpikingModel, *, dt: float, allow_approximation: bool = False) -> Any:
    """Return the network as a NIR graph: maps with folded batch norms, membranes, thresholds, integrators.

    The softmax and its sum over time are not part of the graph.

    Args:
        model: A network of `LIF` neurons with reset "zero" or "none", or of SpikingADPTNet's neurons at β = 0, without
            reset and adaptation.
        dt: Seconds per step; NIR's time constants are in seconds.
        allow_approximation: Export SpikingADPTNet with β ≠ 0 as if β were 0. The metadata then hold β, K and V, which
            other programs do not read.

    Raises:
        IncompatibleError: The network has no exact form in NIR.
    """
    if not isinstance(model, SpikingModel):
        raise InputError(
            f"to_nir takes a SpikingModel; got {type(model).__name__}. Build one with nn.SpikingModelSpec."
        )
    if not (math.isfinite(dt) and dt > 0):
        raise InputError(f"to_nir(dt={dt}): must be a positive number of seconds, 0.004 for frames of 4 ms.")
    nir = _import_nir()
    with torch.no_grad():
        nodes: dict[str, Any] = {"input": nir.Input({"input": np.array([model.spec.input_size])})}
        edges: list[tuple[str, str]] = []
        metadata: dict[str, Any] = {"dt": dt, "delayed_edges": "feedback"}
        before = "input"
        for i, layer in enumerate(model.layers):
            currents: Any = layer.currents
            nodes[f"currents{i}"] = _make_affine(nir, currents.projection, currents.norm)
            edges.append((before, f"currents{i}"))
            before = _add_neurons(nir, nodes, edges, metadata, i, layer.neurons.cell, dt, allow_approximation)  # type: ignore[union-attr]
        nodes["decoder"] = _make_affine(nir, model.decoder.projection, model.decoder.norm)
        decay: Any = find_eigenvalues(model.integrators.cell)
        nodes["integrators"] = _make_integrator(nir, decay.real, torch.ones_like(decay.real), dt)
        nodes["output"] = nir.Output({"output": np.array([model.spec.output_size])})
        edges += [(before, "decoder"), ("decoder", "integrators"), ("integrators", "output")]
    return nir.NIRGraph(nodes, edges, metadata=metadata)


def write_nir(graph: Any, path: str | Path) -> None:
    """Write a graph to a file, atomically.

    Args:
        graph: A graph from `to_nir`.
        path: The file.
    """
    with replace_file(Path(path)) as draft:
        _import_nir().write(draft, graph)


def run_nir(graph: Any, frames: Any, *, dt: float | None = None) -> dict[str, Any]:
    """Compute the output of every node as an exact backend does, to check an export.

    Args:
        graph: A graph from `to_nir`, or one read from a file.
        frames: One sequence, (time, features), or a batch of them, (batch, time, features).
        dt: Seconds per step; the graph's own by default.

    Returns:
        Arrays with the leading dimensions of `frames`, by the name of the node.

    Raises:
        InputError: `frames` has another shape.
    """
    given = np.asarray(frames, np.float64)
    entry = next(node for node in graph.nodes.values() if isinstance(node, _import_nir().Input))
    features = int(np.prod(entry.input_type["input"]))
    if given.ndim not in (2, 3) or given.shape[-1] != features or not given.size:
        raise InputError(
            f"run_nir takes frames of shape (time, {features}) or (batch, time, {features}), at least one of them; got "
            f"shape {given.shape}."
        )
    if given.ndim == 2:
        return _run_sequence(graph, given, dt)
    each = [_run_sequence(graph, sequence, dt) for sequence in given]
    return {name: np.stack([outputs[name] for outputs in each]) for name in each[0]}


def _run_sequence(graph: Any, frames: Any, dt: float | None) -> dict[str, Any]:
    """Return the output of every node, (time, features), for one sequence."""
    nir = _import_nir()
    dt = float(graph.metadata["dt"]) if dt is None else dt
    order = _sort_nodes(graph)
    known: dict[str, Any] = dict.fromkeys(graph.nodes)
    potential: dict[str, Any] = {}
    shown: dict[str, list[Any]] = {name: [] for name in graph.nodes}
    for frame in frames:
        for name in order:
            node = graph.nodes[name]
            arriving = [known[a] for a, b in graph.edges if b == name and known[a] is not None]
            given = frame if isinstance(node, nir.Input) else sum(arriving)
            if isinstance(node, (nir.Affine, nir.Linear)):
                known[name] = node.weight @ given + getattr(node, "bias", 0.0)
            elif isinstance(node, (nir.LI, nir.LIF)):
                kept = np.exp(-dt / node.tau)
                v = kept * potential.get(name, 0.0) + (1 - kept) * (node.v_leak + node.r * given)
                if isinstance(node, nir.LIF):
                    known[name] = (v >= node.v_threshold).astype(np.float64)
                    v = np.where(known[name] > 0, node.v_reset, v)
                else:
                    known[name] = v
                potential[name] = v
            elif isinstance(node, nir.Threshold):
                known[name] = (given >= node.threshold).astype(np.float64)
            else:
                known[name] = given
            shown[name].append(known[name])
    return {name: np.stack(values) for name, values in shown.items()}


def _sort_nodes(graph: Any) -> list[str]:
    """Return the nodes in an order in which each follows its inputs of the same step; feedback arrives a step later."""
    left = dict.fromkeys(graph.nodes)
    order: list[str] = []
    while left:
        ready = next(
            name for name in left if all(a in order or a.startswith("feedback") for a, b in graph.edges if b == name)
        )
        order.append(ready)
        del left[ready]
    return order


def _add_neurons(
    nir: Any,
    nodes: dict[str, Any],
    edges: list[tuple[str, str]],
    metadata: dict[str, Any],
    i: int,
    cell: Any,
    dt: float,
    allow_approximation: bool,
) -> str:
    """Add the neurons of layer `i`, and return the node whose spikes are the input of the next layer."""
    if isinstance(getattr(cell, "spike", None), Sigmoid):
        raise IncompatibleError(
            f"layer {i}: Sigmoid() is not a threshold, as NIR needs. Continue training with spike=Boxcar()."
        )
    if getattr(cell, "initial", "zero") != "zero":
        raise IncompatibleError(f'layer {i}: the neurons start at initial="uniform", NIR at 0. Build them with "zero".')
    if isinstance(cell, LIFCell):
        spec, decay = cell.spec, cell.decay()
        if spec.recurrent is not None or spec.reset not in ("zero", "none"):
            raise IncompatibleError(
                f"layer {i}: NIR resets to a value, and this export supports no recurrent map; the neuron is {spec}. "
                "Train with LIF(n, reset='zero') or reset='none' and no recurrent=."
            )
        threshold = np.full(spec.width, spec.threshold)
        if spec.reset == "zero":
            zeros, ones = np.zeros(spec.width), np.ones(spec.width)
            tau = (-dt / decay.double().log()).numpy()
            nodes[f"spikes{i}"] = nir.LIF(tau=tau, r=ones, v_leak=zeros, v_threshold=threshold, v_reset=zeros)
            edges.append((f"currents{i}", f"spikes{i}"))
            return f"spikes{i}"
        nodes[f"membrane{i}"] = _make_integrator(nir, decay, torch.ones_like(decay), dt)
    elif isinstance(cell, SpikingADPTCell):
        metadata.update(_check_expressible(i, cell.spec, cell, allow_approximation))
        fast = cell.inner.fast if isinstance(cell.inner, CoupledCell) else cell.inner
        decay = fast.spectrum().real
        gain = fast.drive.gain(fast.spectrum).real
        nodes[f"membrane{i}"] = _make_integrator(nir, decay, gain.double() / (1 - decay.double()), dt)
        threshold = np.full(len(decay), cell.spec.threshold)
        into = fast.drive.input_projection
        folded = nodes[f"currents{i}"]
        weight = into.dense().double().numpy()
        bias = into.bias.double().numpy() if isinstance(into, Biased) else 0.0
        nodes[f"currents{i}"] = nir.Affine(weight @ folded.weight, weight @ folded.bias + bias)
        if isinstance(cell.inner, CoupledCell):
            slow: Any = cell.inner.slow().real
            nodes[f"memory{i}"] = _make_integrator(nir, slow, torch.ones_like(slow), dt)
            nodes[f"feedback{i}"] = nir.Linear(torch.diag(cell.inner.feedback).double().numpy())
            edges.append((f"membrane{i}", f"memory{i}"))
            edges.append((f"memory{i}", f"feedback{i}"))
            edges.append((f"feedback{i}", f"membrane{i}"))
    else:
        raise IncompatibleError(
            f"layer {i}: {type(cell).__name__} has no exact form in NIR. Export LIF neurons with reset 'zero' or "
            "'none', or SpikingADPTNet's at beta=0."
        )
    nodes[f"spikes{i}"] = nir.Threshold(threshold)
    edges += [(f"currents{i}", f"membrane{i}"), (f"membrane{i}", f"spikes{i}")]
    return f"spikes{i}"


def _check_expressible(i: int, spec: SpikingADPT, cell: SpikingADPTCell, allow_approximation: bool) -> dict[str, Any]:
    """Raise `IncompatibleError` if NIR cannot express a cell; return metadata of what an approximation leaves out."""
    axes = spec.cell
    reasons = {
        "spike_reset": spec.reset != "none",
        "spike_adaptation": spec.adaptation,
        "a complex spectrum": axes.spectrum.is_complex,
        "negative eigenvalues": axes.spectrum.has_negative,
        "a gate": axes.gate is not None,
        "rope": axes.rope is not None,
        "phase": axes.phase is not None,
        "start": axes.start,
    }
    for reason, holds in reasons.items():
        if holds:
            raise IncompatibleError(f"layer {i}: NIR cannot express {reason}. Build the network without it.")
    fast = cell.inner.fast if isinstance(cell.inner, CoupledCell) else cell.inner
    rotates = not isinstance(axes.conjugate, Diagonal) and max(fast.beta.report()["used"]) > 0
    if not rotates:
        return {}
    if not allow_approximation:
        raise IncompatibleError(
            f"layer {i} has beta={axes.beta}: a state-dependent rotation is a product of signals, which NIR "
            "cannot express. Train with beta=0, or pass allow_approximation=True to write it as if beta were 0."
        )
    plane: Any = fast.directions[0]
    return {
        f"approximation{i}": "beta taken as 0",
        f"beta{i}": np.asarray(fast.beta.report()["used"]),
        f"key{i}": plane.key_projection.dense().numpy(),
        f"value{i}": plane.value_projection.dense().numpy(),
        f"direction{i}": axes.direction.to_json(),
    }


def _make_affine(nir: Any, projection: Projection, norm: Norm) -> Any:
    """Return a projection and the batch norm after it, in evaluation mode, as one affine map."""
    batch = norm.norm
    assert isinstance(batch, nn.BatchNorm1d)
    assert batch.running_mean is not None
    assert batch.running_var is not None
    scale = batch.weight.double() / (batch.running_var.double() + batch.eps).sqrt()
    bias = projection.bias.double() if isinstance(projection, Biased) else 0.0
    bias = (bias - batch.running_mean.double()) * scale + batch.bias.double()
    return nir.Affine((scale.unsqueeze(-1) * projection.dense().double()).numpy(), bias.numpy())


def _make_integrator(nir: Any, decay: torch.Tensor, gain: torch.Tensor, dt: float) -> Any:
    tau = -dt / decay.double().log()
    return nir.LI(tau=tau.numpy(), r=gain.double().numpy(), v_leak=np.zeros(len(decay)))


def _import_nir() -> Any:
    try:
        import nir
    except ImportError:
        raise InputError("the export to NIR needs the package nir: pip install 'adptnet[nir]'.") from None
    return nir
