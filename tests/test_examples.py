"""The examples run, and the two scripts of a pair train the same model."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import parameters_to_vector

from paceline import tasks
from paceline.tasks import cifar10, fashion_mnist
from tests.pool import Pool
from tests.tasks.test_cifar10 import Image, write_archive
from tests.tasks.test_fashion_mnist import write_idx

EXAMPLES = Path(__file__).parent.parent / "examples"
LEARNT = 0.3  # of the synthetic images below; guessing gets 0.1


@pytest.fixture(scope="module")
def clothes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files like those of Fashion-MNIST: a coarse pattern for each class, and noise."""
    folder = tmp_path_factory.mktemp("clothes")
    random = np.random.default_rng(0)
    patterns = random.integers(0, 200, (10, 4, 4)).repeat(7, axis=1).repeat(7, axis=2)
    for (images, labels), count in zip((fashion_mnist.FILES[:2], fashion_mnist.FILES[2:]), (600, 200), strict=True):
        classes = random.integers(0, 10, count, np.uint8)
        pixels = patterns[classes] + random.integers(0, 56, (count, 28, 28))
        write_idx(folder / images, pixels.astype(np.uint8))
        write_idx(folder / labels, classes)
    return folder


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an archive like that of CIFAR-10: likewise, in colours."""
    folder = tmp_path_factory.mktemp("things")
    random = np.random.default_rng(0)
    patterns = random.integers(0, 200, (10, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    files = {}
    for part, each in (("train", 20), ("test", 5)):
        for label, name in enumerate(cifar10.CLASSES):
            for number in range(each):
                pixels = patterns[label] + random.integers(0, 56, (32, 32, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(jpeg := io.BytesIO(), "JPEG")
                files[f"{part}/{name}/{number:04}.jpg"] = jpeg.getvalue()
    write_archive(folder, files)
    return folder


def play(script: str, data: Path, *args: str) -> str:
    """Run a script as a launcher would, in this process; gives what it printed."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [script, *args])
        patch.setenv("PACELINE_DATA", str(data))
        patch.setenv("PACELINE_CACHE", str(data / "cache"))
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def play_and_keep(script: str, data: Path, *args: str) -> tuple[str, NDArray[np.float32]]:
    """What a script printed, and the parameters that its model ended with."""
    made, make = [], tasks.Task.model

    def keep(*args: Any, **settings: Any) -> nn.Module:
        made.append(make(*args, **settings))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.Task, "model", keep)
        printed = play(script, data, *args)
    [model] = made
    return printed, parameters_to_vector(model.parameters()).detach().numpy()


def results(printed: str) -> tuple[float, float]:
    found = re.fullmatch(r"test accuracy (\d\.\d{4}), loss (\d\.\d{4})\n", printed)
    assert found, printed
    return float(found[1]), float(found[2])


def test_both_scripts_train_the_same_model(pool: Pool, clothes: Path) -> None:
    quick = ("--epochs", "2", "--limit", "512")
    by_torch, silent = pool.run(2, play, "fashion_mnist/train_torch.py", clothes, *quick)
    by_paceline, also_silent = pool.run(2, play, "fashion_mnist/train.py", clothes, *quick)
    assert silent == also_silent == ""
    accuracy, loss = results(by_torch)
    assert accuracy > LEARNT
    # The sums of a step are rounded in another order, which may turn one of the 200 answers. One step less changes
    # the loss by 0.17.
    assert results(by_paceline)[0] == pytest.approx(accuracy, abs=0.0051)
    assert results(by_paceline)[1] == pytest.approx(loss, abs=0.0005)


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers(pool: Pool, clothes: Path, workers: int) -> None:
    first, *others = pool.run(workers, play, "fashion_mnist/train.py", clothes, "--epochs", "1", "--limit", "512")
    assert results(first)[1] > 0
    assert others == [""] * (workers - 1)


# Two epochs of a whole and a half batch: a round of three steps has the end of an epoch in its middle, and the loop
# ends in the middle of the next one.
SMALL = ("--epochs", "2", "--limit", "192")


def losses(printed: str) -> list[float]:
    lines = (rf"epoch {epoch}: test accuracy \d\.\d{{4}}, loss (\d\.\d{{4}})\n" for epoch in range(2))
    found = re.fullmatch("".join(lines), printed)
    assert found, printed
    return [float(loss) for loss in found.groups()]


def test_local_sgd_that_averages_after_every_step_trains_the_model_of_ddp(pool: Pool, things: Path) -> None:
    by_torch = pool.run(2, play_and_keep, "cifar10/train_torch.py", things, *SMALL)
    by_paceline = pool.run(2, play_and_keep, "cifar10/train.py", things, *SMALL, "--every", "1")
    (printed, model), (silent, other) = by_torch
    (also_printed, ours), (also_silent, our_other) = by_paceline
    assert silent == also_silent == ""
    assert losses(also_printed) == pytest.approx(losses(printed), abs=0.0005)
    assert (other == model).all()
    assert (our_other == ours).all()
    # Momentum is linear in the gradients, so with equal shares the average of the steps is the step of the average.
    # Rounding makes a difference of 5e-7.
    assert abs(ours - model).max() < 1e-5


def test_local_sgd_learns_and_ends_with_the_same_model_on_all_workers(pool: Pool, things: Path) -> None:
    (printed, model), *others = pool.run(3, play_and_keep, "cifar10/train.py", things, *SMALL, "--every", "3")
    first, second = losses(printed)
    assert second < first
    for silent, other in others:
        assert silent == ""
        assert (other == model).all()
