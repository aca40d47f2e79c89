"""Captions of pictures, in English and in German (Multi30k, Elliott et al. 2016), to translate word by word."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.tasks.files import damaged, data_folders, find
from paceline.tasks.task import Task
from paceline.tasks.translator import Translator

__all__ = ["FILES", "REMEDY", "load", "words"]

FILES = ["train.en.gz", "train.de.gz", "test_2016_flickr.en.gz", "test_2016_flickr.de.gz"]
REMEDY = (
    "set PACELINE_DATA=<the folder with these files, or above their folder multi30k>: data/task1/raw "
    "of https://github.com/multi30k/dataset"
)
LENGTH = 32  # words and the end; one caption in 600 is longer, and loses its last words
SEEN = 5  # times that a word must be in the training set to be known
PADDING, UNKNOWN, BEGIN, END = range(4)


def load() -> Task:
    """The task ``multi30k``, from English to German.

    Inputs are int64 (2, 32), numbers of words with zeros behind: a caption, and its translation up to the word before.
    Targets are int64 (32,): the words of the translation and its end. Those that are 0 do not count.
    """
    train_english, train_german, test_english, test_german = find("multi30k", FILES, data_folders("multi30k"), REMEDY)
    train, test = _pairs(train_english, train_german), _pairs(test_english, test_german)
    english, german = (_vocabulary(captions) for captions in zip(*train, strict=True))
    return Task(
        name="multi30k",
        train=TensorDataset(*_tensors(train, english, german)),
        test=TensorDataset(*_tensors(test, english, german)),
        models={"translator": lambda: Translator(len(english) + END + 1, len(german) + END + 1, LENGTH)},
        padding=PADDING,
    )


def words(caption: str) -> list[str]:
    """Words and marks of a caption, in small letters."""
    return re.findall(r"\w+|[^\w\s]", caption.lower())


def _pairs(english: Path, german: Path) -> list[tuple[list[str], list[str]]]:
    """The words of every caption in both languages."""
    ours, theirs = _read(english), _read(german)
    if len(ours) != len(theirs):
        raise damaged(german, f"it has {len(theirs)} captions, and {english.name} has {len(ours)}", REMEDY)
    return list(zip(ours, theirs, strict=True))


def _read(path: Path) -> list[list[str]]:
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}", REMEDY) from error
    if not text.strip():
        raise damaged(path, "no captions", REMEDY)
    return [words(line) for line in text.removesuffix("\n").split("\n")]


def _vocabulary(captions: Iterable[list[str]]) -> dict[str, int]:
    counts = Counter(word for caption in captions for word in caption)
    known = sorted(word for word, count in counts.items() if count >= SEEN)
    return {word: place for place, word in enumerate(known, END + 1)}


def _tensors(
    pairs: list[tuple[list[str], list[str]]], english: dict[str, int], german: dict[str, int]
) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.full((len(pairs), 2, LENGTH), PADDING), torch.full((len(pairs), LENGTH), PADDING)
    for place, (caption, translation) in enumerate(pairs):
        source, target = _numbers(caption, english), _numbers(translation, german)
        inputs[place, 0, : len(source)] = source
        inputs[place, 1, 0] = BEGIN
        inputs[place, 1, 1 : len(target)] = target[:-1]
        targets[place, : len(target)] = target
    return inputs, targets


def _numbers(caption: list[str], vocabulary: dict[str, int]) -> Tensor:
    return torch.tensor([*(vocabulary.get(word, UNKNOWN) for word in caption[: LENGTH - 1]), END])
