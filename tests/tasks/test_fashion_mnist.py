from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from paceline import tasks
from paceline.errors import DataMissing
from paceline.tasks import fashion_mnist

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = fashion_mnist.FILES


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    path.write_bytes(gzip.compress(idx(array)))


def write_all(folder: Path, seed: int = 0) -> dict[str, NDArray[np.uint8]]:
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        TRAIN_IMAGES: random.integers(0, 256, (6, 28, 28), np.uint8),
        TRAIN_LABELS: random.integers(0, 10, 6, np.uint8),
        TEST_IMAGES: random.integers(0, 256, (4, 28, 28), np.uint8),
        TEST_LABELS: random.integers(0, 10, 4, np.uint8),
    }
    for name, array in arrays.items():
        write_idx(folder / name, array)
    return arrays


@pytest.fixture(autouse=True)
def _only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "debian")


def assert_loaded(arrays: dict[str, NDArray[np.uint8]]) -> None:
    task = tasks.load("fashion-mnist")
    for data, images, labels in ((task.train, TRAIN_IMAGES, TRAIN_LABELS), (task.test, TEST_IMAGES, TEST_LABELS)):
        assert isinstance(data, TensorDataset)
        x, y = data.tensors
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert y.tolist() == arrays[labels].tolist()
        expected = torch.tensor((arrays[images] / 255 - 0.2860) / 0.3530).unsqueeze(1)
        torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)  # computed in float32


@pytest.mark.parametrize("folder", ["fashion-mnist", ".", "debian"])
def test_loads_from_every_folder(tmp_path: Path, folder: str) -> None:
    assert_loaded(write_all(tmp_path / folder))


def test_the_own_folder_comes_first_and_the_package_last(tmp_path: Path) -> None:
    arrays = {name: write_all(tmp_path / name, seed) for seed, name in enumerate(("debian", ".", "fashion-mnist"))}
    assert_loaded(arrays["fashion-mnist"])
    (tmp_path / "fashion-mnist" / TRAIN_LABELS).unlink()  # files of different folders must not be mixed
    assert_loaded(arrays["."])


def test_without_the_variable_the_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA")
    assert_loaded(write_all(tmp_path / "debian"))


def test_all_models_fit_the_images(tmp_path: Path) -> None:
    write_all(tmp_path)
    task = tasks.load("fashion-mnist")
    assert list(task.models) == ["lenet", "mlp", "resnet"]
    for name in task.models:
        assert set(task.evaluate(task.model(name))) == {"accuracy", "loss"}


def test_missing_files_say_where_and_how(tmp_path: Path) -> None:
    with pytest.raises(DataMissing) as error:
        tasks.load("fashion-mnist")
    message = str(error.value)
    for part in (*fashion_mnist.FILES, f"{tmp_path}/fashion-mnist", f"{tmp_path},", f"{tmp_path}/debian"):
        assert part in message
    assert "apt-get install dataset-fashion-mnist" in message
    assert "PACELINE_DATA=" in message


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    write_all(tmp_path)
    (tmp_path / TEST_LABELS).unlink()
    with pytest.raises(DataMissing, match=rf"{tmp_path} \(without {TEST_LABELS}\)"):
        tasks.load("fashion-mnist")


@pytest.mark.parametrize("value", [None, ""])
def test_an_unset_variable_is_named(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("PACELINE_DATA") if value is None else monkeypatch.setenv("PACELINE_DATA", value)
    with pytest.raises(DataMissing, match="PACELINE_DATA, which is not set"):
        tasks.load("fashion-mnist")


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


def recompressed(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: gzip.compress(change(gzip.decompress(data)))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncated, "end-of-stream"),
        (lambda data: b"", "begins with the bytes"),
        (lambda data: b"<html>not found</html>", "Not a gzipped file"),
        (flipped, "CRC check failed|invalid"),
        (lambda data: data[:10] + b"\xff" + data[11:], "invalid block type"),
        (recompressed(lambda data: b"\0\0\x0d" + data[3:]), "begins with the bytes 00 00 0d"),
        (recompressed(lambda data: data[:3]), "ends within the header"),
        (recompressed(lambda data: data[:6]), "ends within the header"),
        (recompressed(lambda data: data[:-1]), "values, its header says"),
        (recompressed(lambda data: data + b"\0"), "values, its header says"),
    ],
    ids=["truncated", "empty", "not-gzip", "flipped", "deflate", "type", "magic-only", "header", "short", "long"],
)
@pytest.mark.parametrize("name", [TRAIN_IMAGES, TEST_LABELS])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[bytes], bytes], why: str) -> None:
    write_all(tmp_path)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(DataMissing, match=rf"{name} is damaged.*({why}).*apt-get install"):
        tasks.load("fashion-mnist")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        (TRAIN_IMAGES, np.zeros((6, 28, 27), np.uint8)),
        (TRAIN_IMAGES, np.zeros(6, np.uint8)),
        (TRAIN_LABELS, np.zeros(5, np.uint8)),
        (TRAIN_LABELS, np.full(6, 10, np.uint8)),
        (TRAIN_LABELS, np.zeros((6, 1), np.uint8)),
    ],
    ids=["size", "dimensions", "count", "class", "label-dimensions"],
)
def test_a_sound_file_of_something_else_is_named(tmp_path: Path, name: str, array: NDArray[np.uint8]) -> None:
    write_all(tmp_path)
    write_idx(tmp_path / name, array)
    with pytest.raises(DataMissing, match=rf"{name} is damaged, or not the file that its name says: .* expected"):
        tasks.load("fashion-mnist")


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4), (0, 5)])
def test_parse_idx_reads_what_was_written(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    parsed = fashion_mnist.parse_idx(idx(array))
    assert parsed.dtype == torch.uint8
    assert parsed.shape == shape
    assert parsed.tolist() == array.tolist()
