"""What snapshots are worth: the workers' models are averaged, and the average is tried on the test set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

__all__ = ["Disqualified", "Lost", "Mark", "Verdict", "accuracy", "judge", "moments", "speed"]


class Disqualified(Exception):
    """The snapshots are not those of a training that worked."""


class Mark(NamedTuple):
    """When a snapshot was written."""

    step: int
    seconds: float
    life: int = 0
    """How often all workers had been started again."""
    together: bool = True
    """Whether workers wait for each other, so that the same step is the same moment; if not, the clock says so."""


class Lost(NamedTuple):
    """A worker that is killed, and the seconds of training until then."""

    rank: int
    at: float


@dataclass(frozen=True)
class Verdict:
    """How a contestant did."""

    time_to_target: float | None
    """Seconds until the averaged model was good enough: the largest of the workers' clocks. None: it never was."""
    final_accuracy: float
    """Of the average of the workers' last models."""
    seconds: float
    """The largest of the workers' clocks at the end."""
    steps: int
    """The most steps that a worker did."""
    examples: int
    """Examples that all workers used."""
    disagreement: float
    """The largest distance of a worker's last model from the average of them, relative to that average's norm."""
    back_after: float | None = None
    """Seconds from when a worker was killed to its next snapshot; None: there was none."""


def judge(
    folder: Path, workers: int, target: float, evaluate: Callable[[Tensor], float], lost: Lost | None = None
) -> Verdict:
    """Look at ``folder/RANK/*.pt``; ``evaluate`` gives the accuracy of a model, its parameters in one vector."""
    files = [sorted((folder / str(rank)).glob("*.pt")) for rank in range(workers)]
    if missing := [rank for rank, found in enumerate(files) if not found]:
        raise Disqualified(f"no snapshot of rank {', '.join(map(str, missing))}")
    marks = [[_mark(file) for file in mine] for mine in files]
    found = moments(marks, lost)
    reached, score = None, 0.0
    for moment in found:
        if reached is None or moment is found[-1]:
            snapshots = [_load(files[rank][at]) for rank, at in moment.items()]
            score = evaluate(_mean(snapshots))
            if reached is None and score >= target:
                reached = max(one["seconds"] for one in snapshots)
    average = _mean(snapshots)
    if not torch.isfinite(average).all():
        raise Disqualified("the averaged parameters are not finite")
    distances = [float((one["parameters"] - average).norm()) for one in snapshots]
    last = [_load(mine[-1]) for mine in files]
    return Verdict(
        time_to_target=reached,
        final_accuracy=score,
        seconds=max(one["seconds"] for one in last),
        steps=max(one["step"] for one in last),
        examples=sum(one["examples"] for one in last),
        disagreement=max(distances) / float(average.norm()),
        back_after=_back_after(marks, lost),
    )


def moments(marks: Sequence[Sequence[Mark]], lost: Lost | None = None) -> list[dict[int, int]]:
    """Which snapshots are looked at together: for each moment the number of the snapshot of each rank that is there.

    The moments are those of rank 0, which is never lost. Beside its snapshot are those of the others at the same step
    or, where each has steps of its own, the last that they have written by then; a moment is left out if one has none.
    The last moment has the last snapshot of each. A worker that was killed is there again when it writes the next one.
    """
    found = []
    for at, mark in enumerate(marks[0]):
        there = [rank for rank in range(1, len(marks)) if not _is_away(rank, marks[rank], mark.seconds, lost)]
        beside = {rank: _beside(mark, marks[rank]) for rank in there}
        moment = {0: at} | {rank: number for rank, number in beside.items() if number is not None}
        if len(moment) == 1 + len(there):
            found.append(moment)
    end = max(mine[-1].seconds for mine in marks)
    last = {rank: len(mine) - 1 for rank, mine in enumerate(marks) if not _is_away(rank, mine, end, lost)}
    return found if found and found[-1] == last else [*found, last]


def speed(folder: Path, workers: int) -> float:
    """Examples per second of all workers, each by its own clock."""
    last = [_load(max((folder / str(rank)).glob("*.pt"))) for rank in range(workers)]
    return float(sum(one["examples"] / one["seconds"] for one in last))


def _is_away(rank: int, marks: Sequence[Mark], now: float, lost: Lost | None) -> bool:
    if lost is None or rank != lost.rank or now < lost.at:
        return False
    return not any(lost.at < mark.seconds <= now for mark in marks)


def _back_after(marks: Sequence[Sequence[Mark]], lost: Lost | None) -> float | None:
    later = [] if lost is None else [one.seconds - lost.at for one in marks[lost.rank] if one.seconds > lost.at]
    return min(later, default=None)


def _beside(mark: Mark, marks: Sequence[Mark]) -> int | None:
    if mark.together:
        return next((at for at, one in enumerate(marks) if (one.life, one.step) == (mark.life, mark.step)), None)
    return max((at for at, one in enumerate(marks) if one.seconds <= mark.seconds), default=None)


def _mark(file: Path) -> Mark:
    snapshot = _load(file)
    return Mark(*(snapshot[name] for name in Mark._fields))


def _load(file: Path) -> dict[str, Any]:
    snapshot: dict[str, Any] = torch.load(file, mmap=True, weights_only=True)
    return snapshot


@torch.no_grad()
def accuracy(model: nn.Module, parameters: Tensor, x: Tensor, y: Tensor) -> float:
    """The part of the examples that the model gets right with these parameters, which it then keeps."""
    vector_to_parameters(parameters, model.parameters())
    model.eval()
    logits = torch.cat([model(x[at : at + 1000]) for at in range(0, len(x), 1000)])
    return float((logits.argmax(-1) == y).double().mean())


def _mean(snapshots: Sequence[dict[str, Any]]) -> Tensor:
    return torch.stack([one["parameters"] for one in snapshots]).mean(0)
