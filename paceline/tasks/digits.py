"""8×8 images of handwritten digits, bundled with scikit-learn: the task that needs no file."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from paceline.tasks.files import uninstalled
from paceline.tasks.models import MLP, LeNet
from paceline.tasks.task import Task

__all__ = ["load"]

TRAIN = 1437  # of 1797; the other 360 are the test set


def load() -> Task:
    """The task ``digits``: inputs float32 (1, 8, 8), ten classes."""
    try:
        from sklearn.datasets import load_digits  # slow to import, and not everybody has it
    except ImportError as error:
        raise uninstalled("digits", "scikit-learn") from error
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).unsqueeze(1) / 16  # whole numbers 0..16, as float64
    labels = torch.from_numpy(bunch.target).long()
    # What one person wrote stands together in the file: unmixed, the test set would have writers of its own.
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = mixed[:TRAIN], mixed[TRAIN:]
    inputs = (pixels - pixels[train].mean()).float()
    return Task(
        name="digits",
        train=TensorDataset(inputs[train], labels[train]),
        test=TensorDataset(inputs[test], labels[test]),
        models={"mlp": lambda: MLP([64, 128, 64, 10]), "lenet": lambda: LeNet(1, 8, 10)},
    )
