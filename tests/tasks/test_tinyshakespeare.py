from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline import tasks
from paceline.errors import DataMissing
from paceline.tasks.tinyshakespeare import windows

TEXT = "To be, or not to be: that is the question.\n" * 40  # 1720 characters


@pytest.fixture(autouse=True)
def _only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))


def test_shapes(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text(TEXT)
    task = tasks.load("tinyshakespeare")
    # 1548 characters to learn from and 172 to test with, in windows of 64 and one more to predict
    assert (task.name, len(task.train), len(task.test)) == ("tinyshakespeare", 24, 2)
    for tensor in task.train[0]:
        assert (tensor.shape, tensor.dtype) == ((64,), torch.int64)
    assert set(task.evaluate(task.model())) == {"accuracy", "loss"}


def test_the_text_can_be_read_back(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text(TEXT)
    task = tasks.load("tinyshakespeare")
    letters = sorted(set(TEXT))
    for data, text in ((task.train, TEXT[:1548]), (task.test, TEXT[1548:])):
        assert isinstance(data, TensorDataset)
        inputs, targets = ("".join(letters[i] for i in tensor.flatten()) for tensor in data.tensors)
        assert inputs == text[: len(inputs)]
        assert targets == text[1 : len(inputs) + 1]


def test_characters_are_not_bytes(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text("ä€😀" * 500, encoding="utf-8")
    assert tasks.load("tinyshakespeare").model()(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 3)


def test_it_can_be_learnt(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text("abcdefg" * 100)
    task = tasks.load("tinyshakespeare")
    model = task.model(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, task.train[:]).backward()  # type: ignore[index, no-untyped-call]
        optimizer.step()
    # Each letter has one successor; guessing gets a seventh.
    assert task.evaluate(model)["accuracy"] > 0.9


@pytest.mark.parametrize(("length", "count"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (11, 2)])
def test_windows_use_every_whole_piece(length: int, count: int) -> None:
    inputs, targets = windows(torch.arange(length), 4)
    assert inputs.shape == targets.shape == (count, 4)
    assert inputs.flatten().tolist() == list(range(4 * count))
    assert torch.equal(targets, inputs + 1)


def test_a_missing_file_says_where_and_how(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=rf"tinyshakespeare.txt; looked in {tmp_path}; set PACELINE_DATA="):
        tasks.load("tinyshakespeare")


def test_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA")
    with pytest.raises(DataMissing, match=r"looked in PACELINE_DATA, which is not set; set PACELINE_DATA="):
        tasks.load("tinyshakespeare")


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "0 characters are not enough"), (b"x" * 640, "640 characters are not enough"), (b"\xff" * 999, "utf-8")],
    ids=["empty", "short", "binary"],
)
def test_a_file_that_will_not_do_is_named(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "tinyshakespeare.txt").write_bytes(data)
    with pytest.raises(DataMissing, match=rf"{tmp_path}/tinyshakespeare.txt is damaged.*{why}"):
        tasks.load("tinyshakespeare")


def test_the_shortest_text_that_will_do(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"x" * 641)
    assert len(tasks.load("tinyshakespeare").test) == 1
