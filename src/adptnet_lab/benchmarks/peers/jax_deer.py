"""machine-discovery/deer (JAX) beside our solvers on one GRU, and XLA's own loop over time.

    pip install jax git+https://github.com/machine-discovery/deer
    python -m adptnet_lab.benchmarks.peers.jax_deer --size 1 1024 16

Compiled before it is timed; one thread, asked for by XLA_FLAGS. It returns no iteration count. Run here with jax 0.10.2
and its newest public commit of June 2025.
"""

import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
try:
    import jax
    import jax.numpy as jnp
    from deer.fseq1d import seq1d
except ImportError as error:
    sys.exit(f"deer cannot be imported ({error}). Run: pip install jax git+https://github.com/machine-discovery/deer")

import torch

from .side_by_side import Peer, Problem, compare


def step(state, x, weights):
    into, inside, bias_in, bias_inside = weights
    reset, update, new = jnp.split(into @ x + bias_in, 3)
    reset_inner, update_inner, new_inner = jnp.split(inside @ state + bias_inside, 3)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_inner) * new_inner)
    update = jax.nn.sigmoid(update + update_inner)
    return (1 - update) * new + update * state


def peers(problem: Problem) -> list[Peer]:
    weights = tuple(jnp.asarray(w.numpy()) for w in problem.weights)
    x, start = jnp.asarray(problem.x.numpy()), jnp.zeros(problem.x.shape[-1])
    found = []
    for name, method in (("lax.scan", seq1d.Sequential()), ("deer", seq1d.DEER(atol=1e-6, rtol=1e-6))):

        def states(x, method=method):
            return jax.vmap(lambda one: seq1d(step, start, one, weights, method=method).value)(x)

        forward, gradient = jax.jit(states), jax.jit(jax.grad(lambda x, states=states: states(x).sum()))
        found.append(Peer(name, _in_torch(forward, x), _in_torch(gradient, x)))
    return found


def _in_torch(run, x):
    return lambda: torch.from_numpy(jax.device_get(run(x)).copy())


if __name__ == "__main__":
    compare(peers, __doc__)
