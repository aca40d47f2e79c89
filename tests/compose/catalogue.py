"""Every method of every role, in a size that suits a tiny problem of two workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import paceline as pl
from paceline import balance, batch, codec, lr, order, sync
from paceline.probe import Example

__all__ = ["BATCH", "CATALOGUE", "DEFAULTS", "MICRO", "ROLES", "Method", "method"]

BATCH, MICRO, WORKERS = 8, 2, 2


@dataclass(frozen=True)
class Method:
    """A method of a role."""

    role: str
    name: str
    make: Callable[..., Any]
    kinds: frozenset[str] = frozenset()
    """What it does, in the words of the rules that say what cannot be together."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """What other roles have beside it, where nothing else is said and it cannot go with their defaults."""
    repeats: bool = True
    """Whether two runs of it are alike: not where clocks or chances of other processes decide."""

    @property
    def title(self) -> str:
        """The name of its class, by which errors speak of it."""
        return self.name.split()[0]


def loss(model: Callable[..., Tensor], examples: Any) -> Tensor:
    x, y = examples
    return F.cross_entropy(model(x), y)


def hierarchical(**more: Any) -> sync.Hierarchical:
    return sync.Hierarchical(2, 4, site=f"site {os.environ.get('RANK', '0')}", **more)


def norm_test(start: int = BATCH, limit: int = 2 * BATCH) -> batch.NormTest:
    return batch.NormTest(start=start, limit=limit, eta=0.5)


def each_own() -> batch.EachOwn:
    return batch.EachOwn(norm_test(start=4, limit=8), workers=WORKERS)


def orders() -> list[Method]:
    learns = frozenset({"learns an order"})
    divides = learns | {"divides gradients"}
    return [
        Method("order", "Shuffle", order.Shuffle),
        Method("order", "ShuffleOnce", order.ShuffleOnce),
        Method("order", "Sequential", order.Sequential),
        Method("order", "FlipFlop", order.FlipFlop),
        Method("order", "ShuffleBlocks", lambda: order.ShuffleBlocks(4)),
        Method("order", "PairBalance", order.PairBalance, learns),
        Method("order", "PairBalance by Walk", lambda: order.PairBalance(rule=order.Walk(limit=1.0)), learns),
        Method("order", "PairBalance by Halving", lambda: order.PairBalance(rule=order.Halving(9, 3)), learns),
        Method(
            "order", "PairBalance in WorkerStreams", lambda: order.PairBalance(streams=order.WorkerStreams()), learns
        ),
        Method("order", "GraB", order.GraB, learns),
        Method("order", "PairBalance preconditioned", lambda: order.PairBalance(preconditioned=True), divides),
        Method("order", "GraB preconditioned", lambda: order.GraB(preconditioned=True), divides),
    ]


def batches() -> list[Method]:
    whole = frozenset({"decides for all"})
    norms, directions = whole | {"compares lengths"}, whole | {"compares directions"}
    sizes: dict[str, Any] = {"start": BATCH, "limit": 2 * BATCH}
    alone = {"balance": "EachOwn", "sync": "LocalSGD"}
    return [
        Method("batch", "Fixed", lambda: batch.Fixed(BATCH), whole),
        Method("batch", "Schedule", lambda: batch.Schedule({0: BATCH, 60: 2 * BATCH}), whole),
        Method("batch", "GrowthSchedule", lambda: batch.GrowthSchedule(BATCH, 1.5, 30, 2 * BATCH), whole),
        Method("batch", "NormTest", norm_test, norms),
        Method("batch", "InnerProductTest", lambda: batch.InnerProductTest(**sizes, theta=0.5), directions),
        Method("batch", "AugmentedTest", lambda: batch.AugmentedTest(**sizes, theta=0.5), directions),
        Method("batch", "CoordinateTest", lambda: batch.CoordinateTest(**sizes, eta=0.5, every=2), directions),
        Method("batch", "EachOwn", each_own, frozenset({"decides for each"}), alone),
    ]


def balances() -> list[Method]:
    speeds = frozenset({"shares", "measures speeds"})
    alone = {"batch": "EachOwn", "sync": "LocalSGD"}
    return [
        Method("balance", "Even", balance.Even, frozenset({"shares"})),
        Method("balance", "Fixed", lambda: balance.Fixed([2, 1]), frozenset({"shares"})),
        Method("balance", "BySpeed", lambda: balance.BySpeed(every=3), speeds, repeats=False),
        Method("balance", "BySpeed per_epoch", balance.BySpeed.per_epoch, speeds, repeats=False),
        Method("balance", "EachOwn", each_own, frozenset({"shares for each"}), alone),
    ]


def local(name: str, every: Any, *kinds: str, repeats: bool = True, **settings: Any) -> Method:
    moments = set() if "averages momentum" in kinds else {"has other moments on each worker"}
    return Method(
        "sync",
        f"LocalSGD {name}".rstrip(),
        lambda **codec: sync.LocalSGD(every, **settings, **codec),
        frozenset({"averages models", *kinds, *moments}),
        repeats=repeats,
    )


def gossip(name: str, every: Any, **settings: Any) -> Method:
    make = lambda **codec: sync.Gossip(every, **settings, **codec)  # noqa: E731 (one of a list of such)
    return Method("sync", f"Gossip {name}".rstrip(), make, frozenset({"never meets"}), repeats=False)


def syncs() -> list[Method]:
    return [
        Method("sync", "AllReduce", sync.AllReduce, frozenset({"averages gradients"})),
        local("", 3),
        local("by Examples", sync.Examples(20)),
        local("by Seconds", sync.Seconds(0.004), repeats=False),
        local("by PostLocal", sync.PostLocal(4, 3)),
        local("by Ramp", sync.Ramp(1, 4, 2.0, 4)),
        local("with overlap", 3, "averages in the background", overlap=1),
        local("with Average", 3, "averages momentum", optimizer_state=sync.Average()),
        local("with Reset", 3, optimizer_state=sync.Reset()),
        local("with DiLoCo", 3, outer=sync.DiLoCo(lr=0.5)),
        local("with SlowMo", 3, outer=sync.SlowMo()),
        replace(
            local("with Measuring.LAST", 3, "measures late", measuring=sync.Measuring.LAST),
            beside={"batch": "NormTest", "lr": "AdaScale"},  # of which one is left, whatever the other role has
        ),
        Method("sync", "Hierarchical", hierarchical, frozenset({"meets in parts", "sends sums"})),
        Method("sync", "Neighbours", sync.Neighbours, frozenset({"meets in parts", "takes no codec"})),
        gossip("", 2),
        gossip("by Geometric", sync.Geometric(2)),
        gossip("by WhileNear", sync.WhileNear(4, 5.0)),
        gossip("with Average", 2, optimizer_state=sync.Average()),
    ]


def codecs() -> list[Method]:
    coded, feedback = frozenset({"rounds"}), frozenset({"rounds", "keeps what is lost"})
    return [
        Method("codec", "Identity", codec.Identity),
        Method("codec", "Half", codec.Half, coded),
        Method("codec", "BFloat16", codec.BFloat16, coded),
        Method("codec", "Uniform8", codec.Uniform8, feedback, {"sync": "LocalSGD"}),
        Method("codec", "Lattice", lambda: codec.Lattice(8), frozenset({"needs near numbers"}), {"sync": "Gossip"}),
    ]


def rates() -> list[Method]:
    return [
        Method("lr", "Constant", lr.Constant),
        Method("lr", "Linear", lambda: lr.Linear(BATCH)),
        Method("lr", "SquareRoot", lambda: lr.SquareRoot(BATCH)),
        Method("lr", "AdaScale", lambda: lr.AdaScale(BATCH), frozenset({"measures gains"})),
    ]


def probes() -> list[Method]:
    always = frozenset({"measures always"})
    return [
        Method("probe", "Probe of MicroBatch", lambda: pl.Probe(always=True), always),
        Method("probe", "Probe of Example", lambda: pl.Probe(always=True, unit=Example(loss)), always),
        Method("probe", "Probe exact", lambda: pl.Probe(always=True, exact=True), always),
    ]


CATALOGUE = [*orders(), *batches(), *balances(), *syncs(), *codecs(), *rates(), *probes()]
ROLES = ("order", "batch", "balance", "sync", "codec", "lr", "probe")
# A codec is chosen by the sync, and a probe is not needed, unless somebody says otherwise.
DEFAULTS = {"order": "Shuffle", "batch": "Fixed", "balance": "Even", "sync": "AllReduce", "lr": "Constant"}
_BY_NAME = {(each.role, each.name): each for each in CATALOGUE}


def method(role: str, name: str) -> Method:
    """The one of that name."""
    return _BY_NAME[role, name]
