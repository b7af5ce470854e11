"""Training: one loop for a laptop and for many processes, its settings, and what it writes."""

from .config import TrainConfig
from .evaluation import evaluate
from .experiment import Experiment
from .failure import Diagnosis, TrainingDiverged, diagnose
from .folder import Keeping, RunFolder
from .keepers import Keeper
from .lock import FolderInUse
from .metrics import read_metrics
from .optim import Adam, AdamW, RMSprop
from .places import Accelerated, Alone, Place, launched
from .records import environment, write_json
from .runs import finished, replay, run
from .schedules import Constant, Cosine, Linear, ReduceOnPlateau
from .signals import Interrupted
from .store import CheckpointWarning
from .telemetry import telemetry
from .trainer import Record, train

__all__ = [
    "Accelerated",
    "Adam",
    "AdamW",
    "Alone",
    "CheckpointWarning",
    "Constant",
    "Cosine",
    "Diagnosis",
    "Experiment",
    "FolderInUse",
    "Interrupted",
    "Keeper",
    "Keeping",
    "Linear",
    "Place",
    "RMSprop",
    "Record",
    "ReduceOnPlateau",
    "RunFolder",
    "TrainConfig",
    "TrainingDiverged",
    "diagnose",
    "environment",
    "evaluate",
    "finished",
    "launched",
    "read_metrics",
    "replay",
    "run",
    "telemetry",
    "train",
    "write_json",
]
