"""Eight workers in two sites of the lab: some die, one comes back, the sites are cut off from each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import survive
from benchmarks.survivor import Job
from paceline.testing.places import InLab
from tests.lab.needs import needs_lab


@pytest.fixture
def place() -> Iterator[InLab]:
    with closing(InLab(survive.sites())) as lab:
        lab.open()
        yield lab


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "epochs"), [("kill 3", 300.0), ("kill and return", 1000.0), ("site", 300.0)])
def test_the_rest_go_on_and_all_end_with_one_model(
    place: InLab, fault: str, epochs: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long rounds took, and what it costs in accuracy: ``benchmarks/survive.py``.

    Epochs are short, and as many as it takes for everybody to be back before the end.
    """
    monkeypatch.setattr(survive, "CUT", 5.0)
    came = survive.one(fault, Job("digits", "lenet", epochs, 0.05, 0, str(tmp_path)), place)
    dead = {blow["target"] for blow in came["blows"] if blow["do"] == "kill" and blow["seconds"] is None}
    assert came["alive"] == sorted({*range(survive.WORKERS)} - dead)
    assert came["digests"] == 1
    assert came["accuracy"] > 0.9
    assert None not in came["back"]
