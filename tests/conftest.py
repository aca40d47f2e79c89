from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

pytest_plugins = ["paceline.testing"]

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
