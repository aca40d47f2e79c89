from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from paceline import record
from paceline.events import Ended, Measured, Resumed

from .fake import START, gossiped, one_of_each, started, step

# Sums of a few decimal fractions: their rounding errors are a few units in the last place (2^-53).
REL = 1e-12


def test_totals_and_shares() -> None:
    found = record.summary(
        [
            started(),
            step(0, loss=0.5),
            Measured(START, 1, {"accuracy": 0.5, "norm": 2.0}),
            step(1, loss=0.25, seconds=0.03, load=(0.0, 0.004), compute=(0.02, 0.01), wait=(0, 0.008)),
            Measured(START, 2, {"accuracy": 0.75}),
            Ended(START + 1, 2, 128, "done"),
        ]
    )
    assert (found.steps, found.examples, found.loss, found.bytes_sent, found.reason) == (2, 128, 0.25, 8000, "done")
    assert found.seconds == pytest.approx(0.04, rel=REL)
    assert found.examples_per_second == pytest.approx(3200, rel=REL)
    assert found.measured == {"accuracy": 0.75, "norm": 2.0}
    first, second = found.workers
    assert (first.examples, second.examples) == (96, 32)
    assert (first.load, first.compute, first.wait, first.communicate) == pytest.approx(
        (0.001 / 0.04, 0.026 / 0.04, 0.0, 0.001 / 0.04), rel=REL
    )
    assert (second.load, second.compute, second.wait) == pytest.approx((0.005 / 0.04, 0.014 / 0.04, 0.25), rel=REL)
    assert first.other == pytest.approx(0.012 / 0.04, rel=REL)


def test_a_worker_that_came_later_is_measured_by_its_own_time() -> None:
    found = record.summary(
        [
            step(0, counts=[64], load=[0.001], compute=[0.008], wait=[0]),
            Ended(START, 1, 64, "SIGTERM"),
            Resumed(START, 1, "c", 1),
            step(1),
        ]
    )
    assert found.reason is None  # it went on, and nothing says that it ended
    assert found.workers[1].wait == pytest.approx(0.2, rel=REL)
    assert found.workers[0].compute == pytest.approx(0.014 / 0.02, rel=REL)


def test_nothing_is_a_summary_too() -> None:
    found = record.summary([])
    assert (found.steps, found.seconds, found.examples_per_second, found.workers) == (0, 0.0, 0.0, ())
    assert math.isnan(found.loss)
    Console(quiet=True).print(record.table(found))


def test_the_table_has_a_row_for_each_worker() -> None:
    stream = io.StringIO()
    Console(file=stream, width=100).print(record.table(record.summary(one_of_each())))
    text = stream.getvalue()
    assert "1 steps, 64 examples" in text
    assert "größe [m] 1e-300" in text  # brackets are no markup
    rows = [line.strip("│ \n").split("│") for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["2", "48", "10.0%", "60.0%", "0.0%", "5.0%", "25.0%"],  # it is worker 2 that gossiped
        ["3", "16", "10.0%", "40.0%", "20.0%", "5.0%", "25.0%"],
    ]
    assert "4.0 kB sent by worker 2" in text
    assert "4 of 5 members  3 exchanges  1 refused" in text


def test_all_that_was_exchanged() -> None:
    found = record.summary([started(), gossiped(), step(0), gossiped(), step(1)])
    assert found.gossip is not None
    assert (found.gossip.exchanges, found.gossip.bytes_sent, found.gossip.bits) == (6, 8000, 8.0)
    assert record.summary([started(), step(0)]).gossip is None


def test_a_round_of_several_steps_counts_with_all_of_them() -> None:
    found = record.summary([started(), step(3, counts=(48, 16), steps=4), step(7, counts=(40, 24), steps=4)])
    assert (found.steps, found.examples, [worker.examples for worker in found.workers]) == (8, 128, [88, 40])
