"""Settings that belong together, each under the name of the paper that they come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.batch import NormTest
from paceline.codec import Identity
from paceline.gossip import Graph, Ring
from paceline.lr import AdaScale, Constant
from paceline.optim import AdaGradNorm
from paceline.roles import LearningRate
from paceline.sync import Gossip

__all__ = ["Adaptive", "ad_psgd", "adadagrad", "adadagrad_norm"]


class Adaptive(NamedTuple):
    """An optimizer, and the batch and learning-rate rule for it.

    Used as ``Run(model, found.optimizer, dataset, batch=found.batch, lr=found.lr)``.
    """

    optimizer: torch.optim.Optimizer
    batch: NormTest
    lr: LearningRate


def adadagrad(
    parameters: Iterable[Tensor],
    *,
    lr: float,
    start: int,
    limit: int,
    eta: float,
    follow: bool = True,
    weight_decay: float = 0.0,
) -> Adaptive:
    """AdAdaGrad (Lau, Liu and Kolar 2024): AdaGrad whose batch follows the norm test.

    The learning rate follows the batch by AdaScale's gain, with ``lr`` for the batch ``start``: without that, few large
    steps get nowhere. ``follow=False`` leaves it as it is, and decides from one step alone, as published.
    """
    optimizer = torch.optim.Adagrad(parameters, lr=lr, weight_decay=weight_decay)
    return Adaptive(optimizer, *_rules(start, limit, eta, follow))


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
) -> Adaptive:
    """AdAdaGradNorm (same paper): as :func:`adadagrad`, with one step size for all coordinates."""
    optimizer = AdaGradNorm(parameters, lr=lr, initial=initial, weight_decay=weight_decay)
    return Adaptive(optimizer, *_rules(start, limit, eta, follow))


def ad_psgd(graph: Graph = Ring()) -> Gossip:  # noqa: B008 (it is immutable)
    """AD-PSGD (Lian et al. 2018): after every step an average with one random neighbour, in full precision.

    Gradients are of the model from before the average that comes meanwhile, as published. There the graph must be
    bipartite, or workers that wait for each other would stand still for ever; here a busy partner refuses at once.
    """
    return Gossip(1, graph=graph, codec=Identity())


def _rules(start: int, limit: int, eta: float, follow: bool) -> tuple[NormTest, LearningRate]:
    if not follow:
        return NormTest.as_published(start=start, limit=limit, eta=eta), Constant()
    return NormTest(start=start, limit=limit, eta=eta), AdaScale(base=start)
