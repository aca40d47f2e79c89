"""Many tensors in one flat buffer for each dtype, summed over the workers, with small things riding in the tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.codec import Identity
from paceline.errors import SettingError
from paceline.group import Group
from paceline.roles import Codec
from paceline.sync.coded import CodedSum
from paceline.sync.notes import Numbers
from paceline.sync.swap import Swap, make_swap

__all__ = ["FlatSum", "Rider", "arrangement", "large"]

MANY = 1 << 14  # numbers in a tensor from which a pass over it costs more than a call


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

    def __init__(self, group: Group, codec: Codec = Identity()) -> None:  # noqa: B008 (it is immutable)
        self._group, self._codec = group, codec
        self.coded = not isinstance(codec, Identity)
        """Whether a codec changes the numbers on the way."""
        self._coders: list[CodedSum] = []
        self._flats: list[_Flat] = []
        self._members: list[list[int]] = []
        self._swaps = False
        self._tail = torch.empty(0, dtype=torch.float32)
        self._tail_rides = False
        self._staged = self._in_one_pass = False
        self._numbers: Numbers = self._tail.numpy()
        self.views: list[Tensor] = []
        """For each tensor, its place in a flat buffer, with its shape and strides."""
        self.others: list[Tensor] | None = None
        """The same of the other worker, where its numbers are still to be added to the own."""
        self.bytes_sent = 0

    @property
    def bodies(self) -> list[Tensor]:
        """All numbers of the tensors, one flat tensor for each dtype."""
        return [flat.body for flat in self._flats]

    def heads(self, count: int) -> tuple[list[Tensor], list[list[int]]]:
        """The first ``count`` tensors: for each dtype the beginning of its flat tensor, and their sizes."""
        sizes = [[self.views[at].numel() for at in members if at < count] for members in self._members]
        return [flat.body[: sum(each)] for flat, each in zip(self._flats, sizes, strict=True)], sizes

    @torch.no_grad()
    def lay_out(self, tensors: Sequence[Tensor], tail: int, *, once: bool = False) -> None:
        """Make buffers for tensors like these, and ``tail`` numbers of riders; all workers must do it.

        For a sum that is needed ``once`` no way is prepared that has to be agreed on.
        """
        kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
        if self.coded and any(dtype.is_complex for dtype, _ in kinds):
            raise SettingError(
                f"{type(self._codec).__name__} encodes real numbers, but the model has complex ones; use Identity()"
            )
        wide = [kind for kind in kinds if kind[0] in (torch.float32, torch.float64)]
        self._tail_rides = bool(wide) and not self.coded
        self._flats, self._members = [], []
        views: dict[int, Tensor] = {}
        for kind in kinds:
            members = [at for at, tensor in enumerate(tensors) if (tensor.dtype, tensor.device) == kind]
            carries = self._tail_rides and kind == wide[0]
            flat = _Flat([tensors[at] for at in members], tail if carries else 0)
            if not (once or self.coded):
                flat.prepare_swap(self._group)
            self._flats.append(flat)
            self._members.append(members)
            views.update(zip(members, flat.views, strict=True))
            if carries:
                self._tail = flat.tail
        self.views = [views[at] for at in range(len(tensors))]
        self._swaps = all(flat.swap is not None for flat in self._flats)
        self._in_one_pass = large(self.views)
        if not self._tail_rides:
            self._tail = torch.empty(tail, dtype=torch.float32, device=self._group.device)
        if self.coded and len(self._coders) != len(self._flats):
            self._coders = [CodedSum(self._group, self._codec) for _ in self._flats]
        self._staged = self._tail.device.type != "cpu"
        self._numbers = self._tail.cpu().numpy()  # on a CPU this is the tail itself

    @torch.no_grad()
    def pack(self, sources: Sequence[Tensor | None], scale: float) -> None:
        """Lay ``scale`` times these tensors into the buffers; a missing one counts as zero."""
        pairs = list(zip(self.views, sources, strict=True))
        # A gradient that was zeroed in place is the view itself.
        given = [source for view, source in pairs if source is not None and source is not view]
        targets = self.views
        if len(given) < len(targets):
            targets = [view for view, source in pairs if source is not None and source is not view]
            for view, source in pairs:
                if source is None:
                    view.zero_()
        if scale != 1.0 and self._in_one_pass and len(targets) == len(self.views):
            for target, source in zip(targets, given, strict=True):  # one pass over the data instead of two
                torch.mul(source.detach(), scale, out=target)
            return
        if targets:
            torch._foreach_copy_(targets, given)
        if scale != 1.0:
            for flat in self._flats:
                flat.body.mul_(scale)

    def run(self, riders: Sequence[Rider], what: str, *, lazily: bool = False) -> None:
        """Sum the buffers and the riders over all workers.

        ``lazily`` lets the sum of the buffers be left to who reads them, if there are :attr:`others`.
        """
        if self.coded:
            self.sum_riders(riders, what)
            self.sum_bodies(what)
            return
        self.bytes_sent = 0
        places = self._write(riders)
        if not self._tail_rides:
            self._sum(self._tail, what)
        for flat in self._flats:
            self._sum_flat(flat, what)
        self.others = self._their_views() if lazily and self._swaps else None
        if self.others is None:
            for flat in self._flats:
                flat.add()
        self._read(places)

    def _their_views(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for flat, members in zip(self._flats, self._members, strict=True):
            found.update(zip(members, flat.their_views[flat.at], strict=True))
        return [found[at] for at in range(len(self.views))]

    def sum_riders(self, riders: Sequence[Rider], what: str) -> None:
        """Sum the riders alone, ahead of the buffers: only with a codec."""
        self.bytes_sent = 0
        places = self._write(riders)
        self._sum(self._tail, what)
        self._read(places)

    def sum_bodies(self, what: str) -> None:
        """Sum the buffers, encoded."""
        for flat, coder in zip(self._flats, self._coders, strict=True):
            wide = flat.body if flat.body.dtype in (torch.float32, torch.float64) else flat.body.float()
            coder.run(wide, what)
            if wide is not flat.body:
                flat.body.copy_(wide)
            self.bytes_sent += coder.bytes_sent

    def state_dict(self) -> dict[str, Any]:
        """What the codec has lost on the way so far, and will make up for."""
        return {str(at): coder.state_dict() for at, coder in enumerate(self._coders)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self.forget()
        if len(self._coders) != len(state):  # a run that has not averaged yet, or a state of one that had not
            self._coders = [CodedSum(self._group, self._codec) for _ in state or self._flats]
        for coder, each in zip(self._coders, state.values(), strict=False):
            coder.load_state_dict(each)

    def forget(self) -> None:
        """Nothing has been lost so far."""
        for coder in self._coders:
            coder.reset()

    def close(self) -> None:
        """Give back what was prepared for swaps; buffers that others see live on with them."""
        self._flats, self._members, self.others = [], [], None

    def _write(self, riders: Sequence[Rider]) -> list[tuple[Rider, Numbers]]:
        """Let the riders write their numbers; gives the place of each."""
        places, begin = [], 0
        for rider in riders:
            end = begin + rider.numel
            place = self._numbers[begin:end]
            rider.write(place)
            places.append((rider, place))
            begin = end
        if self._staged:
            self._tail.copy_(torch.from_numpy(self._numbers))
        return places

    def _read(self, places: list[tuple[Rider, Numbers]]) -> None:
        if self._staged:
            self._numbers[:] = self._tail.cpu().numpy()
        for rider, place in places:
            rider.read(place)

    def _sum_flat(self, flat: _Flat, what: str) -> None:
        """The whole sum, or what the other worker has, and the sum of the tails."""
        if flat.swap is None:
            self._sum(flat.values, what)
            return
        flat.at = flat.swap.run(flat.values, what)
        self.bytes_sent += self._group.bytes_to_sum(flat.values)
        flat.tail.add_(flat.swap.theirs[flat.at][len(flat.body) :])

    def _sum(self, tensor: Tensor, what: str) -> None:
        self._group.all_reduce(tensor, what)
        self.bytes_sent += self._group.bytes_to_sum(tensor)


def large(tensors: Sequence[Tensor]) -> bool:
    """Whether a pass over tensors such as these costs more than a call for each of them."""
    return sum(tensor.numel() for tensor in tensors) >= MANY * len(tensors)


class _Flat:
    """The tensors of one dtype, one behind the other, and a tail; and another worker's, if two swap theirs."""

    def __init__(self, tensors: Sequence[Tensor], tail: int) -> None:
        self._forms = [
            (tensor.shape, tensor.stride() if arrangement(tensor) != "other" else None) for tensor in tensors
        ]
        self._sizes = [tensor.numel() for tensor in tensors]
        numel = sum(self._sizes)
        self.values = torch.zeros(numel + tail, dtype=tensors[0].dtype, device=tensors[0].device)
        self.tail = self.values[numel:]
        self.body = self.values[:numel]
        self.views = self._cut(self.body)
        self.swap: Swap | None = None
        self.their_views: list[list[Tensor]] = []
        """The tensors of the other worker, at each place where its numbers may be."""
        self.at = 0
        """At which of them they are."""

    def prepare_swap(self, group: Group) -> None:
        """Find out how to get the other worker's numbers, if there is one other."""
        self.swap = make_swap(group, self.values)
        if self.swap is not None:
            self.their_views = [self._cut(theirs[: len(self.body)]) for theirs in self.swap.theirs]

    def add(self) -> None:
        """Add what the other worker has."""
        if self.swap is not None:
            self.body.add_(self.swap.theirs[self.at][: len(self.body)])

    def _cut(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, self._sizes)
        return [
            part.view(shape) if strides is None else part.as_strided(shape, strides)
            for part, (shape, strides) in zip(parts, self._forms, strict=True)
        ]


def arrangement(tensor: Tensor) -> str:
    """In which order its numbers are laid into a flat buffer: all workers must have the same.

    That of its memory if it has no holes there: then fused optimizers see its place in the buffer as they see itself.
    """
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels last"
    return "other"
