from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

pytest_plugins = ["paceline.testing"]

ONE_LAB = (
    "tests/lab/",
    "tests/cli/test_compare.py::test_in_the_lab",
    "tests/cli/test_lab.py",
    "tests/cli/test_doctor.py",
    "tests/survey/test_lab.py",
    "tests/testing/test_lab.py",
    "tests/faults/test_survive.py",
    "tests/test_neighbour.py",
)

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it from birth


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A machine has one lab at a time: where several processes share the tests, one of them does all that use it."""
    for item in items:
        if item.nodeid.startswith(ONE_LAB) or "lab_workers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("lab"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
