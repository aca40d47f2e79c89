from __future__ import annotations

import pytest
from rich.console import Console

from paceline.lab import measure
from paceline.lab.report import check_table


@pytest.mark.parametrize(
    ("rates", "found", "tries"),
    [([95.0], 95.0, 1), ([60.0, 97.0], 97.0, 2), ([60.0, 120.0, 89.0, 100.0], 89.0, 3)],
)
def test_what_is_off_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, rates: list[float], found: float, tries: int
) -> None:
    """Up to three times, and the last time counts."""
    ahead = iter(rates)
    monkeypatch.setattr(measure, "_flow", lambda source, target, rate: next(ahead) * 1e6)
    measured = measure._measure("w0", "up", ("w0", 1), ("PROBE0", 2), 100_000_000)
    assert (measured.found / 1e6, measured.tries, measured.good) == (found, tries, found > 90)
    screen = Console(width=100)
    with screen.capture() as said:
        screen.print(check_table([measured]))
    assert (f"measured {tries} times" in said.get()) == (tries > 1)
