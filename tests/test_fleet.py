from __future__ import annotations

import contextlib
import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import paceline as pl
from paceline import rendezvous
from paceline.watch import Watch
from tests.pool import Pool, RemoteError


def many_gatherings() -> tuple[list[list[bytes]], int]:
    fleet = pl.Fleet.join(deadline=20)
    found = [fleet.gather(f"{fleet.rank}:{at}".encode(), "each other") for at in range(20)]
    assert fleet._watch is not None
    keys = fleet._watch.ask(lambda: fleet._watch._store.list_keys(), seconds=5)  # type: ignore[union-attr]
    left = sum("gather/" in key for key in keys)
    fleet.close()
    return found, left


def test_gather_gives_all_parts_and_leaves_none(pool: Pool) -> None:
    for found, left in pool.run(3, many_gatherings):
        assert found == [[f"{rank}:{at}".encode() for rank in range(3)] for at in range(20)]
        assert left <= 6  # of the last gathering, and of the one before from workers that are a little behind


def only_some_gather() -> None:
    fleet = pl.Fleet.join(deadline=3)
    try:
        if fleet.rank != 1:
            fleet.gather(b"here", "the parts of a checkpoint")
        else:
            fleet.doing(9, "doing something else")
            time.sleep(6)
    finally:
        fleet.close()


def test_a_gathering_that_one_does_not_come_to_names_it(pool: Pool) -> None:
    first, second, third = pool.outcomes(3, only_some_gather)
    assert second is None
    for outcome in (first, third):
        assert isinstance(outcome, RemoteError)
        assert outcome.kind == "WorkerLost"
        assert re.search(r"waited 3\.\d s for the parts of a checkpoint: rank 1 ", outcome.text)
        assert "doing something else, step 9" in outcome.text


def one_has_no_heartbeat(dead: bool, patiently: bool = False) -> None:
    fleet = pl.Fleet.join(deadline=60)
    fleet.deadline = 0.5  # only now: to start takes longer where other tests run beside
    assert fleet._watch is not None
    try:
        if fleet.rank != 1:
            with fleet.patiently() if patiently else contextlib.nullcontext():
                fleet.gather(b"here", "the parts of a checkpoint")
        else:
            if dead:
                fleet._watch.close()
            time.sleep(4)
    finally:
        fleet.close()


@pytest.mark.parametrize("dead", [True, False])
def test_a_deadline_shorter_than_a_silence_tells_the_dead_from_the_late(pool: Pool, dead: bool) -> None:
    first, _, third = pool.outcomes(3, one_has_no_heartbeat, dead)
    for outcome in (first, third):
        assert isinstance(outcome, RemoteError)
        assert f"rank 1 {'gave no sign of life' if dead else 'is alive, but late'} (rank 1: last" in outcome.text


@pytest.mark.parametrize(("dead", "limit"), [(True, "0.5"), (False, "1")])
def test_patience_is_for_those_who_are_alive(pool: Pool, dead: bool, limit: str) -> None:
    first, _ = pool.outcomes(2, one_has_no_heartbeat, dead, True)
    assert isinstance(first, RemoteError)
    assert f"the deadline of {limit} s passed" in first.text


def the_first_fails_and_ends() -> None:
    """The first hosts the store, and nobody waits for anything when it goes."""
    fleet = pl.Fleet.join(deadline=20)
    try:
        if fleet.rank == 0:
            fleet.fail(ValueError("no such file"))
        else:
            time.sleep(3)
            fleet.gather(b"here", "the parts of a checkpoint")
    finally:
        fleet.close()


def test_who_hosts_the_store_ends_when_all_know_why(pool: Pool) -> None:
    for outcome in pool.outcomes(3, the_first_fails_and_ends)[1:]:
        assert isinstance(outcome, RemoteError)
        assert "rank 0 raised ValueError: no such file" in outcome.text


class Breaking:
    """A store that stops answering."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        if self.broken:
            raise RuntimeError("the store is gone")
        return getattr(self._store, name)


def test_nobody_is_silent_where_the_store_is_gone() -> None:
    """Both are heard of last before that: one second of silence, and then no answers for more than another."""
    store = Breaking()
    first, watch, third = (Watch(store, rank, 3) for rank in range(3))  # type: ignore[arg-type]
    watch.attend(True)
    while len(watch.places()) < 2:
        time.sleep(0.01)
    first.close()
    third.close()
    time.sleep(1.0)
    store.broken = True
    while not (silent := watch.silent()):
        time.sleep(0.01)
    watch.close()
    assert list(silent) == [0]


def broadcasting() -> list[bytes]:
    fleet = pl.Fleet.join(deadline=20)
    sent = [b"", b"x", bytes(range(256)) * 1000]
    found = [fleet.broadcast_bytes(blob if fleet.rank == 0 else b"other", "rank 0") for blob in sent]
    fleet.close()
    return found


def test_broadcast_bytes(pool: Pool) -> None:
    for found in pool.run(2, broadcasting):
        assert found == [b"", b"x", bytes(range(256)) * 1000]


def test_alone_without_a_launcher() -> None:
    assert "RANK" not in os.environ
    fleet = pl.Fleet.join()
    assert (fleet.rank, fleet.size) == (0, 1)
    assert fleet.gather(b"me", "myself") == [b"me"]
    assert fleet.broadcast_bytes(b"me", "myself") == b"me"
    fleet.agree({"a": "b"})
    fleet.close()


def only_the_first_joins() -> None:
    if os.environ["RANK"] == "0":
        pl.Fleet.join(deadline=0.1)


def test_who_starts_alone_says_where_it_waited(pool: Pool) -> None:
    first, _ = pool.outcomes(2, only_the_first_joins)
    assert isinstance(first, RemoteError)
    assert first.kind == "WorkerLost"
    assert re.match(r"rank 0 waited \d+\.\d s for all 2 workers to start and meet at 127\.0\.0\.1:\d+: ", first.text)


def joins_again() -> int:
    """The first worker fails in the middle of a start that the second does not come to, and then both start."""
    if os.environ["RANK"] == "0":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous, "_begin_group", half_a_start)
            with pytest.raises(pl.WorkerLost, match="for all 2 workers to start"):
                pl.Fleet.join(deadline=20)
    fleet = pl.Fleet.join(deadline=20)
    found = fleet.gather(b"here", "the other worker")
    fleet.close()
    return len(found)


def half_a_start(backend: str, *_: object) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.1))


def test_after_a_start_that_failed_the_next_one_works(pool: Pool) -> None:
    assert pool.run(2, joins_again) == [2, 2]


@pytest.mark.parametrize("deadline", [0, -1, float("nan")])
def test_deadline(deadline: float) -> None:
    with pytest.raises(pl.SettingError, match="must be a positive number of seconds"):
        pl.Fleet.join(deadline=deadline)
