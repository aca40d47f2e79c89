"""All workers begin again, each from a checkpoint of its own: who has none gets a model from one that has."""

from __future__ import annotations

import msgspec
import torch

from paceline.fleet import Fleet
from paceline.gossip.layout import Layout

__all__ = ["even_out"]


def even_out(fleet: Fleet, layout: Layout, examples: int | None) -> int | None:
    """Tell each other what was found, before the fleet parts: all that begin must call it.

    ``examples`` are those that all workers had used by this worker's checkpoint; None if it has none. Its model is then
    that of the latest checkpoint, or a fresh one would be averaged with those that are trained. Gives the examples of
    the latest; None if nobody has one.
    """
    blobs = fleet.gather(msgspec.json.encode(examples), "what the others have resumed from")
    found = [msgspec.json.decode(blob, type=int | None) for blob in blobs]
    latest = max((each for each in found if each is not None), default=None)
    if latest is None or None not in found:
        return latest
    gives = found.index(latest) == fleet.rank
    numbers, counters = torch.empty(layout.numel + layout.more), layout.counters()
    layout.read(numbers)
    rows = [numbers.view(torch.uint8), counters]
    for at, row in enumerate(rows):
        # A sum in which all but one are zero: to the bit that one's. Torch's broadcast would do as well.
        rows[at] = row.to(fleet.device) if gives else torch.zeros_like(row, device=fleet.device)
        if row.numel():
            fleet.all_reduce(rows[at], "the model of the latest checkpoint")
    if examples is None:
        layout.write(rows[0].cpu().view(torch.float32), rows[1].cpu())
    return latest
