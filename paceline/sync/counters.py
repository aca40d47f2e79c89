"""Buffers that are not averaged: those of rank 0, for everybody."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from paceline.fleet import Fleet

__all__ = ["common", "share"]


def common(fleet: Fleet, own: dict[str, Tensor]) -> list[Tensor]:
    """Those of these tensors, by name, that have the same shape and type on all workers, which must all call it."""
    if fleet.size == 1:
        return list(own.values())
    forms = {name: f"{list(each.shape)} of {each.dtype}" for name, each in own.items()}
    blobs = fleet.gather(msgspec.json.encode(forms), "the shapes of the others' buffers")
    found = [msgspec.json.decode(blob, type=dict[str, str]) for blob in blobs]
    return [each for name, each in own.items() if all(forms_of.get(name) == forms[name] for forms_of in found)]


@torch.no_grad()
def share(fleet: Fleet, own: dict[str, Tensor]) -> None:
    """Make these rank 0's, to the bit, where all have the same: all workers must call it."""
    shared = [] if fleet.size == 1 else common(fleet, own)
    if not shared:
        return
    raw = [each.contiguous().view(-1).view(torch.uint8) for each in shared]
    flat = torch.cat(raw).to(fleet.device)
    fleet.broadcast(flat, "rank 0's buffers")
    for each, part in zip(shared, torch.split(flat, [each.numel() for each in raw]), strict=True):
        each.copy_(part.to(each.device, copy=True).view(each.dtype).view(each.shape))
