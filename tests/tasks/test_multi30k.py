from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline import tasks
from paceline.errors import DataMissing
from paceline.tasks.multi30k import BEGIN, END, FILES, LENGTH, SEEN, UNKNOWN, words

# Known are those that are there five times, in order, from number 4: . a dog house, and . ein haus hund.
TRAIN = [("A dog.", "Ein Hund."), ("A house.", "Ein Haus.")] * SEEN + [("A cat.", "Eine Katze.")]
Pairs = Sequence[tuple[str, str]]


def write(folder: Path, train: Pairs = TRAIN, test: Pairs = TRAIN) -> None:
    folder.mkdir(exist_ok=True)
    for name, pairs in (("train", train), ("test_2016_flickr", test)):
        for language, captions in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            text = "".join(f"{caption}\n" for caption in captions)
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture(autouse=True)
def _only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))


@pytest.mark.parametrize("below", [".", "multi30k"])
def test_words_have_numbers(tmp_path: Path, below: str) -> None:
    write(tmp_path / below, test=[("A\u2028dog dog", "Hund"), ("a " * 100, "ein " * 100), ("", "")])
    task = tasks.load("multi30k")
    assert isinstance(task.train, TensorDataset)
    assert isinstance(task.test, TensorDataset)
    assert (task.name, len(task.train), len(task.test)) == ("multi30k", 11, 3)
    inputs, targets = task.train.tensors
    assert (inputs.shape, inputs.dtype) == ((11, 2, LENGTH), torch.int64)
    assert (targets.shape, targets.dtype) == ((11, LENGTH), torch.int64)
    assert inputs[0, :, :5].tolist() == [[5, 6, 4, END, 0], [BEGIN, 5, 7, 4, 0]]
    assert targets[0, :5].tolist() == [5, 7, 4, END, 0]
    assert inputs[10, :, :5].tolist() == [[5, UNKNOWN, 4, END, 0], [BEGIN, UNKNOWN, UNKNOWN, 4, 0]]
    # A separator of lines that is none in these files, captions that are too long, and none.
    inputs, targets = task.test.tensors
    assert inputs[0, :, :5].tolist() == [[5, 6, 6, END, 0], [BEGIN, 7, 0, 0, 0]]
    assert inputs[1].tolist() == [[5] * (LENGTH - 1) + [END], [BEGIN] + [5] * (LENGTH - 1)]
    assert targets[1].tolist() == [5] * (LENGTH - 1) + [END]
    assert inputs[2, :, :2].tolist() == [[END, 0], [BEGIN, 0]]
    assert targets[2, :2].tolist() == [END, 0]
    assert task.model()(inputs).isfinite().all()


def test_words() -> None:
    assert words("Zwei weiße Männer, im Freien (mit T-Shirt).") == (
        ["zwei", "weiße", "männer", ",", "im", "freien", "(", "mit", "t", "-", "shirt", ")", "."]
    )


def test_what_counts_are_words_and_ends(tmp_path: Path) -> None:
    write(tmp_path, test=[("A dog.", "Hund"), ("A dog.", "Ein Hund.")])
    task = tasks.load("multi30k")
    assert task.weight(task.test[:]) == 2 + 4  # type: ignore[index]


def test_it_can_be_learnt(tmp_path: Path) -> None:
    write(tmp_path, train=TRAIN[:-1], test=TRAIN[:2])
    task = tasks.load("multi30k")
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, task.train[:]).backward()  # type: ignore[index, no-untyped-call]
        optimizer.step()
    # One word of four has to be read in the sentence; who does not gets 7 of 8 at best.
    assert task.evaluate(model)["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"A dog.\n", "BadGzipFile"),
        (gzip.compress(b"A dog.\n" * 11)[:-9], "EOFError"),
        (gzip.compress(b"\xff\n" * 11), "UnicodeDecodeError"),
        (gzip.compress(b"\n"), "no captions"),
        (gzip.compress(b"Ein Hund.\n" * 10), "it has 10 captions, and train.en.gz has 11"),
    ],
    ids=["unpacked", "cut", "binary", "empty", "short"],
)
def test_damaged(tmp_path: Path, data: bytes, why: str) -> None:
    write(tmp_path)
    (tmp_path / "train.de.gz").write_bytes(data)
    with pytest.raises(DataMissing, match=rf"train.de.gz is damaged.*{why}"):
        tasks.load("multi30k")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"multi30k needs train.en.gz, .*; looked in .*; set PACELINE_DATA="):
        tasks.load("multi30k")


def test_a_part_is_missing(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / FILES[3]).unlink()
    with pytest.raises(DataMissing, match=r"\(without test_2016_flickr.de.gz\)"):
        tasks.load("multi30k")
