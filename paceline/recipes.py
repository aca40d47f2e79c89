"""Settings that belong together: each under the name of its paper, or of the cluster that it is for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from paceline.balance import BySpeed
from paceline.batch import Fixed, NormTest
from paceline.codec import Identity, Lattice, Uniform8
from paceline.gossip import Graph, Ring
from paceline.lr import AdaScale, Constant, Scales
from paceline.optim import AdaGradNorm
from paceline.order import PairBalance
from paceline.roles import Balance, Batch, LearningRate, Order, Sync
from paceline.sync import Gossip, LocalSGD
from paceline.sync.every import Every

__all__ = [
    "PiecewiseRoles",
    "Roles",
    "ad_psgd",
    "adadagrad",
    "adadagrad_norm",
    "everything",
    "slow_links",
    "uneven",
    "unreliable",
]


class Roles(TypedDict):
    """Roles for one run, used as ``Run(model, optimizer, dataset, **roles)``; what is not there has its default.

    It is a plain dict: ``{**roles, "lr": Linear(64)}`` has another rule.
    """

    batch: Batch
    order: NotRequired[Order]
    balance: NotRequired[Balance]
    sync: NotRequired[Sync]
    lr: NotRequired[LearningRate]


class PiecewiseRoles(Roles):
    """The same with the size of the pieces that each worker does its share in."""

    micro: int


def uneven(batch: int, *, every: int = 20) -> Roles:
    """For machines of different speeds behind links that are fast enough: everybody finishes each step together.

    Shares follow the measured speeds, under ``AllReduce``. So the model is that of equal shares, to rounding, and no
    setting of the training has to be chosen anew.

    Args:
        batch: examples in a step, all workers together.
        every: steps from one look at the speeds to the next.
    """
    return {"batch": Fixed(batch), "balance": BySpeed(every=every)}


def slow_links(batch: int, *, every: Every | int = 8, overlap: int = 0) -> Roles:
    """For links that carry gradients more slowly than workers compute them: a model of 8 bits a number, now and then.

    ``LocalSGD`` with ``Uniform8``, which keeps what is lost for the next round. Rounds of 8 steps send a thirtieth of
    the bytes; what they cost in accuracy depends on the task, so compare with a run of ``every=1``.

    Args:
        batch: examples in a step, all workers together.
        every: steps from one average to the next, or a schedule (``PostLocal``).
        overlap: steps that are done while an average is under way, if workers still wait for averages; each is done on
            an older model.
    """
    return {"batch": Fixed(batch), "sync": LocalSGD(every, codec=Uniform8(), overlap=overlap)}


def unreliable(
    batch: int,
    *,
    every: Every | int = 4,
    bits: int = 8,
    bind: str = "127.0.0.1",
    invitation: str | Path | None = None,
) -> Roles:
    """For workers that die, freeze or come and go: pairs average in the background, and nobody is waited for.

    ``Gossip`` with ``Lattice``. Nothing that learns from all workers at once goes with it: no batch by tests, no shares
    by speed (who is fast simply does more steps), no learnt order. Start it with ``paceline run --independent``.

    Args:
        batch: examples in a step, all workers together.
        every: steps of a worker from one exchange to the next.
        bits: for each number on the wire, 2 to 16.
        bind: the address of this machine at which the others reach this worker.
        invitation: the file by which a worker that was started again finds the others; the launcher gives one itself.
    """
    gossip = Gossip(every, codec=Lattice(bits), bind=bind, invitation=invitation)
    return {"batch": Fixed(batch), "sync": gossip}


def everything(start: int, limit: int, micro: int, *, eta: float = 0.7, every: Every | int = 4) -> PiecewiseRoles:
    """For uneven machines behind slow links, and a batch that nobody knows: all that goes together.

    One measurement, the sketches of micro-batches, serves three decisions: the order of the next epoch (PairBalance),
    the batch (NormTest), and what a larger batch is worth to the learning rate (AdaScale). Shares follow the speeds
    (BySpeed), and models travel in 8 bits at the end of a round (LocalSGD with Uniform8). What is missing cannot be
    beside these: averages in the background come too late for the next epoch's order, and workers that gossip
    have no common step to learn from. Two runs are not alike to the bit, since clocks decide about local batches.

    Args:
        start: the first batch, all workers together, which the learning rate was chosen for.
        limit: the largest.
        micro: examples of a forward pass, a quarter of a worker's first share or less: what is compared and ordered.
        eta: the noise of a gradient over its length that is allowed.
        every: steps from one average to the next.
    """
    return {
        "batch": NormTest(start=start, limit=limit, eta=eta),
        "order": PairBalance(),
        "balance": BySpeed(),
        "sync": LocalSGD(every, codec=Uniform8()),
        "lr": AdaScale(base=start),
        "micro": micro,
    }


def adadagrad(
    parameters: Iterable[Tensor],
    *,
    lr: float,
    start: int,
    limit: int,
    eta: float,
    follow: bool = True,
    weight_decay: float = 0.0,
) -> tuple[torch.optim.Optimizer, Roles]:
    """AdAdaGrad (Lau, Liu and Kolar 2024): AdaGrad whose batch follows the norm test; the optimizer, and roles for it.

    The gradient is multiplied by AdaScale's gain, with ``lr`` for the batch ``start``: without a rule, few large steps
    get nowhere, and with the learning rate multiplied they go too far, since the sums of squares grow by a step what
    they should by many. ``follow=False`` leaves both as they are, and decides from one step alone, as published.
    """
    optimizer = torch.optim.Adagrad(parameters, lr=lr, weight_decay=weight_decay)
    return optimizer, _rules(start, limit, eta, follow)


def adadagrad_norm(
    parameters: Iterable[Tensor],
    *,
    lr: float,
    start: int,
    limit: int,
    eta: float,
    follow: bool = True,
    initial: float = 0.0,
    weight_decay: float = 0.0,
) -> tuple[torch.optim.Optimizer, Roles]:
    """AdAdaGradNorm (same paper): as :func:`adadagrad`, with one step size for all coordinates."""
    optimizer = AdaGradNorm(parameters, lr=lr, initial=initial, weight_decay=weight_decay)
    return optimizer, _rules(start, limit, eta, follow)


def ad_psgd(graph: Graph = Ring()) -> Gossip:  # noqa: B008 (it is immutable)
    """AD-PSGD (Lian et al. 2018): after every step an average with one random neighbour, in full precision.

    Gradients are of the model from before the average that comes meanwhile, as published. There the graph must be
    bipartite, or workers that wait for each other would stand still for ever; here a busy partner refuses at once.
    """
    return Gossip(1, graph=graph, codec=Identity())


def _rules(start: int, limit: int, eta: float, follow: bool) -> Roles:
    if not follow:
        return {"batch": NormTest.as_published(start=start, limit=limit, eta=eta), "lr": Constant()}
    gain = AdaScale(base=start, scales=Scales.GRADIENT)
    return {"batch": NormTest(start=start, limit=limit, eta=eta), "lr": gain}
