"""All workers begin again, each from a checkpoint of its own: who has none gets a model from one that has."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from paceline.fleet import Fleet
from paceline.gossip.layout import Layout

__all__ = ["Resumed", "even_out", "lost_examples"]


class Resumed(NamedTuple):
    """What all that begin again have found out."""

    latest: int
    """Examples that all workers had used by the latest checkpoint."""
    lost: int
    """Of these, those that nobody counts as its own."""


def lost_examples(latest: int, own: list[int]) -> int:
    """Examples that all had used, but for those that workers have found in their ``own`` counts.

    All of them after a checkpoint of AllReduce, which has no such counts; a part where a worker is missing, or its
    disk. If they were not kept, what is used from now on would only fill that gap.
    """
    return max(0, latest - sum(own))


def even_out(fleet: Fleet, layout: Layout, own: int, of_all: int | None) -> Resumed | None:
    """Tell each other what was found, before the fleet parts: all that begin must call it.

    By this worker's checkpoint it had used ``own`` examples, and all workers ``of_all``; None if it has none. Its model
    is then that of the latest checkpoint, or a fresh one would be averaged with those that are trained. Gives None if
    nobody has one.
    """
    blobs = fleet.gather(msgspec.json.encode((own, of_all)), "what the others have resumed from")
    told = [msgspec.json.decode(blob, type=tuple[int, int | None]) for blob in blobs]
    found = [each for _, each in told]
    latest = max((each for each in found if each is not None), default=None)
    if latest is None:
        return None
    if None in found:
        _give(fleet, layout, gives=found.index(latest) == fleet.rank, takes=of_all is None)
    # Who has come back alone does not know the others' counts here: it hears them, and what was lost, in their letters.
    alone = len(told) < fleet.size
    return Resumed(latest, 0 if alone else lost_examples(latest, [each for each, _ in told]))


def _give(fleet: Fleet, layout: Layout, gives: bool, takes: bool) -> None:
    """The model of the one that gives, frozen parameters included, to all that have none."""
    numbers, counters = torch.empty(layout.numel + layout.more), layout.counters()
    layout.read(numbers)
    rows = [numbers.view(torch.uint8), counters, layout.frozen()]
    for at, row in enumerate(rows):
        # A sum in which all but one are zero: to the bit that one's. Torch's broadcast would do as well.
        rows[at] = row.to(fleet.device) if gives else torch.zeros_like(row, device=fleet.device)
        if row.numel():
            fleet.all_reduce(rows[at], "the model of the latest checkpoint")
    if takes:
        layout.write(rows[0].cpu().view(torch.float32), rows[1].cpu())
        layout.write_frozen(rows[2].cpu())
