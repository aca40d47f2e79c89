from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline import tasks
from paceline.errors import DataMissing
from paceline.tasks import Task

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def task() -> Task:
    return tasks.load("digits")


def test_shapes(task: Task) -> None:
    assert (task.name, len(task.train), len(task.test)) == ("digits", 1437, 360)
    image, label = task.train[0]
    assert (image.shape, image.dtype) == ((1, 8, 8), torch.float32)
    assert (label.shape, label.dtype) == ((), torch.int64)


def test_train_and_test_are_all_digits_once(task: Task) -> None:
    from sklearn.datasets import load_digits

    assert isinstance(task.train, TensorDataset)
    assert isinstance(task.test, TensorDataset)
    images, labels = (torch.cat(pair) for pair in zip(task.train.tensors, task.test.tensors, strict=True))
    rows = torch.cat([(images.flatten(1) - images.min()) * 16, labels.unsqueeze(1)], 1)
    original = load_digits()
    expected = torch.cat([torch.tensor(original.data), torch.tensor(original.target).unsqueeze(1)], 1)
    # (v / 16 - mean) + mean in float32 is off by a rounding or two; the numbers are whole
    assert sorted(rows.round().int().tolist()) == sorted(expected.int().tolist())
    torch.testing.assert_close(rows, rows.round(), rtol=0, atol=1e-4)


def test_training_pixels_have_mean_zero_and_range_one(task: Task) -> None:
    assert isinstance(task.train, TensorDataset)
    images = task.train.tensors[0]
    assert images.double().mean().item() == pytest.approx(0, abs=1e-7)  # float32 rounding of the mean
    assert (images.max() - images.min()).item() == pytest.approx(1, abs=1e-6)


def test_the_split_is_always_the_same_and_mixed(task: Task) -> None:
    torch.manual_seed(123)
    again = tasks.load("digits")
    assert torch.equal(task.test[:][0], again.test[:][0])  # type: ignore[index]
    counts = task.test[:][1].bincount(minlength=10)  # type: ignore[index]
    assert counts.min() >= 20  # 36 are expected; without mixing some class has more than twice another


def test_plain_sgd_learns_it(task: Task) -> None:
    net = task.model("mlp", seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    loader = DataLoader(task.train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    before = task.evaluate(net)
    for _ in range(30):
        for batch in loader:
            optimizer.zero_grad()
            task.loss(net, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    after = task.evaluate(net)
    assert before["accuracy"] < 0.3  # chance is 0.1
    # Seeds 0 to 3 gave 0.975 to 0.983; one wrong image is 0.003.
    assert after["accuracy"] >= 0.96
    assert after["loss"] < 0.2


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataMissing, match=r"digits needs scikit-learn.*pip install paceline\[tasks\]"):
        tasks.load("digits")
