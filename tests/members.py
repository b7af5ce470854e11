"""Every member of every axis, the layers that are legal, and the laws each obeys."""

import torch

from adptnet import ADPTNet, TrainableBeta, cells, conjugates, directions, drive, projections, retractions, spectra

all_retractions = [retractions.Exponential(), retractions.Cayley()]
real_spectra = [
    spectra.Linspace(),
    spectra.Linspace(dt_min=0.1, dt_max=2.0),
    spectra.S4DReal(),
    spectra.UniformDecay(dt_min=1e-3, dt_max=1e-2),
    spectra.ContinuousPM(),
    spectra.Negative(spectra.S4DReal(), 0.3),
    spectra.Sparse(spectra.Linspace(), 0.4, seed=3),
    spectra.Negative(spectra.Sparse(spectra.S4DReal(), 0.5), 0.5),
]
complex_spectra = [
    spectra.S4DInv(),
    spectra.S4DLin(),
    spectra.LRURing(),
    spectra.Negative(spectra.S4DInv(dt_min=0.05, dt_max=0.5), 0.5),
    spectra.Sparse(spectra.S4DInv(), 0.4, seed=1),
]
all_spectra = real_spectra + complex_spectra
all_gains = [kind(tied=tied) for kind in (drive.EMA, drive.LRU, drive.ZOH) for tied in (True, False)]
all_projections = [
    projections.Dense(),
    projections.Dense(bias=True),
    projections.Orthogonal(),
    projections.LowRank(rank=2),
    projections.Kronecker(factors=(3, 2)),
    projections.LowParam(factors=(2, 3), rank=2),
]
all_directions = [
    directions.FromState(),
    directions.FromState(relu=True),
    directions.FromState(spike=0.1),
    directions.FromState(layer_norm=True),
    directions.FromState(dot=0.5),
    directions.FromState(heads=3),
    directions.FromState(relu=True, layer_norm=True, dot=-0.3, heads=2),
    directions.FromInput(),
    directions.FromInput(heads=2, dot=0.2),
]
all_conjugates = [
    conjugates.Exact(),
    conjugates.Taylor(),
    conjugates.Taylor(order=2),
    conjugates.Product(steps=1),
    conjugates.Product(steps=3),
    conjugates.Stateful(),
]


def even(size: int, spectrum) -> int:
    """`size`, or the next even one for complex pairs."""
    return size + size % 2 if spectrum.is_complex else size


def legal_layers():
    """A layer for every member of every axis, and the combinations that have met in a bug or may."""
    plain = {"width": 6}
    for spectrum in all_spectra:
        yield {**plain, "spectrum": spectrum, "beta": 1.0}
    yield {**plain, "spectrum": spectra.FromExponents((-0.01, -0.1, -0.5, -1.0, -2.0, -3.0)), "beta": 0.5}
    for gain in all_gains:
        yield {**plain, "gain": gain, "beta": 0.5, "spectrum": spectra.S4DInv()}
        yield {
            **plain,
            "gain": gain,
            "beta": 0.5,
            "spectrum": spectra.Negative(spectra.Sparse(spectra.Linspace(), 0.3)),
        }
    for projection in all_projections:
        yield {**plain, "projection": projection, "input_projection": projection, "beta": 0.5}
    for direction in all_directions:
        yield {**plain, "direction": direction, "beta": 1.0}
        yield {"width": 12, "direction": direction, "beta": 1.0, "spectrum": spectra.S4DInv()}
    for conjugate in all_conjugates:
        yield {**plain, "conjugate": conjugate, "beta": 0.5}
        yield {**plain, "conjugate": conjugate, "beta": 0.5, "spectrum": spectra.S4DInv(), "gain": drive.ZOH()}
    for retraction in all_retractions:
        yield {**plain, "retraction": retraction, "beta": TrainableBeta(2.0), "gate": drive.SoftplusGate(rank=2)}
        yield {**plain, "retraction": retraction, "beta": 1.0, "rotation_aware": True}
    for sign in (1, -1):
        yield {**plain, "rope": drive.RoPE(sign=sign), "beta": 1.0, "gate": drive.SoftplusGate(rank=2)}
    yield {**plain, "start": True, "beta": 1.0}
    yield {**plain, "start": True, "beta": 0.5, "conjugate": conjugates.Taylor(order=2), "spectrum": spectra.S4DInv()}
    yield {**plain, "start": True, "beta": 0.5, "conjugate": conjugates.Product(2), "rotation_aware": True}
    yield {**plain, "beta": (0.1, 1.0), "direction": directions.FromState(heads=2)}
    yield {
        **plain,
        "beta": TrainableBeta((0.5, 1.0, 2.0)),
        "direction": directions.FromInput(heads=3),
        "rotation_aware": True,
    }
    yield {
        **plain,
        "beta": TrainableBeta((0.5, 0.2)),
        "direction": directions.FromState(heads=2),
        "conjugate": conjugates.Taylor(2),
    }
    yield {**plain, "memory": cells.SlowMemory(), "beta": 1.0}
    yield {
        **plain,
        "memory": cells.SlowMemory(feedback=-0.5),
        "beta": 1.0,
        "direction": directions.FromInput(),
        "gain": drive.LRU(),
    }
    yield {
        **plain,
        "memory": cells.SlowMemory(),
        "beta": 0.5,
        "spectrum": spectra.S4DInv(),
        "gain": drive.ZOH(),
        "rotation_aware": True,
        "projection": projections.LowParam((3, 2), 2),
    }
    yield {**plain, "beta": 0, "conjugate": conjugates.Diagonal(), "spectrum": spectra.S4DInv()}
    yield {**plain, "beta": 0, "conjugate": conjugates.Diagonal(), "rope": drive.RoPE(), "start": True}
    yield {"width": 3, "state_size": 12, "input_projection": projections.Expand(), "spectrum": spectra.S4DReal()}
    yield {
        "width": 3,
        "state_size": 12,
        "input_projection": projections.Expand(bias=True),
        "spectrum": spectra.S4DInv(),
        "readout": projections.Expand(),
        "beta": 1.0,
    }
    yield {
        "width": 3,
        "state_size": 12,
        "input_projection": projections.Expand(),
        "spectrum": spectra.Linspace(dt_per="channel"),
    }
    yield {"width": 5, "state_size": 3, "beta": 1.0}
    yield {**plain, "beta": 30.0, "spectrum": spectra.Linspace(dt_min=1.0, dt_max=3.0)}


legal = list(legal_layers())


def name_of(axes: dict) -> str:
    return ",".join(f"{key}={value}" for key, value in axes.items() if key != "width")[:110]


def build(axes: dict, **factory) -> ADPTNet:
    """The layer, its parts that start at zero moved so that every gradient is alive."""
    layer = ADPTNet(**axes, **factory)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not parameter.any() and "original" not in name and "beta" not in name:
                parameter.normal_(std=0.3)
    return layer


def adpt_cell(layer) -> cells.ADPTCell:
    """The ADPT cell of a layer, also inside a coupled or stateful one."""
    cell = layer.cell
    return getattr(cell, {cells.CoupledCell: "fast", cells.StatefulCell: "memoryless"}.get(type(cell), ""), cell)


def laws_of(axes: dict) -> set[str]:
    """The laws a layer obeys. What is left out is left out for a reason that docs/deviations.md gives."""
    direction = axes.get("direction", directions.FromState())
    conjugate = axes.get("conjugate", conjugates.Exact())
    bias = axes.get("projection", projections.Dense()).bias
    if axes.get("memory") or isinstance(conjugate, conjugates.Stateful):
        return set()  # the state is more than x
    laws = {"conjugate"}
    if not isinstance(conjugate, conjugates.Taylor):
        laws.add("isospectral")
        if not axes.get("rotation_aware"):
            laws.add("ball")
    from_state = isinstance(direction, directions.FromState)
    if from_state and direction.spike is None and not bias and not axes.get("rotation_aware"):
        laws.add("homogeneous")
        laws.add("euler")
        if not direction.relu and not direction.layer_norm:
            laws.add("odd")
    if axes.get("beta") == 0 and not axes.get("start"):
        laws.add("diagonal")
    return laws
