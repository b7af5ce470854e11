"""Every member of every axis, the layers that are legal, and the laws each obeys."""

import torch

from adptnet import ADPTNet, TrainableBeta, cells, conjugates, directions, drive, projections, retractions, spectra

all_retractions = [retractions.Exponential(), retractions.Cayley()]
real_spectra = [
    spectra.Linspace(),
    spectra.Linspace(dt_min=0.1, dt_max=2.0),
    spectra.S4DReal(),
    spectra.Negative(spectra.Linspace(), 0.5),
    spectra.Negative(spectra.S4DReal(), 0.3),
    spectra.Sparse(spectra.Linspace(), 0.4, seed=3),
    spectra.Negative(spectra.Sparse(spectra.S4DReal(), 0.5), 0.5),
]
complex_spectra = [
    spectra.S4DInv(),
    spectra.Negative(spectra.S4DInv(dt_min=0.05, dt_max=0.5), 0.5),
    spectra.Sparse(spectra.S4DInv(), 0.4, seed=1),
]
all_spectra = real_spectra + complex_spectra
all_gains = [kind(tied=tied) for kind in (drive.EMA, drive.LRU, drive.ZOH) for tied in (True, False)]
all_projections = [projections.Dense(), projections.Orthogonal()]
all_directions = [directions.FromState(), directions.FromState(relu=True)]


def is_complex(spectrum) -> bool:
    return isinstance(spectrum, spectra.S4DInv) or (hasattr(spectrum, "spectrum") and is_complex(spectrum.spectrum))


def even(size: int, spectrum) -> int:
    """`size`, or the next even one for complex pairs."""
    return size + size % 2 if is_complex(spectrum) else size


def legal_layers():
    """A layer for every member of every axis, and the combinations that have met in a bug or may."""
    plain = {"width": 6}
    for spectrum in all_spectra:
        yield {**plain, "spectrum": spectrum, "beta": 1.0}
    for gain in all_gains:
        yield {**plain, "gain": gain, "beta": 0.5, "spectrum": spectra.S4DInv()}
        yield {
            **plain,
            "gain": gain,
            "beta": 0.5,
            "spectrum": spectra.Negative(spectra.Sparse(spectra.Linspace(), 0.3)),
        }
    for projection in all_projections:
        for direction in all_directions:
            yield {**plain, "projection": projection, "direction": direction, "beta": 4.0}
    for retraction in all_retractions:
        yield {**plain, "retraction": retraction, "beta": TrainableBeta(2.0), "gate": drive.SoftplusGate(rank=2)}
    yield {**plain, "beta": 0, "conjugate": conjugates.Diagonal(), "spectrum": spectra.S4DInv()}
    yield {"width": 3, "state_size": 12, "input_projection": projections.Expand(), "spectrum": spectra.S4DReal()}
    yield {
        "width": 3,
        "state_size": 12,
        "input_projection": projections.Expand(),
        "spectrum": spectra.S4DInv(),
        "readout": projections.Expand(),
        "beta": 1.0,
    }
    yield {"width": 5, "state_size": 3, "beta": 1.0}
    yield {**plain, "beta": 30.0, "spectrum": spectra.Linspace(dt_min=1.0, dt_max=3.0)}


legal = list(legal_layers())


def name_of(axes: dict) -> str:
    return ",".join(f"{key}={value}" for key, value in axes.items() if key != "width")[:110]


def build(axes: dict, **factory) -> ADPTNet:
    """The layer, its zero-started parts moved so that every gradient is alive."""
    layer = ADPTNet(**axes, **factory)
    cell = layer.cell
    assert isinstance(cell, cells.ADPTCell)
    if cell.drive.gate is not None:
        torch.nn.init.normal_(cell.drive.gate.up)
    return layer


def laws_of(axes: dict) -> set[str]:
    """The laws a layer obeys. What is left out is left out for a reason that docs/deviations.md gives."""
    laws = {"homogeneous", "conjugate", "isospectral"}
    if not axes.get("direction", directions.FromState()).relu:
        laws.add("odd")
    if axes.get("beta") == 0:
        laws.add("diagonal")
    return laws
