"""Helpers of the kernel tests: subprocesses, random arguments of `adpt_scan`, and facts about GPUs."""

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import adptnet
from adptnet.ops import _build
from adptnet.ops.adpt_scan import Constants, Factors, Form, RetractionKind, Source

SOURCES = Path(_build.__file__).parent
needs_compiler = pytest.mark.skipif(_build.find_compiler() is None, reason="no C++ compiler")

# Shared memory per block of some GPUs, in bytes.
SHARED_MEMORY_PER_BLOCK = {
    "T4": 65536,
    "A100": 166912,
    "RTX 3090": 101376,
    "L4": 101376,
    "H100": 232448,
    "B200": 232448,
    "MI300X": 65536,
}

# Arguments of `make_problem` for every variant of the recurrence.
VARIANTS = {
    "exponential": {"beta": 3.0},
    "cayley": {"retraction": RetractionKind.CAYLEY},
    "taylor one": {"retraction": RetractionKind.TAYLOR_ONE, "beta": 0.1},
    "taylor two": {"retraction": RetractionKind.TAYLOR_TWO, "beta": 0.1},
    "bias": {"bias": True},
    "relu": {"source": Source.RELU},
    "spikes": {"source": Source.SPIKES, "spike_threshold": 0.1},
    "heads": {"heads": 3, "bias": True},
    "fixed dot": {"dot": 0.4, "beta": 2.0},
    "fixed dot and heads": {"dot": -0.9, "heads": 3, "source": Source.RELU},
    "directions in drive": {"directions_in_drive": True},
    "directions in drive, heads": {"directions_in_drive": True, "heads": 3, "rotation_aware": True},
    "beta in drive": {"beta_in_drive": True},
    "rotation-aware": {"rotation_aware": True},
    "slow memory": {"slow_memory": True},
    "slow memory, rotation-aware": {
        "slow_memory": True,
        "rotation_aware": True,
        "retraction": RetractionKind.CAYLEY,
    },
    "diagonal": {"rotates": False},
    "phase": {"phased": True, "beta": 2.0},
    "phase, directions in drive, heads": {"phased": True, "heads": 3, "directions_in_drive": True},
    "phase, rotation-aware": {"phased": True, "rotation_aware": True, "source": Source.RELU, "heads": 2},
    "phase, slow memory": {"phased": True, "slow_memory": True, "retraction": RetractionKind.TAYLOR_TWO, "beta": 0.1},
    "phase, rotation-aware, slow memory": {"phased": True, "rotation_aware": True, "slow_memory": True},
    "phase, beta in drive": {"phased": True, "beta_in_drive": True},
    "phase, diagonal": {"phased": True, "rotates": False},
    "two planes": {"planes": 2, "beta": 3.0},
    "three planes": {"planes": 3, "retraction": RetractionKind.CAYLEY, "bias": True, "source": Source.RELU},
    "two planes, heads, fixed dot": {"planes": 2, "heads": 3, "dot": 0.4, "source": Source.SPIKES},
    "two planes, rotation-aware, slow memory": {"planes": 2, "rotation_aware": True, "slow_memory": True},
    "two planes, directions and beta in drive": {"planes": 2, "directions_in_drive": True, "beta_in_drive": True},
    "two planes, directions in drive, dot": {"planes": 2, "directions_in_drive": True, "dot": -0.4, "heads": 3},
    "two planes, phase, norm": {"planes": 2, "phased": True, "norm_epsilon": 1e-5, "dot": 0.4, "bias": True},
    "two planes, phase, rotation-aware": {"planes": 2, "phased": True, "rotation_aware": True, "beta": 2.0},
    "whole state, heads": {"whole_state": True, "heads": 3, "beta": 2.0},
    "whole state, soft": {"whole_state": True, "softness": 0.5, "bias": True},
    "whole state, soft heads": {"whole_state": True, "softness": 0.3, "heads": 3, "retraction": RetractionKind.CAYLEY},
    "whole state, two planes": {"whole_state": True, "softness": 0.1, "heads": 3, "planes": 2, "bias": True},
    "whole state, rotation-aware, slow memory": {
        "whole_state": True,
        "softness": 0.2,
        "heads": 3,
        "rotation_aware": True,
        "slow_memory": True,
    },
    "whole state, phase": {"whole_state": True, "heads": 2, "phased": True, "softness": 0.2},
    "whole state, phase, rotation-aware": {"whole_state": True, "heads": 3, "phased": True, "rotation_aware": True},
    "whole state, beta in drive": {"whole_state": True, "softness": 0.2, "beta_in_drive": True},
    "norm": {"norm_epsilon": 1e-5, "beta": 2.0},
    "norm, large epsilon": {
        "norm_epsilon": 0.3,
        "bias": True,
        "retraction": RetractionKind.CAYLEY,
        "rotation_aware": True,
    },
    "norm, fixed dot": {"norm_epsilon": 1e-5, "dot": 0.4, "retraction": RetractionKind.TAYLOR_TWO, "beta": 0.1},
    "speech": {"norm_epsilon": 1e-5, "bias": True, "slow_memory": True, "source": Source.RELU, "beta": 0.0125},
    "speech, spikes": {
        "norm_epsilon": 1e-5,
        "bias": True,
        "slow_memory": True,
        "source": Source.SPIKES,
        "spike_threshold": 0.1,
    },
}


def run_python(code, *, timeout=100, **environment):
    """Run a program with kernels enabled and these environment variables; return its stdout and stderr."""
    paths = os.pathsep.join([str(Path(adptnet.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "ADPTNET_BACKEND": "auto", "TRITON_INTERPRET": "0", **environment}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@contextmanager
def use_threads(count):
    """Run the `with` block with this many torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_problem(
    batch, steps, size, *, heads=1, pairs=False, bias=False, slow_memory=False, beta=0.7, dtype=None, **form
):
    """Return random arguments of `adpt_scan`."""
    m, form = size // heads, Form(heads=heads, **form)
    halves, depth = 2 * form.planes, size if form.whole_state else m

    def randn(*shape):
        return torch.randn(*shape, dtype=dtype)

    def value_if(condition, value):
        return value if condition else None

    real = 0.9 * torch.tanh(randn(size))
    features = size * (1 + halves if form.directions_in_drive else 1) + form.beta_in_drive
    drive = 0.5 * randn(batch, steps, features)
    if form.phased:
        angles = 2 * randn(batch, steps, size // 2)
        at = features - form.beta_in_drive
        phase = torch.stack((angles.cos(), angles.sin()), -1).flatten(-2)
        drive = torch.cat((drive[..., :at], phase, drive[..., at:]), -1)
    if form.beta_in_drive:
        drive[..., -1].abs_()
    constants = Constants(
        0.7 * real[::2].repeat_interleave(2) if pairs else real,
        value_if(pairs, 0.5 * torch.tanh(randn(size // 2)).repeat_interleave(2)),
        value_if(form.rotates and not form.directions_in_drive, randn(heads, halves, m, depth) / math.sqrt(depth)),
        value_if(bias, randn(heads, halves, m)),
        value_if(form.rotates and not form.beta_in_drive, beta * (1 + randn(heads).square())),
        value_if(slow_memory, 0.1 * randn(size)),
        value_if(slow_memory and pairs, 0.1 * randn(size)),
        value_if(slow_memory, randn(size).sigmoid()),
        value_if(slow_memory, randn(size).sigmoid()),
        value_if(form.norm_epsilon is not None, 1 + 0.3 * randn(halves, size)),
        value_if(form.norm_epsilon is not None, 0.3 * randn(halves, size)),
    )
    return drive, randn(batch, size * (2 if slow_memory else 1)), constants, form


def make_factors(size, heads, rank, kronecker):
    """Return random factors of K and V, and the matrices that they multiply to."""
    a, b = kronecker or (0, 0)
    left, right, outer, inner = (torch.randn(heads, 2, *s) for s in ((size, rank), (size, rank), (a, a), (b, b)))
    weight = left @ right.mT / size
    if kronecker:
        weight = weight + torch.einsum("hkij,hklm->hkiljm", outer, inner).reshape(heads, 2, size, size) / size
    low_rank = (left, right / size) if rank else (None, None)
    return Factors(*low_rank, *((outer, inner / size) if kronecker else (None, None))), weight
