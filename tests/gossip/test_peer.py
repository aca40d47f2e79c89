"""Exchanges over a network that delays, loses, repeats and reorders, between workers that train and die."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.codec import Identity, Lattice
from paceline.codec.rounding import FINEST, scales_for
from paceline.gossip.messages import (
    Abort,
    Action,
    Answer,
    Ask,
    Commit,
    Correct,
    Ended,
    Outcome,
    Propose,
    Refuse,
    Send,
    Wider,
)
from paceline.gossip.peer import ASKS, SELDOM, Peer
from paceline.gossip.points import Points

NUMBERS = 64
PATIENCE = 10.0
CODECS: list[Identity | Lattice] = [
    Identity(),
    Lattice(8, block=64),
    Lattice(3, block=64),
    Lattice(8, block=64, dithered=True),
]


@dataclass
class Letter:
    sender: int
    send: Send


@dataclass
class Worker:
    peer: Peer
    model: Tensor
    """What it trains: double, so that additions lose nothing that matters."""
    moves: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Corrections by exchange: the initiator and its number."""
    ended: Counter[Outcome] = field(default_factory=Counter)


class World:
    """Workers and what is under way between them."""

    def __init__(self, codec: Identity | Lattice, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.chance = random.Random(seed)
        start = torch.randn(NUMBERS, generator=generator, dtype=torch.float64)
        self.workers = {
            rank: Worker(
                Peer(rank, Points(codec, NUMBERS)),
                start + 0.01 * torch.randn(NUMBERS, generator=generator, dtype=torch.float64),
            )
            for rank in range(size)
        }
        self.start = {rank: worker.model.clone() for rank, worker in self.workers.items()}
        self.learnt = {rank: torch.zeros(NUMBERS, dtype=torch.float64) for rank in self.workers}
        self.letters: list[Letter] = []
        self.partners: dict[tuple[int, int], int] = {}
        self.farthest = 0.0
        self.now = 0.0
        self.dead: dict[int, Worker] = {}

    def train(self, rank: int) -> None:
        change = 0.01 * torch.tensor([self.chance.gauss(0, 1) for _ in range(NUMBERS)], dtype=torch.float64)
        self.workers[rank].model += change
        self.learnt[rank] += change

    def propose(self, rank: int, partner: int) -> None:
        worker = self.workers[rank]
        if rank != partner and not worker.peer.busy:
            self.act(rank, worker.peer.propose(partner, worker.model.float(), self.patience(), self.now), None)

    def patience(self) -> float:
        """Everybody has learnt its own."""
        return PATIENCE * self.chance.choice([0.2, 1.0, 3.0])

    def deliver(self, at: int, keep: bool = False) -> None:
        letter = self.letters[at] if keep else self.letters.pop(at)
        worker = self.workers.get(letter.send.to)
        if worker is None:
            return
        message, payload = letter.send.message, letter.send.payload
        models = [each.model for each in [*self.workers.values(), *self.dead.values()]]
        self.farthest = max(self.farthest, *(float((one - models[0]).abs().max()) for one in models))
        patience = self.patience()
        actions = worker.peer.receive(letter.sender, message, payload, worker.model.float(), patience, self.now)
        initiator = letter.sender if isinstance(message, Propose | Commit | Abort) else letter.send.to
        self.act(letter.send.to, actions, (initiator, message.exchange))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for rank, worker in list(self.workers.items()):
            self.act(rank, worker.peer.tick(self.now), None)

    def kill(self, rank: int) -> None:
        self.dead[rank] = self.workers.pop(rank)

    def act(self, rank: int, actions: list[Action], exchange: tuple[int, int] | None) -> None:
        worker = self.workers[rank]
        for action in actions:
            if isinstance(action, Send):
                self.letters.append(Letter(rank, action))
                if isinstance(action.message, Propose):
                    self.partners[rank, action.message.exchange] = action.to
            elif isinstance(action, Correct):
                assert exchange is not None
                assert exchange not in worker.moves, "moved twice in one exchange"
                worker.moves[exchange] = action.change.double()
                worker.model += action.change.double()
            elif isinstance(action, Ended):
                worker.ended[action.outcome] += 1

    def settle(self) -> None:
        """The network works from now on."""
        for _ in range(400):
            while self.letters:
                self.deliver(0)
            busy = any(worker.peer.busy for worker in self.workers.values())
            unsure = any(partner in self.workers for worker in self.workers.values() for partner in worker.peer.unsure)
            if not busy and not unsure:
                return
            self.tick(3 * PATIENCE)
        raise AssertionError("somebody waits for ever")

    def check_nothing_is_lost(self) -> None:
        """Every model is where it began, with all that it has learnt and all corrections, each of which counts once."""
        for rank, worker in self.workers.items():
            expected = self.start[rank] + self.learnt[rank] + sum(worker.moves.values())
            assert torch.allclose(worker.model, expected, rtol=0, atol=1e-12)

    def one_sided(self) -> dict[tuple[int, int], Tensor]:
        """The exchanges in which one side has moved, and the other has not."""
        everybody = [*self.workers.items(), *self.dead.items()]
        moved = {exchange for _, worker in everybody for exchange in worker.moves}
        found = {}
        for exchange in moved:
            moves = [worker.moves[exchange] for _, worker in everybody if exchange in worker.moves]
            assert len(moves) <= 2
            if len(moves) == 2:
                assert torch.equal(moves[0], -moves[1])  # to the bit
            else:
                found[exchange] = moves[0]
        return found


schedules = given(
    st.sampled_from(CODECS),
    st.integers(2, 4),
    st.integers(0, 10**6),
    st.lists(st.sampled_from("ttppppddddddddrlsx"), max_size=120),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@schedules
def test_any_schedule(codec: Identity | Lattice, size: int, seed: int, schedule: list[str], deaths: bool) -> None:
    follow(codec, size, seed, schedule, deaths)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@schedules
def test_any_of_many_schedules(
    codec: Identity | Lattice, size: int, seed: int, schedule: list[str], deaths: bool
) -> None:
    follow(codec, size, seed, schedule, deaths)


def follow(codec: Identity | Lattice, size: int, seed: int, schedule: list[str], deaths: bool) -> None:
    world = World(codec, size, seed)
    chance = world.chance
    for what in schedule:
        alive = sorted(world.workers)
        if what == "t":
            world.train(chance.choice(alive))
        elif what == "p":
            world.propose(chance.choice(alive), chance.choice(range(size)))
        elif what in "drl" and world.letters:
            at = chance.randrange(len(world.letters))  # in any order
            if what == "l":
                world.letters.pop(at)
            else:
                world.deliver(at, keep=what == "r")
        elif what == "s":
            world.tick(chance.choice([1.0, PATIENCE]))
        elif what == "x" and deaths and len(alive) > 1:
            world.kill(chance.choice(alive))
    world.settle()
    world.check_nothing_is_lost()
    half = world.one_sided()
    for exchange, move in half.items():
        assert exchange[0] in world.dead or world.partners[exchange] in world.dead  # only then, whatever was lost
        # Half of the distance of two points, which are twice as far apart as from the first model, at most; three bits
        # may add half a step to each, with steps of up to 4 / 7 of the distance.
        assert float(move.abs().max()) <= 2 * world.farthest * (0.5 + 2 / 7)
    if not half and not world.dead:
        total = sum(worker.model - world.learnt[rank] for rank, worker in world.workers.items())
        assert torch.allclose(total, sum(world.start.values()), rtol=0, atol=1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_an_exchange_is_half_of_the_way(codec: Identity | Lattice) -> None:
    world = World(codec, 2, seed=3)
    first, second = (worker.model.clone() for worker in world.workers.values())
    world.propose(0, 1)
    world.train(0)  # while it is under way
    while world.workers[1].peer.busy is False:
        world.deliver(0)
    world.train(1)
    world.settle()
    assert world.workers[0].ended == world.workers[1].ended == Counter({Outcome.DONE: 1})
    mean = (first + second) / 2
    # Nobody was met before, so that the first points go out on the finest lattice, or in full precision.
    finest = 2 * FINEST * float(torch.stack([first, second]).abs().max())
    for rank, worker in world.workers.items():
        assert torch.allclose(worker.model - world.learnt[rank], mean, rtol=0, atol=finest + 1e-6)
    # From now on both know how far they may be apart, and points are off by half a step at most.
    begin = [worker.model.clone() for worker in world.workers.values()]
    reach = 2 * float((first - second).abs().max())
    step = 0.0
    if isinstance(codec, Lattice):
        step = float(scales_for(torch.tensor([reach]), torch.zeros(1), codec.bits))
    world.propose(1, 0)
    world.settle()
    now = [worker.model for worker in world.workers.values()]
    assert torch.allclose(now[0] + now[1], begin[0] + begin[1], rtol=0, atol=1e-12)
    for one, other, after in zip(begin, begin[::-1], now, strict=True):
        assert torch.allclose(after, (one + other) / 2, rtol=0, atol=step + 1e-6)


def test_spread_falls_as_predicted() -> None:
    """Complete graph, no gradients: 1 / (n - 1) of the spread goes with every exchange, on average."""
    size, exchanges, ratios = 8, 10, []
    for seed in range(40):
        world = World(Identity(), size, seed)
        world.workers = {
            rank: Worker(
                worker.peer,
                torch.randn(NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed * size + rank)),
            )
            for rank, worker in world.workers.items()
        }
        models = torch.stack([worker.model for worker in world.workers.values()])
        mean, before = models.mean(0), float((models - models.mean(0)).square().sum())
        for _ in range(exchanges):
            one, other = world.chance.sample(range(size), 2)
            world.propose(one, other)
            world.settle()
        models = torch.stack([worker.model for worker in world.workers.values()])
        assert torch.allclose(models.mean(0), mean, rtol=0, atol=1e-6)
        ratios.append(float((models - mean).square().sum()) / before)
    predicted = (1 - 1 / (size - 1)) ** exchanges
    # One run of 10 exchanges has a standard deviation of about a third of that; 40 runs, a twentieth.
    assert sum(ratios) / len(ratios) == pytest.approx(predicted, rel=0.15)


def test_too_far_away_for_few_bits() -> None:
    world = World(Lattice(4, block=64), 2, seed=0)
    world.workers[1].model += 3.0  # nobody was met before, so that the lattice is far too fine
    world.propose(0, 1)
    bits = []
    while world.letters:
        message = world.letters[0].send.message
        bits += [message.bits] if isinstance(message, Propose | Answer | Wider | Commit) else []
        world.deliver(0)
    assert bits == [4, 16, 16, 32, 32, 32, 32]  # asked twice for more; then the answer and the decision
    assert world.workers[0].ended[Outcome.DONE] == world.workers[1].ended[Outcome.DONE] == 1
    # Now both know how far away a partner may be.
    world.propose(1, 0)
    while world.letters:
        message = world.letters[0].send.message
        assert isinstance(message, Propose | Answer | Commit)
        assert message.bits == 4
        world.deliver(0)
    assert world.workers[0].ended[Outcome.DONE] == 2


def test_both_begin_at_once() -> None:
    world = World(Identity(), 2, seed=0)
    world.propose(0, 1)
    world.propose(1, 0)
    world.settle()
    assert world.workers[0].ended[Outcome.DONE] == 1
    assert world.workers[1].ended == Counter({Outcome.WITHDRAWN: 1, Outcome.DONE: 1})
    assert not world.one_sided()


def test_who_is_busy_refuses_at_once() -> None:
    world = World(Identity(), 3, seed=0)
    world.propose(0, 1)
    world.propose(2, 0)
    world.deliver(1)
    assert world.letters[-1].send == Send(2, Refuse(0))
    world.settle()
    assert world.workers[2].ended == Counter({Outcome.REFUSED: 1})
    assert world.workers[0].ended == Counter({Outcome.DONE: 1})


def test_who_has_nothing_to_show_refuses() -> None:
    peer = Peer(1, Points(Identity(), NUMBERS))
    payload = torch.zeros(4 * NUMBERS, dtype=torch.uint8)
    assert peer.receive(0, Propose(0, 32), payload, None, PATIENCE, 0.0) == [Send(0, Refuse(0))]
    assert not peer.busy


def test_a_lost_answer_moves_nobody() -> None:
    world = World(Identity(), 2, seed=0)
    world.propose(0, 1)
    world.deliver(0)
    world.letters.clear()  # the answer
    world.tick(PATIENCE)
    world.settle()
    assert world.workers[0].ended[Outcome.TIMED_OUT] == world.workers[1].ended[Outcome.TIMED_OUT] == 1
    assert not world.workers[0].moves
    assert not world.workers[1].moves


def test_a_lost_decision_is_asked_for() -> None:
    world = World(Identity(), 2, seed=0)
    world.propose(0, 1)
    world.deliver(0)
    world.deliver(0)
    assert isinstance(world.letters.pop().send.message, Commit)
    world.tick(PATIENCE)
    assert world.letters[-1].send == Send(0, Ask(0, life=0))
    world.settle()
    assert world.workers[1].ended == Counter({Outcome.DONE: 1})
    assert not world.one_sided()


def decided_and_cut_off() -> World:
    """The initiator has moved, and the responder cannot hear of it, however often it asks."""
    world = World(Identity(), 2, seed=0)
    world.propose(0, 1)
    world.deliver(0)
    world.deliver(0)
    for _ in range(ASKS + 1):
        world.letters.clear()
        world.tick(3 * PATIENCE)
    world.letters.clear()
    assert world.workers[1].ended == Counter({Outcome.UNKNOWN: 1})
    assert not world.workers[1].peer.busy  # free for others
    assert world.workers[1].peer.unsure == (0,)
    return world


def test_who_comes_back_is_asked_again() -> None:
    world = decided_and_cut_off()
    world.tick(3 * PATIENCE * SELDOM)
    world.settle()
    assert world.workers[1].ended == Counter({Outcome.UNKNOWN: 1, Outcome.LATE: 1})
    assert not world.one_sided()
    assert world.workers[1].peer.unsure == ()


def test_who_never_comes_back_is_forgotten() -> None:
    world = decided_and_cut_off()
    moved = world.workers[0].moves[0, 0]
    world.kill(0)
    assert world.workers[1].peer.lost(0) == []
    assert world.workers[1].peer.unsure == ()
    assert world.workers[1].peer.due is None
    assert torch.equal(world.one_sided()[0, 0], moved)  # half of the distance: the bound that is stated


def test_a_question_does_not_end_what_is_open() -> None:
    """The responder's patience ends while the initiator asks for more bits."""
    world = World(Lattice(4, block=64), 2, seed=0)
    near = world.workers[0].model.float()
    points = Points(Lattice(4, block=64), NUMBERS)
    payload, _ = points.encode(near + 3.0, 4, seed=0)
    first = world.workers[0].peer
    first.propose(1, near, PATIENCE, 0.0)
    assert first.receive(1, Answer(0, 4, of=4, life=0), payload, None, PATIENCE, 1.0) == [
        Send(1, Wider(0, 16, answer=True))
    ]
    assert first.receive(1, Ask(0, life=0), None, None, PATIENCE, 2.0) == []
    assert first.busy


def test_what_was_decided_is_not_told_to_another_life() -> None:
    world = World(Identity(), 2, seed=0)
    world.propose(0, 1)
    late = world.letters[0]
    world.settle()
    again = World(Identity(), 2, seed=1)
    world.workers[1] = Worker(Peer(1, Points(Identity(), NUMBERS), life=1), again.workers[1].model)
    world.letters.append(late)  # a copy that was long under way
    world.settle()
    assert not world.workers[1].moves
    assert world.workers[1].ended == Counter({Outcome.TIMED_OUT: 1})


def test_what_is_not_finite_moves_nobody() -> None:
    for codec in CODECS:
        for broken in (0, 1):
            world = World(codec, 2, seed=0)
            world.workers[broken].model[5] = torch.nan
            world.propose(0, 1)
            world.settle()
            assert not world.workers[0].moves
            assert not world.workers[1].moves
            assert world.workers[0].ended == Counter({Outcome.REFUSED: 1})
            world.workers[broken].model[5] = 0.0  # and afterwards all is as it was
            world.propose(0, 1)
            world.settle()
            assert world.workers[0].ended[Outcome.DONE] == 1


def test_another_codec_is_refused() -> None:
    peer = Peer(1, Points(Lattice(4), NUMBERS))
    for bits, length in ((8, 64), (4, 7), (5, 40)):
        payload = torch.zeros(length, dtype=torch.uint8)
        assert peer.receive(0, Propose(0, bits), payload, torch.zeros(NUMBERS), PATIENCE, 0.0) == [Send(0, Refuse(0))]
        assert peer.receive(0, Answer(0, bits, of=bits, life=0), payload, None, PATIENCE, 0.0) == []
    assert not peer.busy


def test_a_partner_that_is_known_to_be_dead_is_not_waited_for() -> None:
    world = World(Identity(), 2, seed=0)
    world.propose(0, 1)
    assert world.workers[0].peer.lost(3) == []
    assert world.workers[0].peer.lost(1) == [Ended(1, Outcome.TIMED_OUT)]
    assert world.workers[0].peer.due is None


def test_an_answer_to_nothing_is_told_so() -> None:
    peer = Peer(0, Points(Identity(), NUMBERS))
    payload = torch.zeros(4 * NUMBERS, dtype=torch.uint8)
    assert peer.receive(1, Answer(7, 32, of=32, life=0), payload, None, PATIENCE, 0.0) == [Send(1, Abort(7))]
    assert peer.receive(1, Wider(7, 32, answer=True), None, None, PATIENCE, 0.0) == []
    assert peer.receive(1, Commit(7, 32), None, None, PATIENCE, 0.0) == []
    assert peer.receive(1, Refuse(7), None, None, PATIENCE, 0.0) == []


def test_an_answer_belongs_to_the_point_that_it_answers() -> None:
    """A copy of the first proposal is answered while the initiator was asked for more bits."""
    world = World(Lattice(4, block=64), 2, seed=0)
    world.workers[1].model += 3.0
    world.propose(0, 1)
    world.settle()  # now lattices are coarse, since partners may be far away
    peer, model = world.workers[0].peer, world.workers[0].model.float()
    coarse = Points(Lattice(4, block=64), NUMBERS)
    (first,) = peer.propose(1, model, PATIENCE, world.now)
    (second,) = peer.receive(1, Wider(1, 16, answer=False), None, None, PATIENCE, world.now)
    assert isinstance(first, Send)
    assert isinstance(second, Send)
    assert first.payload is not None
    shown = torch.empty(NUMBERS)
    assert Lattice(4, block=64).decode(first.payload, model, shown) == 0
    theirs = model + 1.0
    payload, _ = coarse.encode(theirs, 32, seed=0)
    correct, commit, _ = peer.receive(1, Answer(1, 32, of=4, life=0), payload, None, PATIENCE, world.now)
    assert isinstance(correct, Correct)
    assert torch.equal(correct.change, (theirs - shown) / 2)
    assert not torch.allclose(shown, model, atol=0.05)
    assert commit == Send(1, Commit(1, 32))
