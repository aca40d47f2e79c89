"""Fashion-MNIST: 28×28 grey images of ten kinds of clothes (Xiao et al. 2017), from its IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.tasks.files import damaged, data_folders, find
from paceline.tasks.models import MLP, LeNet, ResNet
from paceline.tasks.task import Task

__all__ = ["load", "parse_idx"]

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
REMEDY = "apt-get install dataset-fashion-mnist, or set PACELINE_DATA=<a folder with these files>"
MEAN, STD = 0.2860, 0.3530  # of the training images, for pixels scaled to 0..1


def load() -> Task:
    """The task ``fashion-mnist``: inputs float32 (1, 28, 28), ten classes."""
    train_images, train_labels, test_images, test_labels = find(
        "fashion-mnist", FILES, [*data_folders("fashion-mnist"), DEBIAN], REMEDY
    )
    return Task(
        name="fashion-mnist",
        train=_examples(train_images, train_labels),
        test=_examples(test_images, test_labels),
        models={
            "lenet": lambda: LeNet(1, 28, 10),
            "mlp": lambda: MLP([784, 128, 10]),
            "resnet": lambda: ResNet(1, 10),
        },
    )


def parse_idx(data: bytes) -> Tensor:
    """The array of bytes in an IDX file: a magic number, the sizes, then the values.

    The magic is two zero bytes, the type of the values (8 is uint8), the number of dimensions; the sizes are
    big-endian 32-bit numbers.
    """
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"it begins with the bytes {data[:3].hex(' ')}, an IDX file of bytes with 00 00 08")
    header = 4 + 4 * int.from_bytes(data[3:4])
    if len(data) < header:
        raise ValueError("it ends within the header")
    shape = np.frombuffer(data[4:header], ">u4").tolist()
    values = len(data) - header
    if values != math.prod(shape):
        raise ValueError(f"it holds {values} values, its header says {' × '.join(map(str, shape))}")
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy())


def _examples(images: Path, labels: Path) -> TensorDataset:
    pixels, classes = _read(images), _read(labels)
    if pixels.shape[1:] != (28, 28):
        raise damaged(images, f"images of 28 × 28 expected, the shape is {tuple(pixels.shape)}", REMEDY)
    if classes.shape != pixels.shape[:1] or not len(classes) or classes.max() > 9:
        raise damaged(labels, f"one label from 0 to 9 expected for each of the {len(pixels)} images", REMEDY)
    return TensorDataset((pixels.unsqueeze(1) / 255).sub_(MEAN).div_(STD), classes.long())


def _read(path: Path) -> Tensor:
    try:
        return parse_idx(gzip.decompress(path.read_bytes()))
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise damaged(path, error, REMEDY) from error
