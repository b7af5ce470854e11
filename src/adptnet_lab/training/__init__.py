"""Training: one loop for laptops, multi-process and Slurm runs, with bit-exact resume."""

from .._runtime import Interrupted
from .checkpoint_store import CheckpointWarning
from .config import TrainConfig
from .distributed import AccelerateStrategy
from .divergence import Diagnosis, TrainingDiverged, diagnose
from .evaluation import evaluate
from .experiment import Experiment
from .optimizers import Adam, AdamW, RMSprop
from .recorder import NullRecorder, Recorder
from .run_folder import RunFolder, SaveOptions
from .run_lock import FolderInUse
from .run_metrics import read_metrics
from .runs import load_model, read_experiment, read_result, replay, run
from .schedules import Constant, Cosine, Linear, ReduceOnPlateau
from .strategy import SingleProcess, Strategy, detect_strategy
from .telemetry import collect_telemetry
from .trainer import Record, train

__all__ = [
    "AccelerateStrategy",
    "Adam",
    "AdamW",
    "CheckpointWarning",
    "Constant",
    "Cosine",
    "Diagnosis",
    "Experiment",
    "FolderInUse",
    "Interrupted",
    "Linear",
    "NullRecorder",
    "RMSprop",
    "Record",
    "Recorder",
    "ReduceOnPlateau",
    "RunFolder",
    "SaveOptions",
    "SingleProcess",
    "Strategy",
    "TrainConfig",
    "TrainingDiverged",
    "collect_telemetry",
    "detect_strategy",
    "diagnose",
    "evaluate",
    "load_model",
    "read_experiment",
    "read_metrics",
    "read_result",
    "replay",
    "run",
    "train",
]
