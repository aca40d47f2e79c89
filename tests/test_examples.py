"""The examples run, and the two scripts of a pair train the same model."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.tasks import fashion_mnist
from tests.pool import Pool
from tests.tasks.test_fashion_mnist import write_idx

EXAMPLES = Path(__file__).parent.parent / "examples" / "fashion_mnist"
LEARNT = 0.3  # of the synthetic images below; guessing gets 0.1


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files like those of Fashion-MNIST: a coarse pattern for each class, and noise."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    patterns = random.integers(0, 200, (10, 4, 4)).repeat(7, axis=1).repeat(7, axis=2)
    for (images, labels), count in zip((fashion_mnist.FILES[:2], fashion_mnist.FILES[2:]), (600, 200), strict=True):
        classes = random.integers(0, 10, count, np.uint8)
        pixels = patterns[classes] + random.integers(0, 56, (count, 28, 28))
        write_idx(folder / images, pixels.astype(np.uint8))
        write_idx(folder / labels, classes)
    return folder


def play(script: str, data: Path, *args: str) -> str:
    """Run a script as a launcher would, in this process; gives what it printed."""
    before, printed = (list(sys.argv), os.environ.get("PACELINE_DATA")), io.StringIO()
    sys.argv, os.environ["PACELINE_DATA"] = [script, *args], str(data)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    finally:
        sys.argv = before[0]
        os.environ.pop("PACELINE_DATA")
        if before[1] is not None:
            os.environ["PACELINE_DATA"] = before[1]
    return printed.getvalue()


def results(printed: str) -> tuple[float, float]:
    found = re.fullmatch(r"test accuracy (\d\.\d{4}), loss (\d\.\d{4})\n", printed)
    assert found, printed
    return float(found[1]), float(found[2])


def test_both_scripts_train_the_same_model(pool: Pool, images: Path) -> None:
    quick = ("--epochs", "2", "--limit", "512")
    by_torch, silent = pool.run(2, play, "train_torch.py", images, *quick)
    by_paceline, also_silent = pool.run(2, play, "train.py", images, *quick)
    assert silent == also_silent == ""
    accuracy, loss = results(by_torch)
    assert accuracy > LEARNT
    # The sums of a step are rounded in another order, which may turn one of the 200 answers. One step less changes
    # the loss by 0.17.
    assert results(by_paceline)[0] == pytest.approx(accuracy, abs=0.0051)
    assert results(by_paceline)[1] == pytest.approx(loss, abs=0.0005)


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers(pool: Pool, images: Path, workers: int) -> None:
    first, *others = pool.run(workers, play, "train.py", images, "--epochs", "1", "--limit", "512")
    assert results(first)[1] > 0
    assert others == [""] * (workers - 1)
