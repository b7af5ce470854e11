"""All variants of every component of the model, the valid layers and solvers, and the laws that each layer obeys.

`axes` are the components of a layer, as keyword arguments of `ADPTNet`. A law is a property that is tested for every
layer, except those that are listed with a reason.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from adptnet import (
    ADPTNet,
    Bidirectional,
    CoupledADPTNet,
    LinearADPTNet,
    Recurrent,
    SequenceModel,
    SpikingADPTNet,
    Stack,
    TaylorADPTNet,
    TrainableBeta,
    cells,
    conjugates,
    directions,
    drive,
    presets,
    projections,
    retractions,
    solvers,
    spectra,
)
from adptnet.nn import BidirectionalSpec, BlockSpec, GatedSpec, LayerSpec, SwiGLUBlockSpec, spiking_adpt_for_speech
from adptnet.ops.lti_convolution import lti_convolution
from adptnet_lab.baselines import baseline

all_retractions = [retractions.Exponential(), retractions.Cayley()]
real_spectra = [
    spectra.Linspace(),
    spectra.Linspace(dt_min=0.1, dt_max=2.0),
    spectra.Timescales(),
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
    directions.FromWholeState(heads=3),
    directions.FromWholeState(heads=2, softness=0.3),
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


# Components that an input-driven phase may treat differently.
phased_layers: list[dict] = [
    {"beta": 1.0},
    {"beta": 1.0, "spectrum": spectra.Negative(spectra.S4DReal(), 0.3), "retraction": retractions.Cayley()},
    {"beta": 1.0, "spectrum": spectra.S4DInv(), "gain": drive.ZOH(), "gate": drive.SoftplusGate(rank=2)},
    {"beta": TrainableBeta((0.5, 1.0, 2.0)), "direction": directions.FromState(heads=3)},
    {"beta": 1.0, "direction": directions.FromState(relu=True, layer_norm=True)},
    {"beta": 1.0, "direction": directions.FromInput(), "rope": drive.RoPE()},
    {"beta": 1.0, "rotation_aware": True},
    {"beta": 0.5, "conjugate": conjugates.Taylor(2)},
    {"beta": 0.5, "conjugate": conjugates.Product(2), "start": True, "rotation_aware": True},
    {"beta": 0.5, "memory": cells.SlowMemory(), "spectrum": spectra.S4DReal()},
    {"beta": 0, "conjugate": conjugates.Diagonal()},
]


def make_even(size: int, spectrum) -> int:
    """Return `size`, or the next even number if the spectrum has complex pairs."""
    return size + size % 2 if spectrum.is_complex else size


def legal_layers():
    """Yield the components of a layer for every variant of each, and for combinations that are prone to bugs."""
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
    for axes in phased_layers:
        yield {**plain, "phase": drive.InputPhase(0.7), **axes}
    yield {**plain, "rope": drive.RoPE(tied=True), "spectrum": spectra.Negative(spectra.Linspace(), 0.5), "beta": 1.0}
    yield {**plain, "direction": directions.FromInput(), "beta": 0.0, "spectrum": spectra.Linspace()}
    for direction in (directions.FromWholeState(softness=0.5), directions.FromWholeState(heads=3, softness=0.2)):
        yield {**plain, "direction": direction, "beta": 1.0, "phase": drive.InputPhase(0.7), "rotation_aware": True}
        yield {**plain, "direction": direction, "beta": 0.5, "conjugate": conjugates.Product(2)}
        yield {**plain, "direction": direction, "beta": 0.5, "conjugate": conjugates.Taylor(2)}
    yield {**plain, "direction": directions.FromWholeState(softness=0.5), "beta": 0.5, "memory": cells.SlowMemory()}
    # The default of `ADPTNet`, and the layer inside the gated layers of the presets.
    default = {"beta": 1.0, "spectrum": spectra.Timescales(), "gain": drive.LRU(), "gate": drive.SoftplusGate()}
    yield {**plain, **default}
    yield {
        **plain,
        **default,
        "direction": directions.FromState(heads=2),
        "input_projection": projections.Identity(),
    }
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
    """Return a test id for a layer."""
    return ",".join(f"{key}={value}" for key, value in axes.items() if key != "width")[:110]


def build(axes: dict, **factory) -> ADPTNet:
    """Build a layer; parameters that are initialised at zero are randomised so that no gradient vanishes."""
    layer = ADPTNet.paper(**axes, **factory)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not parameter.any() and "original" not in name and "beta" not in name:
                parameter.normal_(std=0.3)
    return layer


def adpt_cell(layer) -> cells.ADPTCell:
    """Return the ADPT cell of a layer, also from inside a coupled or stateful cell."""
    cell = layer.cell
    return getattr(cell, {cells.CoupledCell: "fast", cells.StatefulCell: "memoryless"}.get(type(cell), ""), cell)


def laws_of(axes: dict) -> set[str]:
    """Return the laws that a layer obeys. The exceptions are explained in docs/explanation/deviations.md."""
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
    from_state = isinstance(direction, (directions.FromState, directions.FromWholeState))
    spikes, relu = getattr(direction, "spike", None) is not None, getattr(direction, "relu", False)
    if from_state and not spikes and not bias and not axes.get("rotation_aware"):
        laws.add("homogeneous")
        laws.add("euler")
        if not relu and not direction.layer_norm:
            laws.add("odd")
    if axes.get("beta") == 0 and not axes.get("start") and not axes.get("phase"):
        laws.add("diagonal")
    return laws


# Solvers: a linearization, a damping, and whether the sequence is divided into blocks.

all_linearizations = {
    "DEER": solvers.DEER,
    "Quasi": solvers.QuasiDEER,
    "Quasi, estimated": partial(solvers.QuasiDEER, probes=3),
    "Forward": solvers.ForwardDEER,
    "Conv": solvers.ConvDEER,
    "Conv, by FFT": partial(solvers.ConvDEER, by=lti_convolution),
    "Koopman": solvers.KoopmanDEER,
    "Koopman, 3 means": partial(solvers.KoopmanDEER, means=3),
    "Koopman, of J": partial(solvers.KoopmanDEER, mean=solvers.linearizations.MeanJacobian, means=3),
    "Koopman, auto": partial(solvers.KoopmanDEER, means="auto"),
    "Koopman, polar": partial(solvers.KoopmanDEER, mean=solvers.linearizations.MeanRotation),
    "Jacobi": solvers.Jacobi,
    "Picard": solvers.Picard,
}
all_dampings = {
    "undamped": None,
    "scale": solvers.Scale(0.9),
    "trust region": solvers.TrustRegion(0.1),
    "adaptive": solvers.Adaptive(),
    "proximal": solvers.Proximal(),
    "proximal and scale": solvers.Proximal(solvers.Scale(0.9)),
}
all_blocks = {"whole": None, "3 blocks": {"num_blocks": 3}, "blocks of 5": {"block_length": 5}}


class _Mixing(nn.Module):
    """A user-defined step whose channels mix."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, state, inputs):
        return torch.tanh(state @ self.weight) * torch.sigmoid(inputs) + 0.3 * inputs


other_cells = {
    "GRUCell": lambda: cells.from_torch(nn.GRUCell(6, 6)),
    "LSTMCell": lambda: cells.from_torch(nn.LSTMCell(6, 5)),
    "RNNCell": lambda: cells.from_torch(nn.RNNCell(6, 6)),
    "TanhRNN": lambda: cells.TanhRNN(6, 5).build(),
    "ReLURNN": lambda: cells.ReLURNN(6).build(),
    "OrthogonalRNN": lambda: cells.OrthogonalRNN(6).build(),
    "from_function": lambda: cells.from_function(_Mixing(6), 6, 6),
}
# One of each kind of spectrum, conjugate, direction, drive and state that a solver may treat differently.
solver_layers = [
    {"width": 6, "beta": 1.0},
    {"width": 6, "spectrum": spectra.Negative(spectra.Sparse(spectra.S4DReal(), 0.5), 0.5), "rope": drive.RoPE()},
    {"width": 6, "spectrum": spectra.S4DInv(), "beta": TrainableBeta(1.0), "gain": drive.ZOH()},
    {"width": 6, "conjugate": conjugates.Taylor(), "beta": 0.5, "gate": drive.SoftplusGate(rank=2)},
    {"width": 6, "conjugate": conjugates.Taylor(2), "beta": 0.5, "start": True, "spectrum": spectra.S4DInv()},
    {"width": 6, "conjugate": conjugates.Product(3), "beta": 0.5, "rotation_aware": True},
    {"width": 6, "state_size": 2, "conjugate": conjugates.Stateful(), "beta": 0.5},
    {"width": 6, "direction": directions.FromState(relu=True, layer_norm=True, dot=-0.3, heads=2), "beta": (0.3, 1.0)},
    {"width": 6, "direction": directions.FromInput(dot=0.2), "beta": 1.0, "spectrum": spectra.S4DLin()},
    {"width": 6, "memory": cells.SlowMemory(feedback=-0.5), "beta": 1.0, "gain": drive.LRU()},
    {"width": 6, "memory": cells.SlowMemory(), "beta": 0.5, "spectrum": spectra.S4DInv(), "gain": drive.ZOH()},
    {"width": 6, "conjugate": conjugates.Diagonal(), "beta": 0, "rope": drive.RoPE(), "start": True},
    {"width": 6, "phase": drive.InputPhase(0.7), "beta": 1.0},
    {"width": 6, "direction": directions.FromWholeState(heads=3, softness=0.3), "beta": 1.0},
    {"width": 6, "phase": drive.InputPhase(0.7), "beta": 0.5, "start": True, "spectrum": spectra.S4DInv()},
    {"width": 6, "phase": drive.InputPhase(0.7), "beta": 0.5, "memory": cells.SlowMemory()},
    {"width": 5, "state_size": 3, "beta": 30.0, "spectrum": spectra.Linspace(dt_min=1.0, dt_max=3.0)},
]
covering_cells: list[dict | str] = [*solver_layers, "GRUCell", "LSTMCell", "RNNCell", "TanhRNN", "from_function"]
all_cells: list[dict | str] = [*solver_layers, *other_cells, *legal]


def cell_name(axes: dict | str) -> str:
    """Return a test id for a cell."""
    return axes if isinstance(axes, str) else name_of(axes)


def build_cell(axes: dict | str) -> cells.Cell:
    """Build the cell of a layer, or another cell by its name in `other_cells`."""
    return other_cells[axes]() if isinstance(axes, str) else build(axes).cell


class Combination(NamedTuple):
    """A cell, and the names of the parts of a solver for it."""

    axes: dict | str
    linearization: str
    damping: str
    blocks: str

    @property
    def takes_resets(self) -> bool:
        """Whether the solver supports resets. A convolution does not: its transition is the same at every step."""
        return self.linearization != "Conv, by FFT"

    def solver(self, **options) -> solvers.Solver:
        """Build the solver."""
        solver = all_linearizations[self.linearization](all_dampings[self.damping], **options)
        blocks = all_blocks[self.blocks]
        return solver if blocks is None else solvers.BlockWise(solver, **blocks)

    def __str__(self) -> str:
        return " · ".join((self.linearization, self.damping, self.blocks, cell_name(self.axes)))


def has_conjugate(axes: dict | str) -> bool:
    """Return whether the step is M x + drive: every ADPT cell, also with a slow memory, but not `Stateful`."""
    return not isinstance(axes, str) and not isinstance(axes.get("conjugate"), conjugates.Stateful)


def is_legal(axes: dict | str, linearization: str, damping: str) -> bool:
    """Return whether a cell supports a linearization with a damping; every legal pair may be run block-wise."""
    layer = {} if isinstance(axes, str) else axes
    conjugate = layer.get("conjugate", conjugates.Exact())
    memory = bool(layer.get("memory"))
    if linearization in ("Forward", "Conv") and not has_conjugate(axes):
        return False
    if linearization == "Conv, by FFT" and (memory or layer.get("phase") or not has_conjugate(axes)):
        return False  # a slow memory couples pairs of state dimensions, and a phase differs from step to step
    if linearization == "Koopman, polar":  # one Q, of one plane and one head, around Λ̄ itself
        heads = getattr(layer.get("direction"), "heads", 1)
        one_plane = isinstance(conjugate, (conjugates.Exact, conjugates.Product)) and conjugate.planes == 1
        if not has_conjugate(axes) or not one_plane or heads > 1 or memory or layer.get("start") or layer.get("phase"):
            return False
    if damping.startswith("proximal"):  # needs a bound on the state: ‖Q Λ̄ Q'‖ = |λ̄|_max, but not for Taylor's M
        return has_conjugate(axes) and not memory and not isinstance(conjugate, conjugates.Taylor)
    return True


def legal_combinations(axes: dict | str) -> Iterator[Combination]:
    """Yield every solver that a cell supports. This function documents which combinations are legal."""
    for linearization in all_linearizations:
        for damping in all_dampings:
            if is_legal(axes, linearization, damping):
                for blocks in all_blocks:
                    yield Combination(axes, linearization, damping, blocks)


def covering_combinations(axes: dict | str) -> Iterator[Combination]:
    """Yield a solver for each linearization that a cell supports; for the first cell, those that would be missing, too.

    Over `covering_cells`, every pair of linearization and cell, of damping and linearization, and of block-wise and
    linearization occurs.
    """
    number = all_cells.index(axes)
    blocks = list(all_blocks)
    for i, linearization in enumerate(all_linearizations):
        chosen = _choose_damping(axes, linearization)
        if not number:
            elsewhere = {damping for other in covering_cells[1:] for damping in _choose_damping(other, linearization)}
            chosen += [name for name in all_dampings if name not in elsewhere and name not in chosen]
        for j, damping in enumerate(chosen):
            yield Combination(axes, linearization, damping, blocks[(number + 2 * i + j) % len(blocks)])


def _choose_damping(axes: dict | str, linearization: str) -> list[str]:
    """Return one damping that fits, another one for the next cell and the next linearization; none if none fits."""
    dampings = [damping for damping in all_dampings if is_legal(axes, linearization, damping)]
    number = all_cells.index(axes) + list(all_linearizations).index(linearization)
    return [dampings[number % len(dampings)]] if dampings else []


# Every kind of layer and model with inputs (batch, time, KIND_WIDTH), for tests of what users do with PyTorch modules.

KIND_WIDTH = 8
_kind_spec = LayerSpec(cells.ADPTSpec(KIND_WIDTH, beta=1.0))
_default_spec = ADPTNet(2 * KIND_WIDTH).spec

layer_kinds = {
    "default": lambda: ADPTNet(KIND_WIDTH),
    "real": lambda: ADPTNet.paper(KIND_WIDTH, beta=1.0),
    "complex": lambda: ADPTNet.paper(KIND_WIDTH, beta=1.0, spectrum=spectra.S4DInv()),
    "heads": lambda: ADPTNet.paper(KIND_WIDTH, beta=(0.5, 1.0), direction=directions.FromState(heads=2)),
    "LayerNorm": lambda: ADPTNet.paper(KIND_WIDTH, beta=1.0, direction=directions.FromState(layer_norm=True)),
    "LayerNorm, heads": lambda: ADPTNet.paper(KIND_WIDTH, direction=directions.FromState(layer_norm=True, heads=2)),
    "coupled": lambda: CoupledADPTNet(KIND_WIDTH, beta=1.0),
    "Taylor": lambda: TaylorADPTNet(KIND_WIDTH, order=2),
    "linear": lambda: LinearADPTNet(KIND_WIDTH, beta=1.0),
    "product": lambda: ADPTNet.paper(KIND_WIDTH, beta=1.0, conjugate=conjugates.Product(2)),
    "low parameter": lambda: ADPTNet.paper(KIND_WIDTH, beta=1.0, projection=projections.LowParam((4, 2), 2, bias=True)),
    "orthogonal": lambda: ADPTNet.paper(KIND_WIDTH, beta=1.0, projection=projections.Orthogonal(), start=True),
    "gate and rope": lambda: ADPTNet.paper(
        KIND_WIDTH, beta=TrainableBeta((1.0,)), gate=drive.SoftplusGate(), rope=drive.RoPE(), gain=drive.LRU(tied=False)
    ),
    "phase": lambda: ADPTNet.paper(KIND_WIDTH, beta=1.0, phase=drive.InputPhase(0.7)),
    "whole state": lambda: ADPTNet.paper(KIND_WIDTH, beta=1.0, direction=directions.FromWholeState(2, 0.2)),
    "spiking": lambda: SpikingADPTNet(KIND_WIDTH, threshold=0.05),
    "stateful": lambda: ADPTNet.paper(KIND_WIDTH, state_size=3, beta=0.5, conjugate=conjugates.Stateful()),
    "GRU": lambda: Recurrent(cells.GRU(KIND_WIDTH)),
    "wrapped LSTM": lambda: Recurrent(cells.from_torch(nn.LSTMCell(KIND_WIDTH, KIND_WIDTH))),
}
model_kinds = {
    "stack": lambda: Stack(_kind_spec, 2),
    "bidirectional": lambda: Bidirectional(_kind_spec),
    "block": lambda: BlockSpec(_kind_spec).build(),
    "SwiGLU block": lambda: SwiGLUBlockSpec(_kind_spec).build(),
    "gated": lambda: GatedSpec(_default_spec, KIND_WIDTH).build(),
    "gated, no convolution": lambda: GatedSpec(_default_spec, KIND_WIDTH, taps=0).build(),
    "gated GRU": lambda: GatedSpec(LayerSpec(cells.GRU(KIND_WIDTH)), KIND_WIDTH, taps=2).build(),
    "mixer": lambda: baseline("hawk", KIND_WIDTH).build(),
    "model": lambda: SequenceModel(BlockSpec(_kind_spec), depth=2, input_size=KIND_WIDTH, output_size=3),
    "model, batch norm": lambda: SequenceModel(
        BlockSpec(_kind_spec, norm="batch", prenorm=False), input_size=KIND_WIDTH, output_size=3, head="mean"
    ),
    "model, preset": lambda: SequenceModel(presets.signals(6), depth=2, input_size=KIND_WIDTH, output_size=3),
    "model, bidirectional": lambda: SequenceModel(
        BidirectionalSpec(_kind_spec), input_size=KIND_WIDTH, output_size=3, head="last"
    ),
    "model of a mixer": lambda: SequenceModel(
        BlockSpec(baseline("delta-net", KIND_WIDTH)), input_size=KIND_WIDTH, output_size=3
    ),
    "spiking model": lambda: spiking_adpt_for_speech(
        16, input_size=KIND_WIDTH, output_size=3, dropout=0.0, threshold=0.05
    ).build(),
}
all_kinds = {**layer_kinds, **model_kinds}
few_kinds = {name: all_kinds[name] for name in ("real", "complex", "LayerNorm", "coupled", "GRU", "stack", "model")}
