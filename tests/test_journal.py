"""What the journal makes of the workers' notes."""

from __future__ import annotations

import pytest

from paceline.journal import efficiency
from paceline.records import Note


def test_efficiency_is_the_rate_over_the_sum_of_the_rates_alone() -> None:
    """12 examples in 12 ms and 12 in 48 ms: 1000 + 250 a second alone, 24 in 48 ms together."""
    notes = [Note(examples=12, busy_seconds=0.012), Note(examples=12, busy_seconds=0.048)]
    assert efficiency(notes, 0.048) == pytest.approx(500 / 1250)
    assert efficiency(notes, 0.060) == pytest.approx(400 / 1250)  # with 12 ms for the exchange


def test_efficiency_of_workers_that_did_not_begin_together_is_not_known() -> None:
    notes = [Note(examples=12, busy_seconds=0.012), Note(examples=12, busy_seconds=0.048)]
    assert efficiency(notes, 0.040) is None


def test_efficiency_counts_nobody_whose_time_is_not_known() -> None:
    assert efficiency([Note(examples=12), Note(examples=12)], 1.0) is None
    notes = [Note(examples=12, busy_seconds=0.5), Note(examples=0)]
    assert efficiency(notes, 1.0) == pytest.approx(12 / 24)
