"""Trials as records would give them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.compare import Piece, Point, Row, Trial

NASTY = "<script>alert('1')</script>\" & <b>"


def pieces(count: int, *, examples: int = 32, seconds: float = 0.02, wait: float = 0.002) -> tuple[Piece, ...]:
    return tuple(
        Piece(at * seconds, seconds, examples, 2 * examples, 0.001, seconds / 2, wait, 0.003) for at in range(count)
    )


def trial(label: str, seed: int = 0, *, speed: float = 1.0, error: str | None = None, steps: int = 90) -> Trial:
    """A training of two workers, of which the first is the faster one."""
    points = tuple(
        Point(at * 0.3 / speed, at * 1500, at * 100_000, 1 - 0.6 * math.exp(-at * (1 + seed / 10)))
        for at in range(1, 6)
    )
    workers = (pieces(steps, seconds=0.02 / speed), pieces(steps, seconds=0.02 / speed, wait=0.006))
    return Trial(label, seed, points, workers, bytes_sent=500_000, efficiency=0.8, error=error)


def row(label: str, title: str = "", *, seeds: int = 1, speed: float = 1.0) -> Row:
    return Row(label, title or label, tuple(trial(label, seed, speed=speed) for seed in range(seeds)))


def many() -> Sequence[Row]:
    """Good ones, one that failed in part, one that failed, and one whose name is an attack."""
    part = Row("by-speed", "by-speed", (trial("by-speed"), Trial("by-speed", 1, error="exit code 1")))
    bad = Row("script 1", f"script 1: train.py {NASTY}", (Trial("script 1", 0, error=f"ValueError: {NASTY}"),))
    long = row("script 2", "script 2: " + "a-very-long-folder-name/" * 8 + "train.py --rate 0.1", speed=0.5)
    names = ("all-reduce", "local-sgd", "local-sgd-8bit", "gossip")
    good = [row(name, seeds=2, speed=1 + at / 3) for at, name in enumerate(names)]
    return [*good, part, bad, long, row(NASTY, speed=2.0)]
