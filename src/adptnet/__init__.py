"""adptnet: a recurrent layer with prescribed timescales and a degree of non-linearity set by one number, β.

layer = adptnet.ADPTNet(width=64)
y, state = layer(torch.randn(4, 1024, 64))
"""

import sys

from . import analysis, cells, errors, nn, optim, solvers
from ._version import __version__
from .analysis.explain import explain
from .analysis.verify import verify
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
    presets,
)
from .ops._backends import backends
from .recurrence import conjugates, directions, drive, projections, retractions, spectra
from .recurrence.beta import TrainableBeta
from .solvers import adjoints
from .spec import Spec

# Short import paths of the components: `from adptnet.spectra import Linspace` as well as `from adptnet import spectra`.
for _component in (adjoints, conjugates, directions, drive, presets, projections, retractions, spectra):
    sys.modules[f"{__name__}.{_component.__name__.rpartition('.')[2]}"] = _component

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
    "explain",
    "load",
    "nn",
    "optim",
    "presets",
    "projections",
    "retractions",
    "save",
    "solvers",
    "spectra",
    "verify",
]
