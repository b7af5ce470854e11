"""Training: one small loop, its settings, and what it writes."""

from .config import TrainConfig
from .optim import param_groups
from .records import environment, write_json
from .trainer import Record, TrainingDiverged, evaluate, train

__all__ = [
    "Record",
    "TrainConfig",
    "TrainingDiverged",
    "environment",
    "evaluate",
    "param_groups",
    "train",
    "write_json",
]
