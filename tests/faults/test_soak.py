"""A swarm under a fault every ten seconds: all come to the end, and nothing grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import soak


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [60.0])
def test_nothing_is_lost_and_nothing_grows(tmp_path: Path, seconds: float) -> None:
    """Ten minutes of it: ``benchmarks/soak.py --seconds 600``, which also says how long steps stood still."""
    found = soak.run(seconds, 1, tmp_path)
    soak.show(found)
    assert found["killed"] >= 2
    assert found["frozen"] >= 1
    assert soak.faults_of(found) == []
