"""A megabyte of Shakespeare (Karpathy's tinyshakespeare), to predict character by character."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.tasks.files import damaged, data_folders, find
from paceline.tasks.models import CharTransformer
from paceline.tasks.task import Task

__all__ = ["load", "windows"]

FILE = "tinyshakespeare.txt"
REMEDY = (
    f"set PACELINE_DATA=<the folder with {FILE}>, which is data/tinyshakespeare/input.txt "
    "of https://github.com/karpathy/char-rnn"
)
CONTEXT = 64
TRAIN = 0.9  # the part of the text, from its beginning, that is learnt from


def load() -> Task:
    """The task ``tinyshakespeare``: inputs and targets int64 (64,), numbers of characters."""
    [path] = find("tinyshakespeare", [FILE], data_folders(), REMEDY)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, error, REMEDY) from error
    cut = int(TRAIN * len(text))
    if len(text) - cut <= CONTEXT:
        raise damaged(path, f"{len(text)} characters are not enough for a test set", REMEDY)
    vocabulary = {character: place for place, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([vocabulary[character] for character in text])
    return Task(
        name="tinyshakespeare",
        train=TensorDataset(*windows(ids[:cut], CONTEXT)),
        test=TensorDataset(*windows(ids[cut:], CONTEXT)),
        models={"transformer": lambda: CharTransformer(len(vocabulary), CONTEXT)},
    )


def windows(ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Consecutive pieces of a text (N, length) and, for each of their characters, the one that follows it."""
    count = (len(ids) - 1) // length
    return ids[: count * length].view(count, length), ids[1 : count * length + 1].view(count, length)
