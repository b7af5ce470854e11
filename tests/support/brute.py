"""A brute-force implementation of the recurrence: dense matrices, `matrix_exp` at every step, one sequence at a time.

It uses nothing of the library but the parameters. Complex spectra are dense matrices of 2-by-2 blocks.
"""

import math

import torch

from adptnet import TrainableBeta, cells, conjugates, directions, drive, projections, retractions, spectra


def trajectory(layer, x, state, dt=None, beta=None):
    """Return the states and outputs of `layer` for x, (batch, time, width), from `state`, (batch, state_size)."""
    spec, cell = layer.spec.cell, layer.cell
    inner = {cells.CoupledCell: "fast", cells.StatefulCell: "memoryless"}.get(type(cell))
    adpt = getattr(cell, inner) if inner else cell
    rows, shown = [], []
    for i in range(len(x)):
        memory, states = state[i], []
        for t in range(x.shape[1]):
            step_dt = None if dt is None else dt[i, t]
            given_beta = None if beta is None else beta[i]
            memory = step(spec, cell, adpt, memory, x[i, t], t, step_dt, given_beta)
            states.append(memory)
        rows.append(torch.stack(states))
        shown.append(rows[-1][:, : spec.size])
    states, outputs = torch.stack(rows), torch.stack(shown)
    if layer.readout is not None:
        outputs = outputs @ matrix(layer.readout).T + bias(layer.readout)
    return states, outputs


def step(spec, cell, adpt, memory, o, t, dt, given_beta):
    """Return the next state of one sequence."""
    n = spec.size
    x = memory[:n]
    eigen = eigenvalues(spec.spectrum, adpt.spectrum, 1.0 if dt is None else dt)
    u = matrix(adpt.drive.input_projection) @ o + bias(adpt.drive.input_projection)
    driven = u if adpt.drive.rope is None else rope(adpt.drive.rope, u, t, adpt.spectrum)
    if adpt.drive.gate is not None:
        gate = adpt.drive.gate
        driven = torch.log1p(torch.exp(gate.up @ (gate.down @ u) + gate.bias)) * driven
    gain = gain_matrix(spec, adpt, eigen, 1.0 if dt is None else dt)
    driven = gain @ driven
    big_lambda = blocks(eigen)
    beta = betas(spec, adpt) if given_beta is None else [given_beta] * spec.direction.heads
    source = u if isinstance(spec.direction, directions.FromInput) else x
    planes = [plane(spec, d, source) for d in adpt.directions]  # each: a key and a value for every head
    if isinstance(cell, cells.CoupledCell):
        w = memory[n:]
        driven = driven + gain @ (cell.feedback * w)
    if isinstance(cell, cells.StatefulCell):
        old = memory[n:].reshape(n, n)
        (key, value), *_ = planes[0]
        rotated = old @ value
        new = old @ retract(spec.retraction, beta[0] * (outer(key, rotated) - outer(rotated, key)))
        return torch.cat((new @ big_lambda @ new.T @ x + driven, new.flatten()))
    if adpt.start is not None:
        q0 = adpt.start.weight
        big_lambda = q0 @ big_lambda @ q0.T
    if isinstance(spec.conjugate, conjugates.Taylor):
        s = skew(planes[0], beta)
        m = big_lambda + s @ big_lambda - big_lambda @ s
        if spec.conjugate.order == 2:
            m = m + (s @ s @ big_lambda - 2 * s @ big_lambda @ s + big_lambda @ s @ s) / 2
        q = None
    else:
        q = torch.eye(n)
        for pairs in planes:
            q = retract(spec.retraction, skew(pairs, beta)) @ q
        m = q @ big_lambda @ q.T
    p = torch.eye(n) if adpt.phase is None else phase(adpt.phase, u, 1.0 if dt is None else dt)
    x = p @ m @ x + (p @ q @ driven if spec.rotation_aware else driven)
    if isinstance(cell, cells.CoupledCell):
        gamma = eigenvalues(spec.memory.spectrum, cell.slow)
        return torch.cat((x, gamma * w + (1 - gamma) * x))
    return x


def betas(spec, cell):
    """Return β for each head."""
    value = cell.beta.parameter if isinstance(spec.beta, TrainableBeta) else torch.tensor(spec.beta)
    return list(value) if value.dim() else [value] * spec.direction.heads


def plane(spec, module, source):
    """Return key and value of each head."""
    direction = spec.direction
    if getattr(direction, "relu", False):
        source = source.clamp(min=0)
    if getattr(direction, "spike", None) is not None:
        inside = ((source - direction.spike).abs() < 0.5).double()
        source = (source >= direction.spike).double() + inside * (source - source.detach())
    raw = []
    for projection, norm in ((module.key_projection, module.key_norm), (module.value_projection, module.value_norm)):
        y = matrix(projection) @ source + bias(projection)
        if norm is not None:
            y = y / y.norm()
            y = (y - y.mean()) / (y.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
        raw.append(y.reshape(direction.heads, -1))
    pairs = []
    for key, value in zip(*raw, strict=True):
        soft = getattr(direction, "softness", 0.0) * source.norm()
        key, value = (v / (v @ v + soft**2).sqrt() if v.any() else v for v in (key, value))
        if direction.dot is not None:
            across = key - (key @ value) * value
            key = math.sqrt(1 - direction.dot**2) * across / across.norm() + direction.dot * value
        pairs.append((key, value))
    return pairs


def skew(pairs, beta):
    """Return β(k v' - v k'), one block for each head."""
    return torch.block_diag(*[b * (outer(k, v) - outer(v, k)) for (k, v), b in zip(pairs, beta, strict=True)])


outer = torch.outer


def retract(retraction, s):
    """Return the rotation for a skew-symmetric matrix."""
    eye = torch.eye(len(s))
    if isinstance(retraction, retractions.Exponential):
        return torch.linalg.matrix_exp(s)
    return torch.linalg.inv(eye - s / 2) @ (eye + s / 2)


def rope(module, u, t, spectrum):
    """Return u with its pairs rotated for position t."""
    log_dt = module.log_dt
    if module.spec.tied:
        while not hasattr(spectrum, "log_dt"):
            spectrum = spectrum.spectrum
        log_dt = torch.stack([(a + b) / 2 for a, b in zip(spectrum.log_dt[::2], spectrum.log_dt[1::2], strict=True)])
    theta = module.spec.sign * t * torch.exp(log_dt + module.log_frequency)
    rotated = [
        [c * a + s * b, c * b - s * a] for c, s, a, b in zip(theta.cos(), theta.sin(), u[::2], u[1::2], strict=True)
    ]
    return torch.stack([value for pair in rotated for value in pair])


def phase(module, u, dt):
    """Return the matrix of an input-driven phase."""
    angles = dt * (module.weight @ u + module.bias)
    return torch.block_diag(*[torch.linalg.matrix_exp(a * torch.tensor([[0.0, -1.0], [1.0, 0.0]])) for a in angles])


def eigenvalues(spec, module, dt=1.0):
    """Return an eigenvalue for each dimension of a real state, or for each pair of a complex one."""
    if isinstance(spec, spectra.Negative):
        inner = eigenvalues(spec.spectrum, module.spectrum, dt)
        return torch.where(module.negative[:: 2 if inner.is_complex() else 1], -1.0, 1.0) * inner
    if isinstance(spec, spectra.Sparse):
        inner = eigenvalues(spec.spectrum, module.spectrum, dt)
        return inner * (~module.silent[:: 2 if inner.is_complex() else 1])
    if isinstance(spec, spectra.FromExponents):
        return torch.exp(dt * module.exponents)
    rate, length = rates(module)
    return torch.exp(-dt * length * rate)


def rates(module):
    """Return the continuous eigenvalues and the step lengths."""
    decay = module.log_decay.exp()
    length = torch.ones_like(decay)
    if module.log_dt is not None:
        length = module.log_dt.exp().repeat_interleave(len(decay) // len(module.log_dt))
    if module.frequency is not None:
        return torch.complex(decay, -module.frequency), length
    if module.log_frequency is not None:
        return torch.complex(decay, -module.log_frequency.exp()), length
    return decay, length


def hold(spec, module, dt=1.0):
    """Return the zero-order-hold gain (1 - λ̄) / λ, for negative eigenvalues that of the modulus; 1 where λ̄ = 0."""
    if isinstance(spec, spectra.Negative):
        return hold(spec.spectrum, module.spectrum, dt)
    if isinstance(spec, spectra.Sparse):
        inner = hold(spec.spectrum, module.spectrum, dt)
        return torch.where(module.silent[:: 2 if inner.is_complex() else 1], torch.ones_like(inner), inner)
    if isinstance(spec, spectra.FromExponents):
        return (torch.exp(dt * module.exponents) - 1) / module.exponents
    return (1 - eigenvalues(spec, module, dt)) / rates(module)[0]


def gain_matrix(spec, cell, eigen, dt=1.0):
    """Return the gain as a matrix."""
    gain = cell.drive.gain
    if gain.real is not None:
        if gain.imag is None:
            return torch.diag(gain.real.repeat_interleave(2 if eigen.is_complex() else 1))
        return blocks(torch.complex(gain.real, gain.imag))
    if isinstance(spec.gain, drive.ZOH):
        return blocks(hold(spec.spectrum, cell.spectrum, dt))
    modulus = eigen.abs()
    values = 1 - modulus if isinstance(spec.gain, drive.EMA) else (1 - modulus**2).sqrt()
    return torch.diag(values.repeat_interleave(2 if eigen.is_complex() else 1))


def blocks(values):
    """Return the real block-diagonal matrix of eigenvalues."""
    if not values.is_complex():
        return torch.diag(values)
    rows = [
        torch.stack([torch.stack([a, -b]), torch.stack([b, a])]) for a, b in zip(values.real, values.imag, strict=True)
    ]
    return torch.block_diag(*rows)


def matrix(projection):
    """Return the matrix of a projection, from its parameters."""
    if isinstance(projection, projections.base.Biased):
        return matrix(projection.projection)
    if isinstance(projection, projections.heads.Heads):
        return torch.block_diag(*[matrix(p) for p in projection.projections])
    if hasattr(projection, "low_rank"):
        return matrix(projection.low_rank) + matrix(projection.kronecker)
    if hasattr(projection, "left"):
        return projection.left @ projection.right.T
    if hasattr(projection, "outer"):
        a, b = projection.outer, projection.inner
        return torch.cat([torch.cat([a[i, j] * b for j in range(len(a))], 1) for i in range(len(a))], 0)
    if not list(projection.parameters()):  # the identity
        return torch.eye(projection.out_features, dtype=torch.float64)
    return projection.weight if projection.weight.dim() == 2 else expansion(projection)


def bias(projection):
    """Return the bias of a projection; 0.0 if it has none."""
    if isinstance(projection, projections.heads.Heads):
        return torch.cat([torch.zeros(p.out_features) + bias(p) for p in projection.projections])
    return projection.bias if isinstance(projection, projections.base.Biased) else 0.0


def expansion(projection):
    """Return the matrix of an Expand: weight j of channel i connects channel i and state dimension i·m + j."""
    large = len(projection.weight)
    small = min(projection.in_features, projection.out_features)
    rows = torch.arange(large)
    wide = torch.zeros(large, small).index_put((rows, rows // (large // small)), projection.weight)
    return wide if projection.out_features == large else wide.T


def s4d_inv_frequencies(n: int):
    """Return the frequencies of S4D-Inv for a state of dimension n."""
    return [n / math.pi * (n / (2 * k + 1) - 1) for k in range(n // 2)]
