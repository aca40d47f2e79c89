"""The loaders on the real files, where this machine has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline import tasks
from paceline.errors import DataMissing
from paceline.tasks import Images, cifar10, fashion_mnist, multi30k, sst2, tinyshakespeare
from paceline.tasks.files import data_folders, find


def needs(files: Sequence[str], folders: Sequence[Path]) -> pytest.MarkDecorator:
    try:
        find("the test", files, folders, "set PACELINE_DATA")
    except DataMissing as error:
        return pytest.mark.skip(reason=str(error))
    return pytest.mark.skipif(False, reason="")


@needs(fashion_mnist.FILES, [*data_folders("fashion-mnist"), fashion_mnist.DEBIAN])
def test_fashion_mnist() -> None:
    task = tasks.load("fashion-mnist")
    assert isinstance(task.train, TensorDataset)
    assert isinstance(task.test, TensorDataset)
    images, labels = task.train.tensors
    assert images.shape == (60_000, 1, 28, 28)
    assert labels.bincount().tolist() == [6000] * 10
    assert task.test.tensors[1].bincount().tolist() == [1000] * 10
    # the constants have four digits
    assert images.double().mean().item() == pytest.approx(0, abs=1e-3)
    assert images.double().std().item() == pytest.approx(1, abs=1e-3)


@needs([tinyshakespeare.FILE], data_folders())
def test_tinyshakespeare() -> None:
    task = tasks.load("tinyshakespeare")
    assert (len(task.train), len(task.test)) == (15_685, 1_742)
    assert task.model()(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 65)


@needs(sst2.FILES, data_folders("sst2"))
def test_sst2() -> None:
    task = tasks.load("sst2")
    assert isinstance(task.train, TensorDataset)
    assert isinstance(task.test, TensorDataset)
    assert (len(task.train), len(task.test)) == (60_614, 872)
    assert task.test.tensors[1].sum() == 444
    assert (task.train.tensors[0][:, -1] == 0).float().mean() > 0.99  # few lose their end


@needs(multi30k.FILES, data_folders("multi30k"))
def test_multi30k() -> None:
    task = tasks.load("multi30k")
    assert isinstance(task.train, TensorDataset)
    assert (len(task.train), len(task.test)) == (29_000, 1_000)
    inputs, targets = task.train.tensors
    assert (targets[:, -1] == 0).float().mean() > 0.99  # few lose their end
    assert (inputs == multi30k.UNKNOWN).sum() < 0.1 * (inputs > 0).sum()


@pytest.mark.slow
@needs([cifar10.ARCHIVE], data_folders())
def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    task = tasks.load("cifar10")
    assert isinstance(task.train, Images)
    assert isinstance(task.test, Images)
    assert task.train.pixels.shape == (50_000, 3, 32, 32)
    assert task.train.labels.bincount().tolist() == [5000] * 10
    assert task.test.labels.bincount().tolist() == [1000] * 10
    images = torch.stack([image for image, _ in task.train.__getitems__(range(10_000))])
    # A fifth of the images, and JPEG has smoothed them: the contrast is about one percent lower.
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=0.03)
    torch.testing.assert_close(images.std((0, 2, 3)), torch.ones(3), rtol=0, atol=0.03)
