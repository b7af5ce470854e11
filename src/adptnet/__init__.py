"""adptnet: a recurrent layer with prescribed timescales and one dial for non-linearity.

layer = adptnet.ADPTNet(width=64, beta=0.125)
y, state = layer(torch.randn(4, 1024, 64))
"""

from . import (
    adjoints,
    analysis,
    cells,
    conjugates,
    directions,
    drive,
    errors,
    mixers,
    nn,
    projections,
    retractions,
    solvers,
    spectra,
    tasks,
    training,
)
from ._version import __version__
from .beta import TrainableBeta
from .cells import ADPTState
from .checkpoint import load, save
from .nn import (
    ADPTNet,
    Bidirectional,
    CoupledADPTNet,
    LinearADPTNet,
    Recurrent,
    SequenceModel,
    SpikingADPTNet,
    Stack,
    TaylorADPTNet,
    verify,
)
from .ops.native import backends
from .spec import Spec

__all__ = [
    "ADPTNet",
    "ADPTState",
    "Bidirectional",
    "CoupledADPTNet",
    "LinearADPTNet",
    "Recurrent",
    "SequenceModel",
    "Spec",
    "SpikingADPTNet",
    "Stack",
    "TaylorADPTNet",
    "TrainableBeta",
    "__version__",
    "adjoints",
    "analysis",
    "backends",
    "cells",
    "conjugates",
    "directions",
    "drive",
    "errors",
    "load",
    "mixers",
    "nn",
    "projections",
    "retractions",
    "save",
    "solvers",
    "spectra",
    "tasks",
    "training",
    "verify",
]
