"""What the benchmark of swarms tells is what was measured."""

from __future__ import annotations

from benchmarks import swarm


def test_the_cost_of_an_exchange_is_what_steps_take_longer() -> None:
    idle = {"seconds": 1.0, "exchanges": 0, "bytes_sent": 0, "bytes_received": 0}
    found = {"seconds": 1.5, "exchanges": 50, "bytes_sent": 3000, "bytes_received": 2000}
    assert swarm.cost(found, idle) == {"milliseconds": 10.0, "bytes": 100, "exchanges": 50}


def test_the_last_worker_is_slow() -> None:
    even, uneven = ([worker.cpu for worker in swarm.cluster(slow).workers] for slow in (False, True))
    assert even == [0.4] * 4
    assert uneven == [0.4, 0.4, 0.4, 0.05]


def test_a_row_of_the_table() -> None:
    rows = [{"milliseconds": each} for each in (3.0, 1.0, 2.0)]
    assert swarm.summary(rows) == {"milliseconds": 2.0, "all": rows}
