"""One collective for everything: gradients in a flat buffer, and small things that ride along in its tail."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.codec import Identity
from paceline.errors import SettingError
from paceline.fleet import Fleet
from paceline.replica import Replica
from paceline.roles import Codec
from paceline.sync.notes import Numbers

__all__ = ["Exchange", "Presence", "Rider"]


class Rider(Protocol):
    """Something small that is summed over the workers together with the gradients, in float32 or float64."""

    @property
    def numel(self) -> int:
        """How many numbers it is; the same on all workers."""

    def write(self, out: Numbers) -> None:
        """Fill in this worker's numbers."""

    def read(self, summed: Numbers) -> None:
        """Take the sum over all workers."""


class Presence:
    """Which parameters have a gradient on any worker: one that is None everywhere stays None."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.anywhere: list[bool] = []

    @property
    def numel(self) -> int:
        """One number for each parameter."""
        return len(self._parameters)

    def write(self, out: Numbers) -> None:
        """1 where there is a gradient."""
        out[:] = [p.grad is not None for p in self._parameters]

    def read(self, summed: Numbers) -> None:
        """Present anywhere."""
        self.anywhere = (summed > 0).tolist()


class Exchange:
    """Sums the gradients of a plain module over the workers, one collective for each dtype.

    The riders travel behind the gradients of the first dtype that is wide enough for them (float32 or float64); if
    there is none, or a codec changes the numbers on the way, they get a small collective of their own.
    """

    def __init__(self, fleet: Fleet, replica: Replica, codec: Codec, riders: Sequence[Rider]) -> None:
        self._fleet, self._replica, self._codec = fleet, replica, codec
        self._riders = riders
        self._layout: object = None
        self._parameters: list[nn.Parameter] = []
        self._presence = Presence([])
        self._flats: list[_Flat] = []
        self._tail = torch.empty(0)
        self._tail_rides = False
        self._staged = False
        self._numbers: Numbers = self._tail.numpy()
        self.bytes_sent = 0

    def pack(self, scale: float) -> None:
        """Lay ``scale`` times the gradients into the flat buffers; a missing one counts as zero."""
        self._parameters = parameters = self._replica.parameters
        self._presence = Presence(parameters)
        layout = ([id(p) for p in parameters], len(parameters) + sum(rider.numel for rider in self._riders))
        if layout != self._layout:
            names = [name for name, _ in self._replica.named]
            self._fleet.agree(
                {"set of trained parameters": f"{len(names)} of digest {zlib.crc32(repr(names).encode())}"}
            )
            self._lay_out(parameters, layout[1])
            self._layout = layout
        for flat in self._flats:
            flat.pack(scale)

    def run(self, what: str) -> None:
        """Leave the sum over the workers of what was packed in every ``.grad``."""
        riders = [self._presence, *self._riders]
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
        present = {id(p) for p, there in zip(self._parameters, self._presence.anywhere, strict=True) if there}
        for flat in self._flats:
            flat.unpack(present, in_place=self._replica.ddp is not None)

    @property
    def gradients(self) -> list[Tensor]:
        """All gradients, one flat tensor for each dtype; zeros where there is none."""
        return [flat.gradients for flat in self._flats]

    def _sum(self, tensor: Tensor, what: str) -> None:
        self._fleet.all_reduce(tensor, what)
        self.bytes_sent += tensor.numel() * tensor.element_size()

    def _lay_out(self, parameters: Sequence[nn.Parameter], tail: int) -> None:
        kinds = dict.fromkeys((p.dtype, p.device) for p in parameters)
        wide = [kind for kind in kinds if kind[0] in (torch.float32, torch.float64)]
        self._tail_rides = bool(wide) and isinstance(self._codec, Identity)
        self._flats = []
        for kind in kinds:
            members = [p for p in parameters if (p.dtype, p.device) == kind]
            carries = self._tail_rides and kind == wide[0]
            self._flats.append(_Flat(members, tail if carries else 0))
            if carries:
                self._tail = self._flats[-1].tail
        if not self._tail_rides:
            self._tail = torch.empty(tail, dtype=torch.float64, device=self._fleet.device)
        self._staged = self._tail.device.type != "cpu"
        self._numbers = self._tail.cpu().numpy()  # on a CPU this is the tail itself


class _Flat:
    """The gradients of one dtype, one behind the other, with room for a tail."""

    def __init__(self, parameters: Sequence[nn.Parameter], tail: int) -> None:
        self._parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.values = torch.zeros(sum(sizes) + tail, dtype=parameters[0].dtype, device=parameters[0].device)
        self.tail = self.values[sum(sizes) :]
        self.gradients = self.values[: sum(sizes)]
        self._views = [_like(p, part) for p, part in zip(parameters, torch.split(self.gradients, sizes), strict=True)]

    def pack(self, scale: float) -> None:
        targets, sources = [], []
        for p, view in zip(self._parameters, self._views, strict=True):
            gradient = p.grad
            if gradient is view:  # after zero_grad(set_to_none=False)
                continue
            if gradient is None:
                view.zero_()
                continue
            if gradient.is_sparse:
                raise SettingError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which cannot be averaged in a flat "
                    "buffer; build its layer with sparse=False"
                )
            targets.append(view)
            sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.gradients.mul_(scale)

    def unpack(self, present: set[int], in_place: bool) -> None:
        for p, view in zip(self._parameters, self._views, strict=True):
            if id(p) not in present:
                continue
            if in_place and p.grad is not None:
                p.grad.copy_(view)
            else:
                p.grad = view


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """A view of a flat piece with the strides of the parameter, so that fused optimizers see matching memory."""
    dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    return part.as_strided(parameter.shape, parameter.stride()) if dense else part.view(parameter.shape)
