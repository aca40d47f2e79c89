"""Orders that learn, with workers that are played in one process: any plans, any exchanges, the same order on all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import paceline as pl
from paceline.balance.rounding import largest_remainder
from paceline.errors import LoopError, SettingError
from paceline.lessons import Lessons
from paceline.order import GraB, MeanBalancer, OneStream, PairBalance, PairBalancer, WorkerStreams
from paceline.order.fragments import fragments_of
from paceline.order.learnt import Learnt
from paceline.planner import Cursor, advance, cut
from paceline.records import Plan, Progress
from paceline.roles import Need

SEED = 11
NUMBERS = 12


def probe(exact: bool) -> pl.Probe:
    found = pl.Probe(exact=True) if exact else pl.Probe(size=64)
    model = nn.Linear(NUMBERS, 1, bias=False)
    found.attach(model, list(model.parameters()), frozenset({Need.UNITS}))
    return found


class Played:
    """Workers of a run that only look at examples: example i of worker w has a gradient of its own."""

    def __init__(self, orders: list[Learnt], lengths: tuple[int, ...], share: int, exact: bool) -> None:
        self.orders, self.lengths, self.exact = orders, lengths, exact
        self.probe = probe(exact)
        for rank, order in enumerate(orders):
            order.begin(rank, len(orders), lengths, share, self.probe)
        generator = torch.Generator().manual_seed(5)
        self.gradients = [
            torch.randn(length, NUMBERS, generator=generator, dtype=torch.float64) + 0.5 for length in lengths
        ]
        self.seen: dict[tuple[int, int], list[int]] = {}
        self.cursor = Cursor(Progress(), (0,) * len(lengths))

    def permutation(self, rank: int) -> Tensor:
        stream = rank if len(self.lengths) > 1 else 0
        return self.orders[rank].permutation(self.lengths[stream], self.cursor.progress.epoch, SEED + stream)

    def plan(self, batch: int, weights: list[int], micro: int | None) -> Plan:
        def split(size: int, workers: int) -> list[int]:
            return largest_remainder(size, [each + 1 for each in weights])

        found = cut(self.cursor, self.lengths, len(self.orders), batch, split, micro, None)
        (marked,) = {Lessons(order, None, alone=False).mark(found) for order in self.orders}  # type: ignore[arg-type]
        return marked  # with the same check sum of the order on all

    def step(self, plan: Plan) -> None:
        for rank, order in enumerate(self.orders):
            stream = rank if len(self.lengths) > 1 else 0
            ids, images, weights = self.permutation(rank), [], []
            for start, stop in plan.pieces(rank):
                assert 1 <= stop - start <= plan.micro
                assert start // order.unit == (stop - 1) // order.unit
                piece = ids[start:stop]
                self.seen.setdefault((plan.epoch, stream), []).extend(piece.tolist())
                mean = self.gradients[stream][piece].mean(0)
                images.append(mean if self.exact else self.sketched(mean))
                weights.append(float(stop - start))
            order.see(fragments_of(plan, rank, weights, images, single=False))
        self.cursor = advance(self.cursor, plan, self.lengths)

    def sketched(self, gradient: Tensor) -> Tensor:
        return torch.cat([gradient, torch.zeros(64 - NUMBERS, dtype=torch.float64)])

    def exchange(self) -> None:
        blobs = [order.tell() for order in self.orders]
        for order in self.orders:
            order.hear(blobs, self.cursor.progress)


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    workers = draw(st.integers(1, 4))
    unit = draw(st.integers(1, 5))
    streams = draw(st.sampled_from([OneStream(), WorkerStreams(), WorkerStreams(shared_sum=False)]))
    local = workers > 1 and isinstance(streams, WorkerStreams) and draw(st.booleans())
    least = 2 * unit if local else 2 * unit * workers
    lengths = [draw(st.integers(least, least + 40)) for _ in range(workers if local else 1)]
    batches = draw(st.lists(st.integers(workers, 30), min_size=1, max_size=5))
    weights = draw(st.lists(st.lists(st.integers(0, 9), min_size=workers, max_size=workers), min_size=1, max_size=4))
    return {
        "workers": workers,
        "unit": unit,
        "streams": streams,
        "lengths": tuple(lengths),
        "steps": list(zip(itertools.cycle(batches), itertools.cycle(weights), range(200), strict=False)),
        "micro": draw(st.none() | st.integers(1, 9)),
        "exact": draw(st.booleans()),
        "every": draw(st.integers(1, 7)),
        "grab": isinstance(streams, OneStream) and draw(st.booleans()),
    }


def play(situation: dict[str, Any], epochs: int) -> tuple[Played, list[list[Tensor]]]:
    """Gives the workers, and for each epoch the permutation of each."""
    unit, exact = situation["unit"], situation["exact"]
    make = (
        (lambda: GraB(unit=unit, exact=exact))
        if situation["grab"]
        else (lambda: PairBalance(unit=unit, streams=situation["streams"], exact=exact))
    )
    played = Played([make() for _ in range(situation["workers"])], situation["lengths"], 3, exact)
    orders: list[list[Tensor]] = []
    for batch, weights, at in itertools.cycle(situation["steps"]):
        epoch = played.cursor.progress.epoch
        if epoch == len(orders):
            orders.append([played.permutation(rank) for rank in range(situation["workers"])])
            if epoch == epochs:
                return played, orders
        played.step(played.plan(batch, weights, situation["micro"]))
        if played.cursor.progress.epoch > epoch or at % situation["every"] == 0:
            played.exchange()
    raise AssertionError


@settings(max_examples=60, deadline=None)
@given(situations())
def test_every_epoch_has_every_example_once(situation: dict[str, Any]) -> None:
    played, _ = play(situation, 3)
    for (epoch, stream), seen in played.seen.items():
        assert sorted(seen) == list(range(situation["lengths"][stream])), f"epoch {epoch}"
    assert len(played.seen) == 3 * len(situation["lengths"])


@settings(max_examples=40, deadline=None)
@given(situations())
def test_the_order_is_that_of_the_balancer_fed_by_hand(situation: dict[str, Any]) -> None:
    """However units were cut between workers and steps, and whenever workers told each other."""
    situation = {**situation, "exact": True}
    played, orders = play(situation, 3)
    unit, lengths, streams = situation["unit"], situation["lengths"], situation["streams"]
    local = len(lengths) > 1
    drawn = [torch.randperm(n, generator=torch.Generator().manual_seed(SEED + at)) for at, n in enumerate(lengths)]
    units = [each[: len(each) // unit * unit].view(-1, unit) for each in drawn]
    parts = situation["workers"] if isinstance(streams, WorkerStreams) and not local else 1
    dealt = (
        [list(range(at, len(units[0]), parts)) for at in range(parts)]
        if not local
        else [list(range(len(each))) for each in units]
    )
    shared = isinstance(streams, OneStream) or streams.shared_sum
    balancer = MeanBalancer(dealt) if situation["grab"] else PairBalancer(dealt, coordinated=shared)
    for epoch in range(4):
        for rank in range(situation["workers"]):
            data = rank if local else 0
            flat = [dealt[at % parts][at // parts] for at in range(len(units[0]))] if not local else dealt[rank]
            whole = len(units[data]) * unit
            expected = torch.cat([units[data][flat].reshape(-1), drawn[data][whole:]])
            assert torch.equal(orders[epoch][rank], expected)
        for stream, order in enumerate(dealt):
            data = stream if local else 0
            rows = torch.stack([played.gradients[data][units[data][at]].mean(0) for at in order])
            balancer.observe(rows, stream)
        dealt = balancer.next_orders()


@settings(max_examples=25, deadline=None)
@given(situations(), st.integers(1, 12))
def test_a_state_in_the_middle_of_an_epoch_goes_on_as_if_nothing_had_been(
    situation: dict[str, Any], steps: int
) -> None:
    first = Played([PairBalance(unit=situation["unit"]) for _ in range(2)], (60,), 3, False)
    other = Played([PairBalance(unit=situation["unit"]) for _ in range(2)], (60,), 3, False)
    for at in range(40):
        weights = [*situation["steps"][at][1][:1], 3]
        for played in (first, other):
            if played.cursor.progress.epoch < 3:
                epoch = played.cursor.progress.epoch
                played.step(played.plan(situation["steps"][at][0] + 2, weights, situation["micro"]))
                if played.cursor.progress.epoch > epoch:
                    played.exchange()
        if at == steps:
            other.exchange()
            state = other.orders[0].state_dict()
            fresh = [PairBalance(unit=situation["unit"]) for _ in range(2)]
            for rank, order in enumerate(fresh):
                order.begin(rank, 2, (60,), 3, other.probe)
                order.load_state_dict(state)
            other.orders = list(fresh)
        assert first.orders[0].digest == other.orders[0].digest == other.orders[1].digest
        assert torch.equal(first.permutation(1), other.permutation(1))


def one_epoch(order: Learnt, shift: float) -> list[int]:
    played = Played([order], (64,), 4, False)
    played.gradients[0][::3] += shift
    while played.cursor.progress.epoch < 1:
        played.step(played.plan(8, [1], None))
    played.exchange()
    return played.permutation(0).tolist()


@pytest.mark.parametrize("make", [PairBalance, GraB])
def test_the_order_depends_on_the_gradients(make: type[PairBalance] | type[GraB]) -> None:
    assert one_epoch(make(), 0.0) == one_epoch(make(), 0.0)
    assert one_epoch(make(), 0.0) != one_epoch(make(), 1.0)


def test_the_order_of_another_epoch_is_not_known() -> None:
    played = Played([PairBalance()], (20,), 2, False)
    with pytest.raises(LoopError, match="order of epoch 1 is not known in epoch 0"):
        played.orders[0].permutation(20, 1, SEED)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PairBalance(unit=0), "unit \\(0\\) must be a whole number"),
        (lambda: PairBalance(sketch=0), "sketch \\(0\\) must be a whole number"),
        (lambda: GraB(sketch=64, exact=True), "no effect with exact=True"),
        (lambda: PairBalance(streams=4), "must be order.OneStream\\(\\) or order.WorkerStreams\\(\\)"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_be(make: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        make()


@pytest.mark.parametrize(
    ("order", "lengths", "exact", "words"),
    [
        (PairBalance(exact=True), (40,), False, "give Run probe=Probe\\(exact=True\\)"),
        (PairBalance(), (40, 40), False, "streams=order.WorkerStreams\\(\\)"),
        (GraB(), (40, 40), False, "streams=order.WorkerStreams\\(\\)"),
        (PairBalance(unit=30), (40,), False, "of 40 examples there are 1 units of 30"),
        (PairBalance(unit=15, streams=WorkerStreams()), (40,), False, "2 units of 15 examples are too few for 2"),
    ],
)
def test_runs_that_cannot_be(order: Learnt, lengths: tuple[int, ...], exact: bool, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        order.begin(0, 2, lengths, 4, probe(exact))
