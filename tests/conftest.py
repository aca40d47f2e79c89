from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

pytest_plugins = ["paceline.testing"]

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it from birth


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
