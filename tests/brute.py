"""An independent program for the recurrence: dense matrices, `matrix_exp` at every step, nothing of the library but
its parameters. Complex spectra are dense matrices of 2-by-2 blocks."""

import math

import torch

from adptnet import TrainableBeta, conjugates, drive, retractions, spectra


def trajectory(layer, x, state):
    """States and outputs of `layer` along x (batch, time, width) from `state` (batch, n)."""
    spec, cell = layer.spec.cell, layer.cell
    eigen = eigenvalues(spec.spectrum, cell.spectrum)
    big_lambda = blocks(eigen)
    gain = gain_matrix(spec, cell, eigen)
    b = layer.cell.drive.input_projection
    b_matrix = b.weight if hasattr(b, "weight") and b.weight.dim() == 2 else expansion(b)
    states = []
    for t in range(x.shape[1]):
        u = x[:, t] @ b_matrix.T
        if cell.drive.gate is not None:
            gate = cell.drive.gate
            u = torch.log1p(torch.exp(u @ gate.down.T @ gate.up.T + gate.bias)) * u
        state = torch.stack([m(spec, cell, big_lambda, s) @ s for s in state]) + u @ gain.T
        states.append(state)
    states = torch.stack(states, 1)
    if layer.readout is None:
        return states, states
    r = layer.readout
    return states, states @ (r.weight if r.weight.dim() == 2 else expansion(r)).T


def m(spec, cell, big_lambda, state):
    if isinstance(spec.conjugate, conjugates.Diagonal):
        return big_lambda
    source = state.clamp(min=0) if spec.direction.relu else state
    k, v = cell.directions.key_projection.weight @ source, cell.directions.value_projection.weight @ source
    if not (k.any() and v.any()):
        return big_lambda
    k, v = k / k.norm(), v / v.norm()
    beta = cell.beta.parameter if isinstance(spec.beta, TrainableBeta) else spec.beta
    s = beta * (torch.outer(k, v) - torch.outer(v, k))
    eye = torch.eye(len(state))
    if isinstance(spec.retraction, retractions.Exponential):
        q = torch.linalg.matrix_exp(s)
    else:
        q = torch.linalg.inv(eye - s / 2) @ (eye + s / 2)
    return q @ big_lambda @ q.T


def eigenvalues(spec, module):
    """One eigenvalue for each number of a real state, or for each pair of a complex one."""
    if isinstance(spec, spectra.Negative):
        step = 2 if eigenvalues(spec.spectrum, module.spectrum).is_complex() else 1
        sign = torch.where(module.negative[::step], -1.0, 1.0)
        return sign * eigenvalues(spec.spectrum, module.spectrum)
    if isinstance(spec, spectra.Sparse):
        inner = eigenvalues(spec.spectrum, module.spectrum)
        return inner * (~module.silent[:: 2 if inner.is_complex() else 1])
    decay, dt = module.log_decay.exp(), module.log_dt.exp()
    dt = dt.repeat_interleave(len(decay) // len(dt))
    if module.log_frequency is None:
        return torch.exp(-dt * decay)
    return torch.exp(-dt * torch.complex(decay, -module.log_frequency.exp()))


def hold(spec, module):
    """(1 - λ̄) / λ of the magnitudes; 1 where λ̄ = 0."""
    if isinstance(spec, spectra.Negative):
        return hold(spec.spectrum, module.spectrum)
    if isinstance(spec, spectra.Sparse):
        inner = hold(spec.spectrum, module.spectrum)
        silent = module.silent[:: 2 if inner.is_complex() else 1]
        return torch.where(silent, torch.ones_like(inner), inner)
    decay = module.log_decay.exp()
    rate = decay if module.log_frequency is None else torch.complex(decay, -module.log_frequency.exp())
    return (1 - eigenvalues(spec, module)) / rate


def gain_matrix(spec, cell, eigen):
    gain = cell.drive.gain
    if gain.real is not None:
        if gain.imag is None:
            return torch.diag(gain.real.repeat_interleave(2 if eigen.is_complex() else 1))
        return blocks(torch.complex(gain.real, gain.imag))
    if isinstance(spec.gain, drive.ZOH):
        return blocks(hold(spec.spectrum, cell.spectrum))
    modulus = eigen.abs()
    values = 1 - modulus if isinstance(spec.gain, drive.EMA) else (1 - modulus**2).sqrt()
    return torch.diag(values.repeat_interleave(2 if eigen.is_complex() else 1))


def blocks(values):
    if not values.is_complex():
        return torch.diag(values)
    real, imag = values.real, values.imag
    rows = [torch.stack([torch.stack([a, -b]), torch.stack([b, a])]) for a, b in zip(real, imag, strict=True)]
    return torch.block_diag(*rows)


def expansion(projection):
    """The matrix of an Expand: weight j of channel i, between channel i and number i·m + j of the state."""
    large = len(projection.weight)
    small = min(projection.in_features, projection.out_features)
    m_each = large // small
    matrix = torch.zeros(large, small)
    rows = torch.arange(large)
    matrix = matrix.index_put((rows, torch.div(rows, m_each, rounding_mode="floor")), projection.weight)
    return matrix if projection.out_features == large else matrix.T


def s4d_inv_frequencies(n: int):
    return [n / math.pi * (n / (2 * k + 1) - 1) for k in range(n // 2)]
