"""Paceline: data-parallel PyTorch training on clusters as they really are."""

from paceline import balance, batch, codec, lr, optim, order, recipes, record, sync
from paceline.checkpoint import Checkpoint
from paceline.errors import (
    CheckpointError,
    DataMissing,
    FleetError,
    Interrupted,
    LabError,
    LoopError,
    NonFiniteLoss,
    PacelineError,
    SettingError,
    WorkerLost,
    WorkersDisagree,
)
from paceline.fleet import Fleet
from paceline.identity import __version__
from paceline.probe import Probe
from paceline.records import GradientStats, Note, Plan, Progress, Round
from paceline.run import Run
from paceline.step import Step

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DataMissing",
    "Fleet",
    "FleetError",
    "GradientStats",
    "Interrupted",
    "LabError",
    "LoopError",
    "NonFiniteLoss",
    "Note",
    "PacelineError",
    "Plan",
    "Probe",
    "Progress",
    "Round",
    "Run",
    "SettingError",
    "Step",
    "WorkerLost",
    "WorkersDisagree",
    "__version__",
    "balance",
    "batch",
    "codec",
    "lr",
    "optim",
    "order",
    "recipes",
    "record",
    "sync",
]
