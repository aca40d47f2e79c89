"""From the gradients of an epoch to the order of the next one: GraB, PairGraB and CD-GraB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import LoopError, SettingError
from paceline.order.signs import Greedy, Rule, gram_signs, grid_of

__all__ = ["Balancer", "MeanBalancer", "PairBalancer", "pair_reorder", "reorder"]

TOGETHER = 64  # vectors whose Gram matrix is taken at once


def reorder(units: Sequence[int], signs: Sequence[int]) -> list[int]:
    """Units of sign 1 in their order, then the others in reverse.

    If signed partial sums are at most A and the herding bound was H, it is at most (A + H) / 2 in the new order.
    """
    front = [unit for unit, sign in zip(units, signs, strict=True) if sign > 0]
    back = [unit for unit, sign in zip(units, signs, strict=True) if sign < 0]
    return front + back[::-1]


def pair_reorder(units: Sequence[int], signs: Sequence[int]) -> list[int]:
    """Of every pair of neighbours one goes to the front and the other to the back, by the sign of their difference.

    Of an odd number the last one stands in the middle: it has no partner, and another one will be last next time.
    """
    front, back = [], []
    for at, sign in enumerate(signs):
        first, second = units[2 * at], units[2 * at + 1]
        front.append(first if sign > 0 else second)
        back.append(second if sign > 0 else first)
    return front + list(units[2 * len(signs) :]) + back[::-1]


class Balancer(Protocol):
    """Watches the gradients of an epoch, stream by stream, and makes the order of the next one."""

    def observe(self, gradients: Tensor, stream: int = 0) -> None:
        """Take the gradients (units, d) of the next units of a stream, in its order."""

    def next_orders(self) -> list[list[int]]:
        """The epoch is over: the orders of all streams for the next."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""


class PairBalancer:
    """Balances differences of neighbours (Cooper et al. 2023): no mean has to be known, which would be stale.

    Of one stream it is PairGraB; of several, one for each worker, CD-GraB: all share one running sum, and decide in the
    order of the streams, so that what they do in the same step cancels, too.

    Args:
        orders: the units of each stream in the order of this epoch; streams may have different lengths.
        rule: how signs are chosen.
        coordinated: one running sum for all streams; otherwise each has its own (ID-GraB, for comparison).
    """

    def __init__(self, orders: Sequence[Sequence[int]], rule: Rule | None = None, *, coordinated: bool = True) -> None:
        self._rule = rule or Greedy()
        self._coordinated = coordinated
        self._sums: list[Tensor | None] = []
        self._begin(orders)

    def _begin(self, orders: Sequence[Sequence[int]]) -> None:
        _refuse_no_streams(orders)
        self._orders = [list(order) for order in orders]
        self._held: list[Tensor | None] = [None] * len(orders)
        self._waiting: list[list[Tensor]] = [[] for _ in orders]
        self._signs: list[list[int]] = [[] for _ in orders]
        self._seen = [0] * len(orders)
        self._sums = [None] * (1 if self._coordinated else len(orders))
        self._rule.begin()

    def observe(self, gradients: Tensor, stream: int = 0) -> None:
        """Take the gradients (units, d) of the next units of a stream, in its order."""
        _check(gradients, self._orders, self._seen, stream)
        for gradient in gradients.detach():
            held = self._held[stream]
            if held is None:
                self._held[stream] = gradient.clone()  # a buffer that is used again would make every difference zero
            else:
                self._waiting[stream].append(held - gradient)
                self._held[stream] = None
        self._seen[stream] += len(gradients)
        self._decide(everything=False)

    def next_orders(self) -> list[list[int]]:
        """The orders of the next epoch, which begins."""
        _refuse_missing(self._orders, self._seen)
        self._decide(everything=True)
        found = [pair_reorder(order, signs) for order, signs in zip(self._orders, self._signs, strict=True)]
        self._begin(found)
        return [list(order) for order in found]

    def _decide(self, everything: bool) -> None:
        """Choose signs for what has come, as far as the streams before have got: many at a time."""
        groups = (
            [range(len(self._orders))] if self._coordinated else [range(at, at + 1) for at in range(len(self._orders))]
        )
        for at, group in enumerate(groups):
            while (ready := self._ready(group)) and (everything or len(ready) >= TOGETHER or self._complete(group)):
                self._sums[at] = self._choose(ready[:TOGETHER], self._sums[at])

    def _ready(self, group: range) -> list[tuple[int, int]]:
        """(time, stream) of the differences whose turn has come: all that are decided before them have come, too."""
        found: list[tuple[int, int]] = []
        done = [len(self._signs[stream]) for stream in group]
        pairs = [len(self._orders[stream]) // 2 for stream in group]
        for time in range(min(done), max(pairs)):
            for stream, decided, all_of_it in zip(group, done, pairs, strict=True):
                if not decided <= time < all_of_it:
                    continue
                if time - decided >= len(self._waiting[stream]):
                    return found
                found.append((time, stream))
        return found

    def _complete(self, group: range) -> bool:
        return all(self._seen[stream] == len(self._orders[stream]) for stream in group)

    def _choose(self, turn: list[tuple[int, int]], running: Tensor | None) -> Tensor:
        vectors = torch.stack([self._waiting[stream].pop(0) for _, stream in turn])
        running = torch.zeros_like(vectors[0]) if running is None else running
        signs = gram_signs(vectors @ running, vectors @ vectors.T, self._rule)
        for (_, stream), sign in zip(turn, signs, strict=True):
            self._signs[stream].append(sign)
        return running + torch.tensor(signs, dtype=vectors.dtype, device=vectors.device) @ vectors

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, in the middle of an epoch, too."""
        return {
            "orders": self._orders,
            "held": self._held,
            "waiting": self._waiting,
            "signs": self._signs,
            "seen": self._seen,
            "sums": self._sums,
            "rule": self._rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._orders, self._signs = [[*each] for each in state["orders"]], [[*each] for each in state["signs"]]
        self._held, self._waiting = list(state["held"]), [[*each] for each in state["waiting"]]
        self._seen, self._sums = list(state["seen"]), list(state["sums"])
        self._rule.load_state_dict(state["rule"])


class MeanBalancer:
    """Balances gradients minus the mean gradient of the epoch before (GraB, Lu et al. 2022); one stream.

    In the first epoch that mean is taken for zero, so that its order is hardly better than the one before.

    Args:
        orders: the units in the order of this epoch: a list with one list.
        rule: how signs are chosen.
        rounded: round the mean as coarsely as gradients that are rounded. Then all sums are exact: different processors
            come to the same order.
    """

    def __init__(self, orders: Sequence[Sequence[int]], rule: Rule | None = None, *, rounded: bool = False) -> None:
        if len(orders) != 1:
            raise SettingError(
                f"MeanBalancer balances one stream, not {len(orders)}; use PairBalancer for several workers"
            )
        self._rule = rule or Greedy()
        self._rounded = rounded
        self._mean: Tensor | None = None
        self._begin(list(orders[0]))

    def _begin(self, order: list[int]) -> None:
        _refuse_no_streams([order])
        self._order = order
        self._signs: list[int] = []
        self._sum: Tensor | None = None
        self._total: Tensor | None = None
        self._largest = 0.0
        self._rule.begin()

    def observe(self, gradients: Tensor, stream: int = 0) -> None:
        """Take the gradients (units, d) of the next units, in their order."""
        _check(gradients, [self._order], [len(self._signs)], stream)
        for rows in torch.split(gradients.detach(), TOGETHER):
            total = rows.sum(0)  # before anything is subtracted: it becomes the mean of the next epoch
            self._total = total if self._total is None else self._total + total
            self._largest = max(self._largest, float(rows.abs().max())) if self._rounded else 0.0
            vectors = rows.clone() if self._mean is None else rows - self._mean
            running = torch.zeros_like(vectors[0]) if self._sum is None else self._sum
            signs = gram_signs(vectors @ running, vectors @ vectors.T, self._rule)
            self._sum = running + torch.tensor(signs, dtype=vectors.dtype, device=vectors.device) @ vectors
            self._signs += signs

    def next_orders(self) -> list[list[int]]:
        """The order of the next epoch, which begins."""
        _refuse_missing([self._order], [len(self._signs)])
        assert self._total is not None
        self._mean = self._total / len(self._order)
        if self._rounded:
            grid = grid_of(
                self._largest
            )  # not by the mean itself, which may be small: differences would have more bits
            self._mean = torch.round(self._mean / grid) * grid
        self._begin(reorder(self._order, self._signs))
        return [list(self._order)]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, in the middle of an epoch, too."""
        tensors = {"mean": self._mean, "sum": self._sum, "total": self._total, "largest": self._largest}
        return {"order": self._order, "signs": self._signs, **tensors, "rule": self._rule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._order, self._signs = list(state["order"]), list(state["signs"])
        self._mean, self._sum, self._total = state["mean"], state["sum"], state["total"]
        self._largest = state["largest"]
        self._rule.load_state_dict(state["rule"])


def _refuse_no_streams(orders: Sequence[Sequence[int]]) -> None:
    if not orders or not all(len(order) for order in orders):
        raise SettingError("there is nothing to order: every stream needs at least one unit")


def _check(gradients: Tensor, orders: Sequence[Sequence[int]], seen: Sequence[int], stream: int) -> None:
    if gradients.dim() != 2:
        raise LoopError(
            f"gradients of shape {tuple(gradients.shape)} were given; a row for each unit is needed: (units, numbers)"
        )
    left = len(orders[stream]) - seen[stream]
    if len(gradients) > left:
        raise LoopError(
            f"{len(gradients)} gradients were given, but of the {len(orders[stream])} units of the epoch {left} are "
            "left; give each unit's gradient once, in the order in which they came"
        )


def _refuse_missing(orders: Sequence[Sequence[int]], seen: Sequence[int]) -> None:
    missing = [f"{got} of {len(order)}" for order, got in zip(orders, seen, strict=True) if got < len(order)]
    if missing:
        raise LoopError(
            f"an epoch has ended in which gradients of {', '.join(missing)} units were seen; give those of all units "
            "to observe(), also of the last batch"
        )
