"""A model as one row of numbers, the way it is shown to others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import LoopError, SettingError
from paceline.gossip.moments import Moments
from paceline.replica import Replica

__all__ = ["Layout"]

NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Layout:
    """Trained parameters first, which exchanges average, with ``moments`` if there are some.

    Then floating-point buffers, which belong to the whole model.

    Counters, buffers of whole numbers, cannot be averaged: whoever takes a whole model takes them as they are.
    """

    def __init__(self, replica: Replica, moments: Moments | None = None) -> None:
        self._replica, self._moments = replica, moments
        self._parameters, self._frozen = replica.parameters, replica.frozen
        wide = [name for name, p in replica.named if p.dtype not in NARROW]
        wide += [name for name, buffer in self._named_buffers(True) if buffer.dtype not in NARROW]
        if wide:
            raise SettingError(
                f"Gossip sends numbers as float32, and {wide[0]} would lose digits; make the model float32 or narrower"
            )
        self.measured = sum(p.numel() for p in self._parameters)
        """Numbers that are parameters: how far models are apart is the distance of these."""
        self.numel = self.measured + (0 if moments is None else moments.numel)
        """Numbers that are averaged in exchanges."""
        self.more = sum(buffer.numel() for _, buffer in self._named_buffers(True))
        """Numbers that only belong to the whole model."""
        self._known = set(map(id, self._parameters))

    def check(self) -> None:
        """Refuse a model that has changed its shape since."""
        if strange := [name for name, p in self._replica.named if id(p) not in self._known]:
            raise LoopError(
                f"{strange[0]} was frozen when the run began, and is trained now; under Gossip thaw what will be "
                "trained before Run(…), so that all workers lay out their models alike"
            )
        if sum(buffer.numel() for _, buffer in self._named_buffers(True)) != self.more:
            raise LoopError("a buffer of the model has changed its size, so that models cannot be averaged any more")

    @torch.no_grad()
    def read(self, out: Tensor) -> None:
        """Copy the model to a row of numbers."""
        tensors = self._tensors()
        torch._foreach_copy_(self._views(out, tensors), tensors)

    @torch.no_grad()
    def add(self, change: Tensor) -> None:
        """Add a row of numbers to what is averaged."""
        averaged = self._averaged()
        torch._foreach_add_(averaged, self._views(change, averaged))
        if self._moments is not None:
            self._moments.corrected()

    @torch.no_grad()
    def write(self, numbers: Tensor, counters: Tensor | None = None) -> None:
        """Make the model what a row of numbers says, and its counters if there are some."""
        tensors = self._tensors()
        torch._foreach_copy_(tensors, self._views(numbers, tensors))
        if self._moments is not None:
            self._moments.corrected()
        if counters is None:
            return
        _fill([buffer for _, buffer in self._named_buffers(False)], counters)

    def counters(self) -> Tensor:
        """All counters, as bytes."""
        return _bytes([buffer for _, buffer in self._named_buffers(False)])

    def frozen(self) -> Tensor:
        """All parameters that were not trained when the run began, as bytes."""
        return _bytes([p.detach() for p in self._frozen])

    @torch.no_grad()
    def write_frozen(self, row: Tensor) -> None:
        """Make them what such bytes say."""
        _fill(self._frozen, row)

    def _tensors(self) -> list[Tensor]:
        return [*self._averaged(), *(buffer for _, buffer in self._named_buffers(True))]

    def _averaged(self) -> list[Tensor]:
        moments = [] if self._moments is None else self._moments.tensors()
        return [*(p.detach() for p in self._parameters), *moments]

    def _views(self, row: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        parts = torch.split(row, [each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]

    def _named_buffers(self, floating: bool) -> list[tuple[str, Tensor]]:
        return [(name, each) for name, each in self._replica.buffers() if each.is_floating_point() is floating]


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    parts = [each.cpu().contiguous().view(-1).view(torch.uint8) for each in tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


def _fill(tensors: Sequence[Tensor], row: Tensor) -> None:
    for each, part in zip(tensors, torch.split(row, [each.nbytes for each in tensors]), strict=True):
        each.copy_(part.clone().view(each.dtype).view(each.shape))
