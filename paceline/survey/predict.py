"""What an epoch takes with each method, from what was measured of a cluster: pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paceline.balance.even import Even
from paceline.balance.solver import Speed, equal_finish, finish, makespan

__all__ = ["EVERY", "NEAR", "Forecast", "Link", "Survey", "fit", "forecasts", "recommend"]

EVERY = 8
"""Steps of a round of Local SGD, and between two exchanges of a worker under gossip, that are forecast."""

NEAR = 1.1  # what takes no longer than this times the fastest is as good: then the plainer method is recommended

FLAT = 1e-6  # of a step's time: what an example takes at least, where more of them seem to take no longer

OWN_AND_OTHERS = 2  # exchanges for each that a worker begins: somebody begins one with it, too


class Link(msgspec.Struct, frozen=True):
    """What one worker gets from another."""

    one: int
    other: int
    seconds: float
    """That a short message takes there and back."""
    bytes_per_second: float
    """Each way, when both send at once, in messages as long as the model (but 256 kB at least, and 4 MB at most)."""


class Survey(msgspec.Struct, frozen=True):
    """What was measured of a cluster with a model."""

    examples: int
    """Of an epoch."""
    batch: int
    """Of all workers together."""
    model_bytes: int
    """Of the parameters that are trained."""
    speeds: list[Speed]
    """Of each worker, with all at work at once: loading, forward, backward, optimizer."""
    steps: list[list[tuple[int, float]]]
    """Of each worker, what that was fitted to: examples, and the seconds of a step with so many."""
    sum_seconds: float
    """To sum gradients, or models, over all workers."""
    coded_seconds: float
    """The same in 8 bits."""
    exchange_seconds: list[float]
    """Of each worker, its own work for an exchange with another: copies, and 8 bits there and back."""
    links: list[Link]
    """Between every two workers."""


class Forecast(NamedTuple):
    """What an epoch takes with one method."""

    name: str
    what: str
    """In code: a recipe of :mod:`paceline.recipes`, or roles."""
    seconds: float
    why: str
    """When this is the one to take."""


def fit(points: Sequence[tuple[int, float]]) -> Speed:
    """The line ``fixed + per_example * n`` that is nearest to the measured seconds, in parts of these.

    Neither is below zero: then the line goes through the origin, or is all but flat, since nothing takes no time.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    seconds = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (each - n) ** 2 for w, (each, _) in zip(weights, points, strict=True))
    along = sum(w * (each - n) * (s - seconds) for w, (each, s) in zip(weights, points, strict=True))
    slope = max(along / spread if spread else 0.0, FLAT * seconds / n)
    if not spread or seconds < slope * n:
        squares = sum(w * each * each for w, (each, _) in zip(weights, points, strict=True))
        products = sum(w * each * s for w, (each, s) in zip(weights, points, strict=True))
        return Speed(0.0, products / squares)
    return Speed(seconds - slope * n, slope)


def forecasts(survey: Survey) -> list[Forecast]:
    """Every method, the plainest first."""
    workers, steps = len(survey.speeds), math.ceil(survey.examples / survey.batch)
    even = Even().split(survey.batch, workers)
    together = makespan(survey.speeds, even)
    by_speed = makespan(survey.speeds, equal_finish(survey.batch, survey.speeds))
    rates = [share / finish(speed, share) for speed, share in zip(survey.speeds, even, strict=True)]
    alone = survey.examples / sum(rates)
    rounds = steps / EVERY
    return [
        Forecast(
            "all-reduce",
            "sync.AllReduce(), as DistributedDataParallel",
            steps * (together + survey.sum_seconds),
            "workers are alike and averages are quick: little is gained by anything else",
        ),
        Forecast(
            "balance",
            f"recipes.uneven({survey.batch}): balance.BySpeed()",
            steps * (by_speed + survey.sum_seconds),
            "workers differ, and averages are quick enough for every step",
        ),
        Forecast(
            "local",
            f"sync.LocalSGD({EVERY})",
            steps * together + rounds * survey.sum_seconds,
            "workers are alike, and an average takes long beside a step",
        ),
        Forecast(
            "local, 8 bit",
            f"recipes.slow_links({survey.batch}, every={EVERY}): sync.LocalSGD with codec.Uniform8()",
            steps * together + rounds * survey.coded_seconds,
            "workers are alike, and averages take so long that bytes count",
        ),
        Forecast(
            "local by time",
            f"sync.LocalSGD(sync.Seconds({EVERY * together:.2g}), codec=codec.Uniform8())",
            alone + rounds * survey.coded_seconds,
            "workers differ, and averages take long: who is fast does more between them",
        ),
        Forecast(
            "gossip", f"sync.Gossip({EVERY})", _gossip(survey, even), "workers differ, and may fail or come later"
        ),
    ]


def recommend(found: Sequence[Forecast]) -> Forecast:
    """The plainest of those that are about as fast as the fastest."""
    fastest = min(each.seconds for each in found)
    return next(each for each in found if each.seconds <= NEAR * fastest)


def _gossip(survey: Survey, shares: Sequence[int]) -> float:
    """Nobody waits for anybody, nor for a link: only the work for exchanges is added to each worker's own."""
    rate = 0.0
    for speed, share, exchange in zip(survey.speeds, shares, survey.exchange_seconds, strict=True):
        rate += share / (finish(speed, share) + OWN_AND_OTHERS * exchange / EVERY)
    return survey.examples / rate
