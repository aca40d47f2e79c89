from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline import tasks
from paceline.errors import DataMissing
from paceline.tasks.sst2 import LENGTH

TRAIN = [("a fine film", 1), ("a dull film", 0), ("fine , fine", 1), ('dull "dull"', 0)]


def write(folder: Path, train: list[tuple[str, int]] = TRAIN, test: list[tuple[str, int]] = TRAIN) -> None:
    folder.mkdir(exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        text = "".join(f"{sentence} \t{label}\n" for sentence, label in rows)
        (folder / f"{name}.tsv").write_text(f"sentence\tlabel\n{text}", encoding="utf-8")


@pytest.fixture(autouse=True)
def _only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))


@pytest.mark.parametrize("below", [".", "sst2"])
def test_words_have_numbers(tmp_path: Path, below: str) -> None:
    write(tmp_path / below, test=[("fine \u00e4 film", 1), ("a " * 100, 0)])
    task = tasks.load("sst2")
    assert isinstance(task.train, TensorDataset)
    assert isinstance(task.test, TensorDataset)
    assert (task.name, len(task.train), len(task.test)) == ("sst2", 4, 2)
    numbers, labels = task.train.tensors
    # Known are those that are there twice, in order: a, dull, film, fine. A quote belongs to its word.
    assert numbers[:, :4].tolist() == [[2, 5, 4, 0], [2, 3, 4, 0], [5, 1, 5, 0], [3, 1, 0, 0]]
    assert labels.tolist() == [1, 0, 1, 0]
    unknown, longest = task.test.tensors[0]
    assert unknown[:4].tolist() == [5, 1, 4, 0]
    assert longest.tolist() == [2] * LENGTH


@pytest.mark.parametrize("name", ["mean", "bag"])
def test_models_see_words_and_not_what_is_behind_them(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    task = tasks.load("sst2")
    model = task.model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        numbers = torch.tensor([[2, 5, 4, 0], [4, 2, 5, 0], [2, 5, 4, 4]])
        one, other, more = model(numbers)
        torch.testing.assert_close(one, other)
        assert not torch.allclose(one, more)
        torch.testing.assert_close(model(numbers[:1, :3])[0], one)
        assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize("name", ["mean", "bag"])
def test_it_can_be_learnt(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    task = tasks.load("sst2")
    model = task.model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(model, task.train[:]).backward()  # type: ignore[index, no-untyped-call]
        optimizer.step()
    assert task.evaluate(model)["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sentence\tlabel\n", "no phrases"),
        ("sentence\tlabel\nfine\t2\n", "labels other than 0 and 1"),
        ("sentence\tlabel\nfine\tgood\n", "ValueError"),
        ("words\tlabel\nfine\t1\n", "KeyError"),
        ("sentence\tlabel\nfine\n", "TypeError"),
        (b"sentence\tlabel\n\xff\t1\n", "UnicodeDecodeError"),
    ],
)
def test_damaged(tmp_path: Path, text: str | bytes, why: str) -> None:
    write(tmp_path)
    (tmp_path / "test.tsv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataMissing, match=rf"test.tsv is damaged.*{why}"):
        tasks.load("sst2")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"sst2 needs train.tsv, test.tsv; looked in .*; set PACELINE_DATA="):
        tasks.load("sst2")
