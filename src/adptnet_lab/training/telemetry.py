"""What the layers are like while they learn: timescales, β, how their states were found, exponents."""

from typing import Any

import torch
from torch import nn

from adptnet.analysis import captured, lyapunov_exponents
from adptnet.cells import ADPTCell
from adptnet.nn.layer import RecurrentLayer
from adptnet.solvers import Result, Sequential

from ..tasks import Task

__all__ = ["telemetry"]

SEQUENCES = 4  # of validation data, on which a layer is looked at


@torch.no_grad()
def telemetry(model: nn.Module, task: Task, *, exponents: bool = False) -> dict[str, dict[str, Any]]:
    """Numbers about every recurrent layer of `model`, by name.

    Args:
        model: Looked at on a few sequences of validation data.
        task: Where they come from.
        exponents: Also the Lyapunov exponents, on one sequence. The cost of a step is that of `state_size` steps.
    """
    batch = next(iter(task.evaluation("validation", SEQUENCES, SEQUENCES)))
    device = next(model.parameters()).device
    found = captured(model, batch.inputs.to(device))
    numbers = {}
    for name, (layer, inputs) in found.items():
        numbers[name] = _of_layer(layer)
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


def _of_layer(layer: RecurrentLayer) -> dict[str, Any]:
    if not isinstance(layer.cell, ADPTCell):
        return {}
    logs = layer.cell.spectrum.log_modulus()
    kept = logs[logs.isfinite()]  # an eigenvalue of zero has no logarithm
    spread = {} if not len(kept) else {"log_lambda_min": float(kept.min()), "log_lambda_max": float(kept.max())}
    return {**spread, "beta": layer.cell.beta.report()["used"]}
