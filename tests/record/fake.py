"""Events as a run would send them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.events import Ended, Event, Gossiped, Measured, Remark, Resumed, Saved, Started, StepDone
from paceline.records import GradientStats, Progress

START = 1_700_000_000.0


def started(workers: int = 2, *, time: float = START, target: Progress | None = None, dataset: int = 640) -> Started:
    return Started(time, workers, 1000, dataset, {"batch": "Fixed(64)"}, {"torch": "2"}, target)


def step(
    number: int,
    *,
    time: float | None = None,
    seconds: float = 0.01,
    counts: Sequence[int] = (48, 16),
    load: Sequence[float] = (0.001, 0.001),
    compute: Sequence[float] = (0.006, 0.004),
    wait: Sequence[float] = (0.0, 0.002),
    communicate: float = 0.0005,
    loss: float = 0.5,
    examples: int | None = None,
    stats: GradientStats | None = None,
    steps: int = 1,
    drift: float | None = None,
) -> StepDone:
    """The step with this number, from 0; ten milliseconds each unless told otherwise."""
    return StepDone(
        time=START + (number + 1) * seconds if time is None else time,
        step=number,
        epoch=0,
        examples=(number + 1) * sum(counts) if examples is None else examples,
        batch=sum(counts) // steps,
        loss=loss,
        learning_rate=0.1,
        seconds=seconds,
        counts=list(counts),
        load_seconds=list(load),
        compute_seconds=list(compute),
        wait_seconds=list(wait),
        communicate_seconds=communicate,
        bytes_sent=4000,
        applied=True,
        stats=stats,
        steps=steps,
        drift=drift,
        efficiency=0.8,
    )


def gossiped(time: float = START + 2, exchanges: int = 3, partner: int | None = 3) -> Gossiped:
    return Gossiped(
        time=time,
        step=1,
        exchanges=exchanges,
        refusals=1,
        timeouts=0,
        late=0,
        bits=8.0,
        staleness=1.5,
        distance=0.25,
        spread=None,
        bytes_sent=4000,
        bytes_received=4100,
        unheard=0,
        members=4,
        examples=640,
        worker=2,
        known=5,
        partner=partner,
        wider=1,
        kernel="numba",
    )


def one_of_each() -> list[Event]:
    return [
        started(target=Progress(epoch=3)),
        Resumed(START + 1, 100, "run/checkpoint", 4),
        step(0, stats=GradientStats(units=8, weight=64.0, variance=2.5, mean_sqnorm=0.75)),
        Measured(START + 3, 1, {"accuracy": 0.9, "größe [m]": 1e-300}),
        gossiped(),
        Remark(START + 3, 1, "worker 1 is slow"),
        Saved(START + 4, 1, "run/checkpoint", 12345, 0.25),
        Ended(START + 5, 1, 64, "done"),
    ]
