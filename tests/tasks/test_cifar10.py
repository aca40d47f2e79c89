from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline import tasks
from paceline.errors import DataMissing
from paceline.tasks import Images, cifar10

Image = pytest.importorskip("PIL.Image")


def jpeg(colour: tuple[int, int, int], size: tuple[int, int] = (32, 32)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "JPEG")
    return out.getvalue()


def write_archive(folder: Path, files: Mapping[str, bytes]) -> Path:
    path = folder / "cifar10-jpeg.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for directory in ("train", "test"):
            entry = tarfile.TarInfo(directory)
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def colour(label: int, number: int) -> tuple[int, int, int]:
    return 20 * label, 10 * number, 250 - 20 * label


def some_files(each: int = 3) -> dict[str, bytes]:
    return {
        f"{part}/{name}/{number:04}.jpg": jpeg(colour(label, number))
        for part, count in (("train", each), ("test", 1))
        for label, name in enumerate(cifar10.CLASSES)
        for number in range(count)
    }


@pytest.fixture(autouse=True)
def _only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def test_shapes(tmp_path: Path) -> None:
    write_archive(tmp_path, some_files())
    task = tasks.load("cifar10")
    assert (task.name, len(task.train), len(task.test)) == ("cifar10", 30, 10)
    for data in (task.train, task.test):
        image, label = data[0]
        assert (image.shape, image.dtype) == ((3, 32, 32), torch.float32)
        assert (label.shape, label.dtype) == ((), torch.int64)
    for name in task.models:
        assert set(task.evaluate(task.model(name), 4)) == {"accuracy", "loss"}


def test_every_image_is_there_once_with_its_class_and_colour(tmp_path: Path) -> None:
    arrays = cifar10.decode(write_archive(tmp_path, some_files()))
    for part, each in (("train", 3), ("test", 1)):
        pixels, labels = arrays[f"{part}-pixels"], arrays[f"{part}-labels"]
        assert pixels.dtype == labels.dtype == np.uint8
        assert (pixels == pixels[:, :, :1, :1]).all()  # every image has one colour
        # JPEG turns colours to luma and chroma and back, which is off by 1 or 2; all true values are tens
        colours = (pixels[:, :, 0, 0] / 10).round().astype(int) * 10
        found = sorted((label, *rgb) for label, rgb in zip(labels.tolist(), colours.tolist(), strict=True))
        assert found == [(label, *colour(label, number)) for label in range(10) for number in range(each)]


def test_channels_rows_and_columns_are_in_their_places(tmp_path: Path) -> None:
    square = Image.new("RGB", (32, 32), (0, 0, 0))
    square.paste((255, 0, 0), (16, 0, 32, 16))  # red above on the right
    out = io.BytesIO()
    square.save(out, "JPEG", quality=95, subsampling=0)
    files = {"train/cat/0000.jpg": out.getvalue(), "test/dog/0000.jpg": out.getvalue()}
    image = cifar10.decode(write_archive(tmp_path, files))["train-pixels"][0].astype(int)
    assert image[0, :16, 16:].min() > 200
    assert image[0, 16:].max() < 50
    assert image[0, :, :16].max() < 50
    assert image[1:].max() < 50


def test_classes_are_mixed_in_a_fixed_way(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, some_files(each=8))
    first = cifar10.decode(archive)
    torch.manual_seed(99)
    second = cifar10.decode(archive)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    assert len(set(first["train-labels"][:20].tolist())) > 5  # unmixed, the first 20 are of 3 classes


def test_a_grey_jpeg_gets_three_channels(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("L", (32, 32), 77).save(out, "JPEG")
    files = {"./train/cat/0000.jpg": out.getvalue(), "./test/dog/0000.jpg": out.getvalue()}
    assert (cifar10.decode(write_archive(tmp_path, files))["test-pixels"] == 77).all()


def test_decoding_is_done_once_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = write_archive(tmp_path, some_files())
    first = tasks.load("cifar10")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"decoding {archive}; this is done once" in captured.err
    assert str(tmp_path / "cache") in captured.err

    monkeypatch.setitem(sys.modules, "PIL", None)  # from now on nothing can be decoded
    second = tasks.load("cifar10")
    assert capsys.readouterr().err == ""
    for a, b in ((first.train, second.train), (first.test, second.test)):
        assert isinstance(a, Images)
        assert isinstance(b, Images)
        assert torch.equal(a.pixels, b.pixels)
        assert torch.equal(a.labels, b.labels)


def test_another_archive_is_decoded_anew(tmp_path: Path) -> None:
    write_archive(tmp_path, some_files(each=3))
    assert len(tasks.load("cifar10").train) == 30
    write_archive(tmp_path, some_files(each=2))
    assert len(tasks.load("cifar10").train) == 20


def test_writing_to_an_image_does_not_reach_the_cache(tmp_path: Path) -> None:
    write_archive(tmp_path, some_files())
    first = tasks.load("cifar10").train
    assert isinstance(first, Images)
    before = first.pixels.clone()
    first.pixels.zero_()
    second = tasks.load("cifar10").train
    assert isinstance(second, Images)
    assert torch.equal(second.pixels, before)


def test_missing_archive_says_where_and_how(tmp_path: Path) -> None:
    with pytest.raises(
        DataMissing, match=rf"cifar10 needs cifar10-jpeg.tar.xz; looked in {tmp_path}; set PACELINE_DATA="
    ):
        tasks.load("cifar10")


def test_without_pillow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archive(tmp_path, some_files(each=1))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataMissing, match=r"cifar10 needs pillow.*pip install paceline\[tasks\]"):
        tasks.load("cifar10")


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_archive_is_named_and_not_cached(tmp_path: Path, part: float) -> None:
    archive = write_archive(tmp_path, some_files())
    data = archive.read_bytes()
    archive.write_bytes(data[: int(part * len(data))])
    with pytest.raises(DataMissing, match=rf"{archive} is damaged.*PACELINE_DATA="):
        tasks.load("cifar10")
    assert not list((tmp_path / "cache").rglob("*.npy"))


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("train/cat/0000.jpg", b"no image", "train/cat/0000.jpg: cannot identify"),
        ("train/cat/0000.jpg", jpeg((9, 9, 9))[:-200], "train/cat/0000.jpg: "),
        ("train/cat/0000.jpg", jpeg((9, 9, 9), (64, 32)), "train/cat/0000.jpg has 64 × 32 pixels, not 32 × 32"),
        ("train/lion/0000.jpg", jpeg((9, 9, 9)), "train/lion/0000.jpg is not"),
        ("cat/0000.jpg", jpeg((9, 9, 9)), "cat/0000.jpg is not"),
        ("test/cat/0000.jpg", jpeg((9, 9, 9)), "no image under train/"),
    ],
    ids=["no-jpeg", "half-jpeg", "size", "class", "folders", "no-training-images"],
)
def test_what_is_wrong_in_an_archive_is_named(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    archive = write_archive(tmp_path, {"test/dog/0000.jpg": jpeg((1, 2, 3)), name: data})
    with pytest.raises(DataMissing, match=rf"{archive} is damaged.*{why}"):
        tasks.load("cifar10")


def test_an_archive_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "cifar10-jpeg.tar.xz").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataMissing, match=r"cifar10-jpeg.tar.xz is damaged"):
        tasks.load("cifar10")


def test_images_are_normalised_alone_and_in_batches_alike() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (7, 3, 4, 4), dtype=torch.uint8)
    labels = torch.arange(7)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    data = Images(pixels, labels, mean=mean, std=std)
    expected = torch.empty(7, 3, 4, 4, dtype=torch.float64)
    for channel in range(3):
        expected[:, channel] = (pixels[:, channel].double() / 255 - mean[channel]) / std[channel]
    order = [5, 0, 5, 3]
    batch, targets = next(iter(DataLoader(data, batch_size=4, sampler=order, generator=torch.Generator())))
    assert torch.equal(targets, labels[order])
    assert torch.equal(batch, torch.stack([data[i][0] for i in order]))
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch.double(), expected[order], rtol=1e-5, atol=1e-6)  # computed in float32
    assert data[-1][1] == 6
