"""Two workers give each other their numbers: in messages, or through memory that they share on one machine."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.group import Group
from paceline.neighbour import Neighbour, Ringing

__all__ = ["Swap", "make_swap"]

SHARED = 1 << 26  # bytes of a tensor that are shared at most: four times as many are taken of the machine's memory
LINE = 64  # bytes of a cache line


class Swap(Protocol):
    """A way to swap flat tensors of one size and dtype. Both workers add the same two numbers: all bits are equal."""

    theirs: list[Tensor]
    """Where the other's numbers may be."""

    def run(self, own: Tensor, what: str) -> int:
        """Give the other worker these numbers; says in which of ``theirs`` its own are, until the next swap begins."""


class Messages:
    """One message each way."""

    def __init__(self, group: Group, like: Tensor) -> None:
        self._group = group
        self.theirs = [torch.empty_like(like)]

    def run(self, own: Tensor, what: str) -> int:
        """Both ways at once."""
        self._group.swap(own, self.theirs[0], what)
        return 0


class Memory:
    """Each worker writes into its own half and reads the other's, and rings when it has written.

    There are two halves of each, used in turn: who writes one again has heard of the other in between, which has read
    it by then.
    """

    def __init__(self, group: Group, like: Tensor, other: Neighbour) -> None:
        self._group, self._other = group, other
        places = [
            torch.frombuffer(other.memory, dtype=like.dtype, count=len(like), offset=at * _room(like))
            for at in range(4)
        ]
        self._own, self.theirs = places[group.rank :: 2], places[1 - group.rank :: 2]
        self._turn = 0
        self._under_way = False

    def run(self, own: Tensor, what: str) -> int:
        """Write, and wait until the other has written."""
        if not self._under_way:
            self._turn = 1 - self._turn
            self._own[self._turn].copy_(own)
        self._group.wait(self._ring, what)
        self._under_way = False
        return self._turn

    def _ring(self) -> Ringing:
        if self._under_way:  # the other may still take what was written then, and ring for it
            raise RuntimeError("a swap before this one was given up, so that the two workers are not at the same one")
        self._under_way = True
        self._other.ring()
        return Ringing(self._other)


def make_swap(group: Group, like: Tensor) -> Swap | None:
    """A way to swap tensors such as this one, if there is one that is better than a ring. All workers must call it."""
    if group.size != 2 or group.device.type != "cpu" or not 0 < like.nbytes <= SHARED:
        return None
    plain = like.device.type == "cpu" and not like.is_complex()
    other = Neighbour.meet(group, 4 * _room(like), able=plain)
    if other is not None:
        return Memory(group, like, other)
    return Messages(group, like) if plain and group.swaps(like) else None


def _room(like: Tensor) -> int:
    return -(-like.nbytes // LINE) * LINE
