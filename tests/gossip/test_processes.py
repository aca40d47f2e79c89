"""Without gradients, in real processes: the mean is kept, and the spread falls as the graph predicts."""

from __future__ import annotations

import io
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.codec import Identity, Lattice
from paceline.fleet import Fleet
from paceline.gossip import Complete, Exponential, Graph, RandomRegular, Ring, Torus, contraction
from paceline.gossip.clerk import Clerk
from paceline.gossip.node import Node
from paceline.gossip.start import Shape, start
from tests.gossip.clerks import NO_COUNTERS, show, shown
from tests.pool import Pool

NUMBERS = 2000
SPENT = 1e-3  # of the spread: then all begin anew, before it is lattice and rounding


def gathered(fleet: Fleet, node: Node) -> Tensor:
    """All models, a row for each worker, in double precision: also a place where all wait for each other."""
    out = io.BytesIO()
    torch.save(shown(node.clerk), out)
    blobs = fleet.gather(out.getvalue(), "all models")
    return torch.stack([torch.load(io.BytesIO(blob)) for blob in blobs]).double()


def spread(models: Tensor) -> float:
    return float((models - models.mean(0)).square().sum())


def meet(node: Node) -> None:
    """Look for a partner, until there was an exchange."""
    node.do(lambda clerk: clerk.offer(0))
    told = node.mark()
    node.wait(lambda clerk: told() and not clerk.wishes and clerk.idle, 30.0, lambda _: "an exchange")


def settle(node: Node) -> None:
    """Wait until this worker knows how all of its exchanges ended, also those that it has given up waiting for."""
    node.wait(lambda clerk: clerk.idle and not clerk._peer.unsure, 30.0, lambda _: "partners to say how it ended")


def begin(fleet: Fleet, node: Node, seed: int) -> Tensor:
    """Everybody has another model; gives all of them."""
    own = torch.Generator().manual_seed(1000 * seed + fleet.rank)
    node.clerk.board.take()
    show(node.clerk, 1.0 + 0.01 * torch.randn(NUMBERS, generator=own))
    node.do(Clerk.begin)
    return gathered(fleet, node)


def joined(codec: Lattice | Identity, graph: Graph) -> tuple[Fleet, Node]:
    fleet = Fleet.join(60.0)
    shape = Shape(NUMBERS, 0, 0, "none", codec)
    return fleet, start(fleet, shape, NO_COUNTERS, graph)[0]


def expected(models: Tensor, graph: Graph) -> float:
    """What an exchange takes of the spread on average, over who begins and with whom of its neighbours."""
    around = graph.neighbours(range(len(models)))
    pairs = [(i, j, 1 / len(models) / len(around[i])) for i in around for j in around[i]]
    return sum(chance * float((models[i] - models[j]).square().sum()) / 2 for i, j, chance in pairs) / spread(models)


class Told(NamedTuple):
    """What came of exchanges, one after the other."""

    taken: list[float]
    """What each took of the spread."""
    expected: list[float]
    """What it had to take on average, as the models were."""
    moved: float
    """How far the mean has moved at most."""


def one_by_one(codec: Lattice | Identity, graph: Graph, exchanges: int) -> Told:
    """One worker after the other looks for a partner."""
    fleet, node = joined(codec, graph)
    chance, told = random.Random(5), Told([], [], 0.0)
    first = before = begin(fleet, node, 0)
    for at in range(exchanges):
        if spread(before) < SPENT * spread(first):  # four models may even be equal to the bit by chance
            first = before = begin(fleet, node, at)
        if chance.randrange(fleet.size) == fleet.rank:
            meet(node)
        fleet.gather(b"", "the exchange")
        settle(node)
        after = gathered(fleet, node)
        told.taken.append(1 - spread(after) / spread(before))
        told.expected.append(expected(before, graph))
        told = told._replace(moved=max(told.moved, float((after.mean(0) - first.mean(0)).abs().max())))
        before = after
    node.close()
    fleet.close()
    return told


def check(found: list[Told], least: float) -> None:
    told = found[0]
    assert told.moved < 1e-6
    more = torch.tensor(told.taken) - torch.tensor(told.expected)
    error = float(more.std()) / len(more) ** 0.5
    assert abs(float(more.mean())) < 4 * error
    assert error < 0.05  # or it could not tell the graphs apart
    assert min(told.expected) > least - 1e-9


@pytest.mark.parametrize("codec", [Identity(), Lattice(8)], ids=["32 bits", "8 bits"])
def test_the_mean_is_kept_and_the_spread_falls_by_one_third(pool: Pool, codec: Lattice | Identity) -> None:
    found = pool.run(4, one_by_one, codec, Complete(), 60)
    check(found, least=1 / 3)
    assert max(found[0].expected) == pytest.approx(1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Identity(), Lattice(8)], ids=["32 bits", "8 bits"])
def test_the_mean_is_kept_and_the_spread_falls_by_one_seventh(pool: Pool, codec: Lattice | Identity) -> None:
    found = pool.run(8, one_by_one, codec, Complete(), 240)
    check(found, least=1 / 7)
    assert max(found[0].expected) == pytest.approx(1 / 7)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [Ring(), Torus(), Exponential(), RandomRegular(3)], ids=repr)
def test_the_spread_falls_by_the_spectral_gap_at_least(pool: Pool, graph: Graph) -> None:
    check(pool.run(8, one_by_one, Lattice(8), graph, 240), least=contraction(graph.neighbours(range(8))))


def all_at_once(codec: Lattice | Identity, graph: Graph, offers: int) -> tuple[float, float, int]:
    """Everybody looks for partners as fast as it can: how far the mean has moved, what is left of the spread, and how
    many exchanges this worker had."""
    fleet, node = joined(codec, graph)
    before = begin(fleet, node, 1)
    for _ in range(offers):
        meet(node)
    fleet.gather(b"", "the exchanges")
    settle(node)
    fleet.gather(b"", "all to be idle")
    after = gathered(fleet, node)
    exchanges = node.clerk.counts.exchanges
    node.close()
    fleet.close()
    return float((after.mean(0) - before.mean(0)).abs().max()), spread(after) / spread(before), exchanges


@pytest.mark.parametrize("graph", [Complete(), Ring()], ids=["complete", "ring"])
def test_exchanges_that_come_in_each_others_way_keep_the_mean(pool: Pool, graph: Graph) -> None:
    found = pool.run(4, all_at_once, Lattice(8), graph, 25)
    moved, left, _ = found[0]
    assert moved < 1e-6
    exchanges = sum(each for _, _, each in found) // 2
    assert exchanges >= 20  # of 100 offers; where all are busy an offer comes to nothing
    # By Markov's inequality less than one draw in a hundred is a hundred times above its mean. The lattice has steps of
    # about a hundredth of the distances of a few exchanges ago, when the spread was some times larger.
    assert left < 100 * (1 - contraction(graph.neighbours(range(4)))) ** exchanges + 1e-3
