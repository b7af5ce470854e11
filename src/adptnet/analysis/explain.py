"""Explanation of a call of a layer: which programs run, why, and what would make the call faster."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._dtype import compute_dtype
from ..cells.structure import choose_scan
from ..errors import InputError
from ..nn.layer import RecurrentLayer
from ..nn.short_calls import MAX_STEPS, find_prepared
from ..ops._backends import CPU, REFERENCE, Backend, Run, record_runs
from ..solvers import Auto, Sequential, Solver

__all__ = ["Explanation", "Program", "explain"]

_SCAN = {
    "adpt_layer": "one compiled C++ call of the whole layer (ops/adpt_layer)",
    "cpu": "one compiled C++ operation for all steps (ops/adpt_scan)",
    "triton": "one Triton kernel for all steps (ops/adpt_scan)",
    "linear_scan": "one linear scan over all steps (ops/linear_scan)",
    "torch": "a recurrent layer of torch.nn",
    "scan": "scan() of the cell",
    "meta": "no program: only shapes are computed",
    REFERENCE: "a loop over time in eager PyTorch",
}
_TEXTS = {
    "forward": _SCAN,
    "backward": {
        **_SCAN,
        "implicit": "a linear recurrence backwards in time, linearized at the solution",
        "autograd": "autograd, through the operations of the forward pass",
        REFERENCE: "autograd, through a loop over time in eager PyTorch",
    },
    "iteration": {
        "cpu": "one compiled C++ pass over time (ops/adpt_step)",
        REFERENCE: "eager PyTorch: the step at all times in parallel, then a scan over time",
    },
    "jacobian": {
        "cpu": "a compiled C++ operation (ops/adpt_step)",
        "closed form": "a closed form in eager PyTorch",
        REFERENCE: "torch.func in eager PyTorch",
    },
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that runs a part of a call.

    Attributes:
        name: The backend: "cpu" (C++), "adpt_layer" (C++, the whole layer), "triton", "linear_scan", "torch",
            "parallel" (a parallel solver), "reference" (eager PyTorch) and others.
        description: What it is, in words.
        reason: Why it runs.
    """

    name: str
    description: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The programs of a call; printing lists them.

    Attributes:
        call: The layer and its input.
        programs: By part of the call: "forward", "backward", "iteration" (of a parallel solver) and "jacobian" (of its
            linearization). Parts that did not run are missing.
        advice: What would make the call faster; empty if nothing is known.
    """

    call: str
    programs: dict[str, Program]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.call]
        for part, program in self.programs.items():
            lines += [f"  {part:10} {program.description}", f"  {'':10} because {program.reason}"]
        for i, advice in enumerate(self.advice or ("No faster way is known.",)):
            lines.append(f"  {'' if i else 'faster':10} {advice}")
        return "\n".join(lines)


def explain(layer: RecurrentLayer, x: Tensor, **call: Any) -> Explanation:
    """Run a layer once and return which programs ran, why, and what would make the call faster.

    If an output requires a gradient, the backward pass runs too; gradients are not accumulated. Call it under
    `torch.no_grad()` for inference.

    Args:
        layer: An `ADPTNet` or another recurrent layer.
        x: Inputs as for `layer`, padded.
        call: Further arguments of the call, such as `solver`, `adjoint`, `lengths` or `dt`.

    Returns:
        The explanation. Print it, or read its attributes.

    Raises:
        InputError: `layer` is not a recurrent layer, or `x` is not a tensor.
    """
    if not isinstance(layer, RecurrentLayer):
        raise InputError(
            f"explain takes one recurrent layer; got {type(layer).__name__}. Pass one of the layers of a model, "
            "e.g. explain(model.layers[0], x)."
        )
    if not isinstance(x, Tensor):
        raise InputError(f"explain takes a padded tensor x; got {type(x).__name__}. Pass lengths= for ragged batches.")
    with torch.random.fork_rng(devices=[]), record_runs() as runs:
        outputs, _ = layer(x, **call)
        required = [t for t in (x, *layer.parameters()) if t.requires_grad]
        if outputs.requires_grad:
            torch.autograd.grad(outputs.sum(), required, allow_unused=True)
    solver = call.get("solver") or layer.solver
    programs = _describe_programs(runs, solver, outputs.requires_grad)
    mode = "with gradients" if outputs.requires_grad else "without gradients"
    internal = compute_dtype(x.dtype)
    dtypes = str(x.dtype) if internal == x.dtype else f"{x.dtype}, recurrence in {internal}"
    title = f"{type(layer).__name__}, x of shape {tuple(x.shape)} on {x.device}, {dtypes}, {mode}:"
    return Explanation(title, programs, tuple(_advise(layer, x, call, runs)))


def _last(runs: Sequence[Run], phase: str) -> Backend | None:
    return next((run.backend for run in reversed(runs) if run.phase == phase), None)


def _describe_programs(runs: Sequence[Run], solver: Solver, has_gradient: bool) -> dict[str, Program]:
    chosen, iteration = _last(runs, "solver"), _last(runs, "iteration")
    programs = {}
    if iteration is not None:
        name = repr(solver) if chosen is None else chosen.name
        reason = "it is the solver of this call." if chosen is None else f"Auto chose it. {chosen.reason}"
        programs["forward"] = Program("parallel", f"{name}, in parallel over time", reason)
    phases = ["iteration", "jacobian"] if iteration is not None else ["forward"]
    for phase in phases:
        backends = [run.backend for run in runs if run.phase == phase]
        if backends:
            programs[phase] = _describe(phase, backends)
    if "forward" not in programs:
        programs["forward"] = _describe("forward", [Backend("scan", "the cell has a scan() of its own.")])
    if has_gradient:
        backends = [run.backend for run in runs if run.phase == "backward"]
        programs["backward"] = _describe(
            "backward",
            backends or [Backend("autograd", "torch has a derivative of each operation of the forward pass.")],
        )
    return programs


def _describe(phase: str, backends: Sequence[Backend]) -> Program:
    """Describe the last of the programs that were tried, with the reasons why the others did not run."""
    last = backends[-1]
    reasons = dict.fromkeys(backend.reason for backend in reversed(backends))
    return Program(last.name, _TEXTS[phase].get(last.name, last.name), " Also, ".join(reasons))


def _advise(layer: RecurrentLayer, x: Tensor, call: dict[str, Any], runs: Sequence[Run]) -> list[str]:
    solver = call.get("solver") or layer.solver
    # Only a cell with a fused Newton pass has something to gain from a solver that can use it.
    fused = layer.cell.structure().newton_pass is not None
    slow = [run for run in runs if not run.backend.is_kernel and (fused or run.phase != "iteration")]
    advice = [run.backend.advice for run in slow if run.backend.advice]
    batch = x.shape[0 if layer.batch_first else 1] if x.dim() == 3 else 1
    steps = x.shape[1 if layer.batch_first else 0] if x.dim() == 3 else x.shape[0]
    forward = _last(runs, "forward")
    if steps <= MAX_STEPS and not call and forward == CPU and isinstance(reason := find_prepared(layer), str):
        advice.append(f"A short call takes longer than its steps here: {reason}. Run more steps in one call.")
    if _last(runs, "iteration") is not None:
        if choose_scan(layer.cell, x.device).is_kernel:
            advice.insert(0, "Use solver=solvers.Sequential(): one operation runs all steps of this cell.")
    elif forward is not None and not forward.is_kernel and isinstance(solver, Sequential):
        choice = Auto().choose(layer.cell, batch, steps, x.device)
        if not isinstance(choice.solver, Sequential):
            advice.append(f"Use solver=solvers.Auto(), which chooses {choice.solver}: {choice.reason}")
    return list(dict.fromkeys(advice))
