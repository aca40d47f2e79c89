"""Without gradients, in real processes: the mean is kept, and the spread falls as the graph predicts."""

from __future__ import annotations

import io
import random

import pytest
import torch
from torch import Tensor

from paceline.codec import Identity, Lattice
from paceline.fleet import Fleet
from paceline.gossip import Complete, Graph, Ring, contraction
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


def one_by_one(codec: Lattice | Identity, graph: Graph, exchanges: int) -> tuple[list[float], float]:
    """One worker after the other looks for a partner: what every exchange leaves of the spread, and how far the mean
    has moved at most."""
    fleet, node = joined(codec, graph)
    chance, ratios, moved = random.Random(5), [], 0.0
    first = before = begin(fleet, node, 0)
    for at in range(exchanges):
        if spread(before) < SPENT * spread(first):  # four models may even be equal to the bit by chance
            first = before = begin(fleet, node, at)
        if chance.randrange(fleet.size) == fleet.rank:
            meet(node)
        fleet.gather(b"", "the exchange")
        settle(node)
        after = gathered(fleet, node)
        ratios.append(spread(after) / spread(before))
        moved = max(moved, float((after.mean(0) - first.mean(0)).abs().max()))
        before = after
    node.close()
    fleet.close()
    return ratios, moved


def check(found: list[tuple[list[float], float]], predicted: float) -> None:
    ratios, moved = found[0]
    assert moved < 1e-6
    left = torch.tensor(ratios)
    error = float(left.std()) / len(ratios) ** 0.5
    assert abs(float(left.mean()) - (1 - predicted)) < 4 * error
    assert error < 0.05  # or it could not tell the graphs apart


@pytest.mark.parametrize("codec", [Identity(), Lattice(8)], ids=["32 bits", "8 bits"])
def test_the_mean_is_kept_and_the_spread_falls_by_one_third(pool: Pool, codec: Lattice | Identity) -> None:
    check(pool.run(4, one_by_one, codec, Complete(), 60), predicted=1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Identity(), Lattice(8)], ids=["32 bits", "8 bits"])
def test_the_mean_is_kept_and_the_spread_falls_by_one_seventh(pool: Pool, codec: Lattice | Identity) -> None:
    check(pool.run(8, one_by_one, codec, Complete(), 240), predicted=1 / 7)


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
    # What is left is at least as little as predicted on average, but for a lucky or unlucky draw, and for the lattice.
    assert left < 10 * (1 - contraction(graph.neighbours(range(4)))) ** exchanges + 1e-4
