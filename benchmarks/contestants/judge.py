"""What snapshots are worth: the workers' models are averaged, and the average is tried on the test set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

__all__ = ["Disqualified", "Verdict", "accuracy", "judge", "moments"]


class Disqualified(Exception):
    """The snapshots are not those of a training that worked."""


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


def judge(folder: Path, workers: int, target: float, evaluate: Callable[[Tensor], float]) -> Verdict:
    """Look at ``folder/RANK/*.pt``; ``evaluate`` gives the accuracy of a model, its parameters in one vector."""
    files = [sorted((folder / str(rank)).glob("*.pt")) for rank in range(workers)]
    if missing := [rank for rank, found in enumerate(files) if not found]:
        raise Disqualified(f"no snapshot of rank {', '.join(map(str, missing))}")
    found = moments([len(of_rank) for of_rank in files])
    reached, score = None, 0.0
    for moment in found:
        if reached is None or moment is found[-1]:
            snapshots = [torch.load(files[rank][at], weights_only=True) for rank, at in enumerate(moment)]
            score = evaluate(_mean(snapshots))
            if reached is None and score >= target:
                reached = max(one["seconds"] for one in snapshots)
    average = _mean(snapshots)
    if not torch.isfinite(average).all():
        raise Disqualified("the averaged parameters are not finite")
    distances = [float((one["parameters"] - average).norm()) for one in snapshots]
    return Verdict(
        time_to_target=reached,
        final_accuracy=score,
        seconds=max(one["seconds"] for one in snapshots),
        steps=max(one["step"] for one in snapshots),
        examples=sum(one["examples"] for one in snapshots),
        disagreement=max(distances) / float(average.norm()),
    )


def moments(counts: Sequence[int]) -> list[list[int]]:
    """Which snapshots are looked at together, if the workers wrote so many: the first of each, the second of each, …

    The last moment has the last one of each, also where their numbers differ.
    """
    together = [[at] * len(counts) for at in range(min(counts))]
    last = [count - 1 for count in counts]
    return together if together[-1] == last else [*together, last]


@torch.no_grad()
def accuracy(model: nn.Module, parameters: Tensor, x: Tensor, y: Tensor) -> float:
    """The part of the examples that the model gets right with these parameters, which it then keeps."""
    vector_to_parameters(parameters, model.parameters())
    model.eval()
    logits = torch.cat([model(x[at : at + 1000]) for at in range(0, len(x), 1000)])
    return float((logits.argmax(-1) == y).double().mean())


def _mean(snapshots: Sequence[dict[str, Any]]) -> Tensor:
    return torch.stack([one["parameters"] for one in snapshots]).mean(0)
