"""The pytest fixtures of the harness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from paceline.lab.tools import missing
from paceline.testing.starters import LabWorkers, Workers

__all__ = ["lab_workers", "workers"]


@pytest.fixture
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Start groups of workers on this machine, and kill, freeze or signal one at a step."""
    with closing(Workers(lambda: _folder(tmp_path_factory))) as starter:
        yield starter


@pytest.fixture
def lab_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabWorkers]:
    """Start groups of workers in the lab, and also cut or throttle one; skipped where the lab cannot work."""
    if why := _missing():
        pytest.skip("the lab cannot work here: " + "; ".join(why))
    with closing(LabWorkers(lambda: _folder(tmp_path_factory))) as starter:
        yield starter


def _folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("workers")


@cache
def _missing() -> list[str]:
    # Twice: a lab that is just being taken down removes the namespaces that this tries to make, too.
    return missing() and missing()
