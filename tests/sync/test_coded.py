"""Encoded sums: close to the plain one, the same bits on all workers, counted bytes, nothing lost in the long run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline as pl
from paceline.codec import BFloat16, Half, Identity, Uniform8
from paceline.roles import Codec
from paceline.sync.coded import CodedSum
from tests.pool import Pool

SIZES = [2, 3, 5]


CODECS: list[Codec] = [Identity(), Half(), BFloat16(), Uniform8(), Uniform8(block=100)]


class Thread:
    """One of several threads that exchange tensors through a common list."""

    device = torch.device("cpu")

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Tensor]) -> None:
        self.rank, self.size = rank, len(table)
        self._barrier, self._table = barrier, table
        self.sent_to_others = 0

    def all_to_all(self, received: Tensor, sent: Tensor, what: str) -> None:
        parts = self._exchange(sent)
        received.copy_(torch.cat([part.chunk(self.size)[self.rank] for part in parts]))
        self.sent_to_others += sent.nbytes // self.size * (self.size - 1)

    def all_gather(self, received: Tensor, sent: Tensor, what: str) -> None:
        received.copy_(torch.cat(self._exchange(sent)))
        self.sent_to_others += sent.nbytes * (self.size - 1)

    def _exchange(self, sent: Tensor) -> list[Tensor]:
        self._table[self.rank] = sent.clone()
        self._barrier.wait(30)
        found = list(self._table)
        self._barrier.wait(30)
        return found


def together(size: int, job: Callable[[Thread], Any]) -> list[Any]:
    """What a job gives on each of so many workers."""
    barrier, table = threading.Barrier(size), [torch.empty(0)] * size

    def work(rank: int) -> Any:
        try:
            return job(Thread(rank, barrier, table))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))


def values_of(rank: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(length, generator=generator)


def exact_sum(size: int, length: int, seed: int = 0) -> Tensor:
    return sum((values_of(rank, length, seed).double() for rank in range(size)), torch.zeros(length).double())


def off(codec: Codec, largest: float) -> float:
    """How far one encoding may be off for numbers of at most this size."""
    if isinstance(codec, Half):
        return largest * 2.0**-11
    if isinstance(codec, BFloat16):
        return largest * 2.0**-8
    return largest / 254 if isinstance(codec, Uniform8) else 0.0


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [1, 300, 5000])
def test_it_is_the_sum(codec: Codec, size: int, length: int) -> None:
    def job(channel: Thread) -> Tensor:
        values = values_of(channel.rank, length)
        CodedSum(channel, codec).run(values, "a sum")
        return values

    found = together(size, job)
    for other in found[1:]:
        assert torch.equal(other, found[0])
    exact = exact_sum(size, length)
    largest = [float(values_of(rank, length).abs().max()) for rank in range(size)]
    first = sum(off(codec, one) for one in largest)  # each worker's encoding, then that of the sum
    limit = first + off(codec, float(exact.abs().max()) + first)
    # Besides, everything is added up in float32.
    assert float((found[0].double() - exact).abs().max()) <= limit + size * sum(largest) * 2.0**-23


@pytest.mark.parametrize("size", SIZES)
def test_the_exchange_itself_is_exact(size: int) -> None:
    def job(channel: Thread) -> list[Tensor]:
        found, coded = [], CodedSum(channel, Identity())
        for seed in range(2):  # nothing of the first sum may be in the second
            found.append(values_of(channel.rank, 3001, seed))
            coded.run(found[-1], "a sum")
        return found

    for found in together(size, job):
        for seed in range(2):
            in_order = torch.zeros(3001)
            for rank in range(size):
                in_order += values_of(rank, 3001, seed)
            assert torch.equal(found[seed], in_order)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_bytes_are_those_that_others_get(codec: Codec, size: int) -> None:
    def job(channel: Thread) -> tuple[int, int]:
        coded = CodedSum(channel, codec)
        coded.run(values_of(channel.rank, 1000), "one")
        channel.sent_to_others = 0
        coded.run(values_of(channel.rank, 100_003), "another")
        return coded.bytes_sent, channel.sent_to_others

    part = math.ceil(100_003 / size / 256) * 256
    for told, true in together(size, job):
        assert told == true == 2 * (size - 1) * codec.bytes_for(part)
        if codec == Uniform8():
            assert told <= 0.27 * 2 * (size - 1) / size * 4 * 100_003


def test_float64() -> None:
    def job(channel: Thread) -> tuple[Tensor, Tensor]:
        narrow = values_of(channel.rank, 700)
        wide = narrow.double()
        CodedSum(channel, Uniform8()).run(narrow, "float32")
        CodedSum(channel, Uniform8()).run(wide, "float64")
        return narrow, wide

    for narrow, wide in together(2, job):
        assert wide.dtype == torch.float64
        assert torch.equal(wide, narrow.double())


def test_one_worker_and_no_values() -> None:
    values = values_of(0, 100)
    alone = CodedSum(Thread(0, threading.Barrier(1), [torch.empty(0)]), Uniform8())
    alone.run(values, "nothing to do")
    assert torch.equal(values, values_of(0, 100))
    assert (alone.bytes_sent, alone.state_dict()) == (0, {})

    def job(channel: Thread) -> int:
        coded = CodedSum(channel, Uniform8())
        coded.run(values_of(0, 100), "something")
        coded.run(torch.empty(0), "nothing")
        return coded.bytes_sent

    assert together(2, job) == [0, 0]


@pytest.mark.parametrize("rounds", [10, 100])
def test_in_the_long_run_nothing_is_lost(rounds: int) -> None:
    """The sums of T rounds add up to T times the true one, but for what is kept now: both kinds of it are needed."""

    def job(channel: Thread) -> tuple[Tensor, Tensor, Tensor]:
        coded, total = CodedSum(channel, Uniform8()), torch.zeros(2000).double()
        for _ in range(rounds):
            values = values_of(channel.rank, 2000)
            coded.run(values, "a sum")
            total += values.double()
        kept = coded.state_dict()
        return total, kept["values"].double(), kept["sum"].double()

    found = together(3, job)
    exact = exact_sum(3, 2000)
    lost = sum(each[1] for each in found) + torch.cat([each[2] for each in found])[:2000]
    # In every round the residuals and sums of numbers up to 12 are rounded to 24 bits, some ten times.
    torch.testing.assert_close(found[0][0], rounds * exact - lost, rtol=0, atol=10 * rounds * 12 * 2.0**-24)
    # What is kept is at most half a step of each encoding: three of numbers below 4.5, and one of numbers below 10,
    # each with a rest of the round before on top.
    assert float(lost.abs().max()) <= (3 * 4.5 + 10) / 254 * (1 + 1 / 253)
    assert float(lost.abs().max()) > 0.01


def test_without_feedback_the_error_stays() -> None:
    """So the test above is not one that any codec passes."""

    @dataclass(frozen=True)
    class Forgetful(Uniform8):
        feedback = False

    def job(channel: Thread) -> tuple[Tensor, dict[str, Any]]:
        coded, total = CodedSum(channel, Forgetful()), torch.zeros(2000).double()
        for _ in range(50):
            values = values_of(channel.rank, 2000)
            coded.run(values, "a sum")
            total += values.double()
        return total / 50, coded.state_dict()

    for mean, state in together(3, job):
        assert state == {}
        assert float((mean - exact_sum(3, 2000)).abs().mean()) > 0.01


def three_rounds(channel: Thread, codec: Codec, between: Callable[[CodedSum], CodedSum]) -> Tensor:
    coded = CodedSum(channel, codec)
    for seed in range(3):
        values = values_of(channel.rank, 1111, seed)
        coded.run(values, "a sum")
        if seed == 1:
            coded = between(coded)
    return values


def test_a_state_goes_on_exactly() -> None:
    codec = Uniform8()

    def resumed(channel: Thread) -> Tensor:
        def between(coded: CodedSum) -> CodedSum:
            fresh, state = CodedSum(channel, codec), coded.state_dict()
            fresh.load_state_dict(state)
            again = fresh.state_dict()
            assert again.keys() == state.keys()
            assert all(torch.equal(again[key], state[key]) for key in ("values", "sum"))
            coded.reset()  # what was given must not change with it
            return fresh

        return three_rounds(channel, codec, between)

    def fresh(channel: Thread) -> Tensor:
        return three_rounds(channel, codec, lambda _: CodedSum(channel, codec))

    through = together(3, lambda channel: three_rounds(channel, codec, lambda coded: coded))
    assert all(torch.equal(a, b) for a, b in zip(through, together(3, resumed), strict=True))
    assert not torch.equal(through[0], together(3, fresh)[0])


def test_a_state_does_not_change_with_the_next_round() -> None:
    def job(channel: Thread) -> bool:
        coded = CodedSum(channel, Uniform8())
        coded.run(values_of(channel.rank, 500), "one")
        state = coded.state_dict()
        before = {key: state[key].clone() for key in ("values", "sum")}
        coded.run(values_of(channel.rank, 500, seed=1), "another")
        return all(torch.equal(state[key], before[key]) for key in before)

    assert all(together(2, job))


def test_reset_and_another_length_forget() -> None:
    def job(channel: Thread) -> list[Tensor]:
        found = []
        for forget in ("no", "reset", "length", "load"):
            coded = CodedSum(channel, Uniform8())
            coded.run(values_of(channel.rank, 900), "one")
            if forget == "reset":
                coded.reset()
                assert coded.state_dict() == {}
            elif forget == "length":
                coded.run(values_of(channel.rank, 300), "shorter")
            elif forget == "load":
                coded.load_state_dict({})
            values = values_of(channel.rank, 900, seed=1)
            coded.run(values, "another")
            found.append(values)
        first = values_of(channel.rank, 900, seed=1)
        CodedSum(channel, Uniform8()).run(first, "the first of a new one")
        return [first, *found]

    first, kept, *forgotten = together(2, job)[0]
    assert not torch.equal(kept, first)
    assert all(torch.equal(each, first) for each in forgotten)


def test_a_state_of_other_workers_is_refused() -> None:
    def job(channel: Thread) -> dict[str, Any]:
        coded = CodedSum(channel, Uniform8())
        coded.run(values_of(channel.rank, 500), "a sum")
        return coded.state_dict()

    state = together(2, job)[0]
    three = Thread(0, threading.Barrier(3), [torch.empty(0)] * 3)
    with pytest.raises(pl.SettingError, match=r"over 2 workers has kept is of no use to 3.*call reset\(\) instead"):
        CodedSum(three, Uniform8()).load_state_dict(state)
    without = CodedSum(three, Half())
    without.load_state_dict(state)
    assert without.state_dict() == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_and_passes(bad: float) -> None:
    def job(channel: Thread) -> tuple[Tensor, dict[str, Any], Tensor]:
        coded = CodedSum(channel, Uniform8())
        values = values_of(channel.rank, 5000)
        if channel.rank == 1:
            values[10] = bad
        coded.run(values, "a bad sum")
        state = coded.state_dict()
        after = values_of(channel.rank, 5000, seed=1)
        coded.run(after, "a good one")
        return values, state, after

    for values, state, after in together(3, job):
        assert not values[10].isfinite()
        assert values[256:].isfinite().all()  # one block is lost, not more
        assert state["values"].isfinite().all()
        assert state["sum"].isfinite().all()
        assert state["values"][256:1000].any()  # and what other blocks of the slice have kept stays
        assert after.isfinite().all()


def in_a_fleet() -> tuple[list[Tensor], int]:
    fleet = pl.Fleet.join(30.0)
    found = []
    coded = CodedSum(fleet, Uniform8())
    for seed in range(2):
        found.append(values_of(fleet.rank, 3000, seed))
        coded.run(found[-1], "a sum")
    fleet.close()
    return found, coded.bytes_sent


@pytest.mark.parametrize("size", [2, 3])
def test_real_workers_do_as_threads_do(pool: Pool, size: int) -> None:
    def job(channel: Thread) -> list[Tensor]:
        found, coded = [], CodedSum(channel, Uniform8())
        for seed in range(2):
            found.append(values_of(channel.rank, 3000, seed))
            coded.run(found[-1], "a sum")
        return found

    expected = together(size, job)[0]
    for found, sent in pool.run(size, in_a_fleet):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert sent == 2 * (size - 1) * Uniform8().bytes_for(math.ceil(3000 / size / 256) * 256)
