"""Many tensors in one flat buffer for each dtype, summed over the workers, with small things riding in the tail."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from paceline.codec import Identity
from paceline.fleet import Fleet
from paceline.roles import Codec
from paceline.sync.notes import Numbers

__all__ = ["FlatSum", "Rider"]


class Rider(Protocol):
    """Something small that is summed over the workers together with the tensors, in float32 or float64."""

    @property
    def numel(self) -> int:
        """How many numbers it is; the same on all workers."""

    def write(self, out: Numbers) -> None:
        """Fill in this worker's numbers."""

    def read(self, summed: Numbers) -> None:
        """Take the sum over all workers."""


class FlatSum:
    """One collective for each dtype, whatever the number of tensors.

    The riders travel behind the tensors of the first dtype that is wide enough for them (float32 or float64); if there
    is none, or a codec changes the numbers on the way, they get a small collective of their own.
    """

    def __init__(self, fleet: Fleet, codec: Codec) -> None:
        self._fleet, self._codec = fleet, codec
        self._flats: list[_Flat] = []
        self._tail = torch.empty(0)
        self._tail_rides = False
        self._staged = False
        self._numbers: Numbers = self._tail.numpy()
        self.views: list[Tensor] = []
        """For each tensor, its place in a flat buffer, with its shape and strides."""
        self.bytes_sent = 0

    @property
    def bodies(self) -> list[Tensor]:
        """All numbers of the tensors, one flat tensor for each dtype."""
        return [flat.body for flat in self._flats]

    @torch.no_grad()
    def lay_out(self, tensors: Sequence[Tensor], tail: int) -> None:
        """Make buffers for tensors like these, and ``tail`` numbers of riders."""
        kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
        wide = [kind for kind in kinds if kind[0] in (torch.float32, torch.float64)]
        self._tail_rides = bool(wide) and isinstance(self._codec, Identity)
        self._flats = []
        views: dict[int, Tensor] = {}
        for kind in kinds:
            members = [at for at, tensor in enumerate(tensors) if (tensor.dtype, tensor.device) == kind]
            carries = self._tail_rides and kind == wide[0]
            flat = _Flat([tensors[at] for at in members], tail if carries else 0)
            self._flats.append(flat)
            views.update(zip(members, flat.views, strict=True))
            if carries:
                self._tail = flat.tail
        self.views = [views[at] for at in range(len(tensors))]
        if not self._tail_rides:
            self._tail = torch.empty(tail, dtype=torch.float64, device=self._fleet.device)
        self._staged = self._tail.device.type != "cpu"
        self._numbers = self._tail.cpu().numpy()  # on a CPU this is the tail itself

    @torch.no_grad()
    def pack(self, sources: Sequence[Tensor | None], scale: float) -> None:
        """Lay ``scale`` times these tensors into the buffers; a missing one counts as zero."""
        targets, given = [], []
        for view, source in zip(self.views, sources, strict=True):
            if source is None:
                view.zero_()
            elif source is not view:  # a gradient that was zeroed in place is one
                targets.append(view)
                given.append(source)
        if targets:
            torch._foreach_copy_(targets, given)
        for flat in self._flats:
            flat.body.mul_(scale)

    def run(self, riders: Sequence[Rider], what: str) -> None:
        """Sum the buffers and the riders over all workers."""
        ends = list(accumulate(rider.numel for rider in riders))
        for rider, end in zip(riders, ends, strict=True):
            rider.write(self._numbers[end - rider.numel : end])
        if self._staged:
            self._tail.copy_(torch.from_numpy(self._numbers))
        self.bytes_sent = 0
        if not self._tail_rides:
            self._sum(self._tail, what)
        for flat in self._flats:
            payload = self._codec.encode(flat.values)
            self._sum(payload, what)
            self._codec.decode(payload, flat.values)
        if self._staged:
            self._numbers = self._tail.cpu().numpy()
        for rider, end in zip(riders, ends, strict=True):
            rider.read(self._numbers[end - rider.numel : end])

    def _sum(self, tensor: Tensor, what: str) -> None:
        self._fleet.all_reduce(tensor, what)
        self.bytes_sent += tensor.numel() * tensor.element_size()


class _Flat:
    """The tensors of one dtype, one behind the other, with room for a tail."""

    def __init__(self, tensors: Sequence[Tensor], tail: int) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        self.values = torch.zeros(sum(sizes) + tail, dtype=tensors[0].dtype, device=tensors[0].device)
        self.tail = self.values[sum(sizes) :]
        self.body = self.values[: sum(sizes)]
        self.views = [_like(each, part) for each, part in zip(tensors, torch.split(self.body, sizes), strict=True)]


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    """A view of a flat piece with the strides of the tensor, so that fused optimizers see matching memory."""
    dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    return part.as_strided(tensor.shape, tensor.stride()) if dense else part.view(tensor.shape)
