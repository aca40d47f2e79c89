"""Phrases from film reviews, good or bad (SST-2, Socher et al. 2013, as in GLUE)."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.tasks.files import damaged, data_folders, find
from paceline.tasks.models import Words
from paceline.tasks.task import Task

__all__ = ["FILES", "REMEDY", "load"]

FILES = ["train.tsv", "test.tsv"]
REMEDY = (
    "set PACELINE_DATA=<the folder with these files, or above their folder sst2>: the sentiment data of GLUE, tables "
    "with the columns sentence and label"
)
LENGTH = 48  # words; few phrases are longer, and lose their end
SEEN = 2  # times that a word must be in the training set to be known
PADDING, UNKNOWN = 0, 1


def load() -> Task:
    """The task ``sst2``: inputs int64 (48,), numbers of words with zeros behind; targets 0 (bad) or 1."""
    parts = [_read(path) for path in find("sst2", FILES, data_folders("sst2"), REMEDY)]
    counts = Counter(word for words, _ in parts[0] for word in words)
    known = sorted(word for word, count in counts.items() if count >= SEEN)
    vocabulary = {word: place for place, word in enumerate(known, UNKNOWN + 1)}
    train, test = (TensorDataset(*_tensors(part, vocabulary)) for part in parts)
    size = len(vocabulary) + UNKNOWN + 1
    return Task(
        name="sst2",
        train=train,
        test=test,
        models={"mean": lambda: Words(size, 2, width=64), "bag": lambda: Words(size, 2)},
    )


def _read(path: Path) -> list[tuple[list[str], int]]:
    """The words and the label of every phrase."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                (row["sentence"].split(), int(row["label"]))
                for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
            ]
    except (UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}", REMEDY) from error
    if not rows or {label for _, label in rows} - {0, 1}:
        raise damaged(path, "no phrases, or labels other than 0 and 1", REMEDY)
    return rows


def _tensors(phrases: list[tuple[list[str], int]], vocabulary: dict[str, int]) -> tuple[Tensor, Tensor]:
    numbers = torch.full((len(phrases), LENGTH), PADDING)
    for row, (words, _) in zip(numbers, phrases, strict=True):
        places = [vocabulary.get(word, UNKNOWN) for word in words[:LENGTH]]
        row[: len(places)] = torch.tensor(places, dtype=torch.long)
    return numbers, torch.tensor([label for _, label in phrases])
