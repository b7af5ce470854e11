"""machine-discovery/deer (JAX), and XLA's own loop over time, against the solvers of adptnet on one GRU.

    pip install jax git+https://github.com/machine-discovery/deer
    python -m adptnet_lab.benchmarks.peers.jax_deer --size 1 1024 16

Compiled before it is timed, on one thread, which XLA_FLAGS requests. It returns no iteration count. Tested with jax
0.10.2 and the newest public commit of deer of June 2025.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
try:
    import jax
    import jax.numpy as jnp
    from deer.fseq1d import seq1d
except ImportError as error:
    sys.exit(f"deer cannot be imported ({error}). Run: pip install jax git+https://github.com/machine-discovery/deer")

import torch
from torch import Tensor

from .gru_comparison import GRUProblem, Implementation, compare

Array = Any  # of JAX


def step(state: Array, x: Array, weights: tuple[Array, ...]) -> Array:
    """Return the next state of the GRU.

    Args:
        state: (n,).
        x: Input of this step, (n,).
        weights: Input and recurrent weights, and their biases, in the order of `torch.nn.GRUCell`.
    """
    into, inside, bias_in, bias_inside = weights
    reset, update, new = jnp.split(into @ x + bias_in, 3)
    reset_inner, update_inner, new_inner = jnp.split(inside @ state + bias_inside, 3)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_inner) * new_inner)
    update = jax.nn.sigmoid(update + update_inner)
    return (1 - update) * new + update * state


def make_implementations(problem: GRUProblem) -> list[Implementation]:
    """Return `lax.scan` and deer.

    Args:
        problem: The GRU and its input.
    """
    weights = tuple(jnp.asarray(w.numpy()) for w in problem.weights)
    x, start = jnp.asarray(problem.x.numpy()), jnp.zeros(problem.x.shape[-1])
    found = []
    for name, method in (("lax.scan", seq1d.Sequential()), ("deer", seq1d.DEER(atol=1e-6, rtol=1e-6))):

        def states(x: Array, method: Any = method) -> Array:
            return jax.vmap(lambda one: seq1d(step, start, one, weights, method=method).value)(x)

        forward, gradient = jax.jit(states), jax.jit(jax.grad(lambda x, states=states: states(x).sum()))
        found.append(Implementation(name, _to_torch(forward, x), _to_torch(gradient, x)))
    return found


def _to_torch(run: Callable[[Array], Array], x: Array) -> Callable[[], Tensor]:
    return lambda: torch.from_numpy(jax.device_get(run(x)).copy())


if __name__ == "__main__":
    compare(make_implementations, __doc__)
