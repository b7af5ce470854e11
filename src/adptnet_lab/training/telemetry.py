"""Telemetry: statistics of the recurrent layers during training."""

from typing import Any

import torch
from torch import nn

from adptnet.analysis import lyapunov_exponents, record_layer_inputs
from adptnet.cells import ADPTCell
from adptnet.nn.layer import RecurrentLayer
from adptnet.solvers import Result, Sequential

from ..tasks import Task

__all__ = ["collect_telemetry"]

SEQUENCES = 4  # of validation data, on which layers are measured


@torch.no_grad()
def collect_telemetry(model: nn.Module, task: Task, *, exponents: bool = False) -> dict[str, dict[str, Any]]:
    """Return timescales, β and solver statistics of every recurrent layer, by its name.

    Args:
        model: Run on a few sequences of validation data.
        task: The source of the sequences.
        exponents: Also measure the Lyapunov exponents, on one sequence. Each of its steps costs as much as
            `state_size` steps of the layer.

    Returns:
        For an ADPT cell `log_lambda_min`, `log_lambda_max` and `beta`; for a parallel solver `iterations` (the mean),
        `most_iterations` and `fallbacks` to the sequential loop; `exponents` if requested.
    """
    batch = next(iter(task.evaluation("validation", SEQUENCES, SEQUENCES)))
    device = next(model.parameters()).device
    numbers = {}
    for name, (layer, inputs) in record_layer_inputs(model, batch.inputs.to(device)).items():
        numbers[name] = _describe_cell(layer)
        if not isinstance(layer.solver, Sequential):
            solution = layer.solve(inputs)
            numbers[name] |= {
                "iterations": float(solution.iterations.double().mean()),
                "most_iterations": int(solution.iterations.max()),
                "fallbacks": int((solution.results == Result.FINISHED).sum()),
            }
        if exponents:
            numbers[name]["exponents"] = lyapunov_exponents(layer, inputs[:1]).exponents.reshape(-1).tolist()
    return numbers


def _describe_cell(layer: RecurrentLayer) -> dict[str, Any]:
    if not isinstance(layer.cell, ADPTCell):
        return {}
    logs = layer.cell.spectrum.log_modulus()
    kept = logs[logs.isfinite()]  # an eigenvalue of zero has no logarithm
    spread = {} if not len(kept) else {"log_lambda_min": float(kept.min()), "log_lambda_max": float(kept.max())}
    return {**spread, "beta": layer.cell.beta.report()["used"]}
