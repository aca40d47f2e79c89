"""The weighted average of all workers' models, in one flat buffer for each dtype."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import LoopError, SettingError
from paceline.group import Group
from paceline.records import Later
from paceline.roles import Codec
from paceline.sync.drift import Drift
from paceline.sync.flat import FlatSum, Rider, arrangement, large

__all__ = ["Mean", "WeightedAverage", "assign"]


class Mean(NamedTuple):
    """Tensors that are the average times something, in buffers that the next average uses again."""

    views: Sequence[Tensor]
    factor: float
    """What they must be multiplied by to be the average."""
    others: Sequence[Tensor] | None = None
    """What must be added to them before."""

    @torch.no_grad()
    def write(self, targets: Sequence[Tensor], first: int = 0) -> None:
        """Copy the average of the tensors from number ``first`` on to others, in one pass over the data."""
        if not targets:
            return
        views = list(self.views[first : first + len(targets)])
        if self.others is not None:
            self._add(targets, views, list(self.others[first : first + len(targets)]))
            return
        if self.factor == 1.0:
            assign(targets, views)
            return
        if not large(views):
            assign(targets, torch._foreach_mul(views, self.factor))
            return
        for target, view in zip(targets, views, strict=True):
            torch.mul(view, self.factor, out=target.detach())

    def _add(self, targets: Sequence[Tensor], views: list[Tensor], others: list[Tensor]) -> None:
        if not large(views):
            sums = torch._foreach_add(views, others)
            torch._foreach_mul_(sums, self.factor)
            assign(targets, sums)
            return
        for target, view, other in zip(targets, views, others, strict=True):
            torch.add(view, other, out=target.detach()).mul_(self.factor)

    @torch.no_grad()
    def tensors(self) -> Sequence[Tensor]:
        """The average itself, in the same buffers: not to be asked for twice."""
        if self.others is not None:
            torch._foreach_add_(list(self.views), list(self.others))
        if self.factor != 1.0:
            torch._foreach_mul_(list(self.views), self.factor)
        return self.views


class WeightedAverage:
    """sum_i w_i x_i / sum_i w_i over the workers i of a group, for lists of tensors x_i.

    A worker of weight zero contributes nothing, not even an infinity, and gets the average as all others do. With a
    codec the change since :meth:`begin` travels instead of the values: it is smaller, and so is what is lost of it.
    """

    def __init__(self, group: Group, codec: Codec) -> None:
        self._group = group
        self._sum = FlatSum(group, codec)
        self._drift = Drift(group.rank, group.size)
        self._layout: object = None
        self._anchors: list[Tensor] = []
        self._of: list[int] = []

    @property
    def bytes_sent(self) -> int:
        """What this worker handed to the network layer in the last average."""
        return self._sum.bytes_sent

    @property
    def whole(self) -> float:
        """What the weights of the last average added up to, over its scale."""
        return self._drift.whole

    @property
    def apart(self) -> Later:
        """How far the workers were from the last average (:class:`~paceline.sync.drift.Drift`)."""
        return self._drift.distance

    @torch.no_grad()
    def begin(self, parameters: Sequence[Tensor], values: Sequence[Tensor] | None = None) -> None:
        """These are the same on all workers now; or these ``values`` are, which they are counted from."""
        if self._sum.coded:
            self._anchors = [tensor.detach().clone() for tensor in values or parameters]
            self._of = list(map(id, parameters))

    def expect(self, parameters: Sequence[Tensor]) -> None:
        """With a codec: refuse others than those that the round began with."""
        same = list(map(id, parameters)) == self._of and len(parameters) == len(self._anchors)
        if self._sum.coded and not same:
            raise SettingError(
                f"{len(self._anchors)} parameters were trained when this round began, and {len(parameters)}, or "
                "others, are now; with a codec the change since then travels, so freeze or thaw parameters in a new "
                "Run, or use Identity()"
            )

    def forget(self) -> None:
        """A codec has nothing to make up for."""
        self._sum.forget()

    def close(self) -> None:
        """No more averages."""
        self._sum.close()
        self._layout = None

    def prepare(self, tensors: Sequence[Tensor], models: int, riders: Sequence[Rider]) -> None:
        """Make room; all workers must have the same tensors, of which the first ``models`` are the model's."""
        shapes = [(each.shape, each.dtype, arrangement(each)) for each in tensors]
        everything: list[Rider] = [self._drift, *riders]
        tail = sum(rider.numel for rider in everything)
        if (shapes, models, tail) != self._layout:
            digest = zlib.crc32(repr([(list(shape), str(dtype), form) for shape, dtype, form in shapes]).encode())
            self._group.agree({"set of averaged tensors": f"{len(shapes)} of digest {digest}"})
            self._sum.lay_out(tensors, tail)
            self._drift.lay_out(*self._sum.heads(models))
            self._layout = (shapes, models, tail)

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor], weight: float, scale: float, riders: Sequence[Rider], what: str) -> Mean:
        """The average of these tensors, as they were prepared.

        If all weights are zero, nobody has done anything, and the tensors are given back as they are. ``weight`` is
        this worker's. ``scale`` is a number of the size of all weights together, the same on all workers: weights are
        divided by it before they travel, so that sums are about as large as averages.
        """
        share = weight / scale
        riders = [self._drift, *riders]
        if self._sum.coded:
            return self._of_changes(tensors, share, scale, riders, what)
        self._drift.weight, self._drift.scale = share, share
        self._sum.pack(tensors if share else [None] * len(tensors), share or 1.0)
        self._sum.run(riders, what, lazily=True)
        if not self._check(scale, what):
            return Mean(tensors, 1.0)
        return Mean(self._sum.views, 1.0 / self.whole, self._sum.others)

    def state_dict(self) -> dict[str, Any]:
        """What a codec still has to make up for, and what changes are counted from."""
        return {"sum": self._sum.state_dict(), "anchors": self._anchors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._sum.load_state_dict(state["sum"])
        if state["anchors"] or not self._sum.coded:  # none of a run that had no codec: those of the reload stay
            self._anchors = list(state["anchors"])

    def _of_changes(
        self, tensors: Sequence[Tensor], share: float, scale: float, riders: Sequence[Rider], what: str
    ) -> Mean:
        views = self._sum.views
        self._sum.pack(tensors if share else [None] * len(tensors), 1.0)
        if share:
            torch._foreach_sub_(views, self._anchors)
        self._drift.weight, self._drift.scale = share, 1.0
        self._sum.sum_riders(riders, what)
        if not self._check(scale, what):
            return Mean(tensors, 1.0)
        # In units of the average, so that what was lost in one round counts as much when it is made up for in another.
        torch._foreach_mul_(views, share / self.whole)
        self._sum.sum_bodies(what)
        torch._foreach_add_(views, self._anchors)
        return Mean(views, 1.0)

    def _check(self, scale: float, what: str) -> bool:
        if self.whole == 0:
            return False
        if not (self.whole > 0 and math.isfinite(self.whole)):
            raise LoopError(
                f"the weights of all workers add up to {self.whole * scale} in {what}; they must be positive"
            )
        return True


@torch.no_grad()
def assign(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to tensors."""
    if targets:
        torch._foreach_copy_([target.detach() for target in targets], list(values))
