"""Communication graphs: with whom each worker may average, and how fast that spreads over all of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.errors import SettingError

__all__ = [
    "Complete",
    "Edges",
    "Exponential",
    "FromFile",
    "Graph",
    "RandomRegular",
    "Ring",
    "Torus",
    "contraction",
]

Neighbours = Mapping[int, tuple[int, ...]]
"""For each member, with whom it may average, in ascending order; if i is there for j, then j for i."""

ATTEMPTS = 200  # at pairing the ends of a random regular graph; one in a few succeeds for the degrees that make sense


class Graph(Protocol):
    """A rule that makes a graph of whatever members there are, so that it repairs itself when one leaves.

    Members are numbered, not necessarily from 0 or without gaps. The same members give the same graph on every worker.
    """

    def neighbours(self, members: Sequence[int]) -> Neighbours:
        """Who may average with whom; a :class:`~paceline.errors.SettingError` if that does not connect all members."""


@dataclass(frozen=True)
class Complete:
    """Everybody with everybody: spreads fastest for each exchange, and is the default."""

    def neighbours(self, members: Sequence[int]) -> Neighbours:
        """All others."""
        places = _ordered(members)
        return _checked(self, places, [(a, b) for a in places for b in places if a < b])


@dataclass(frozen=True)
class Ring:
    """Everybody with the next: two neighbours. News need n² exchanges of everybody to go round; for comparison."""

    def neighbours(self, members: Sequence[int]) -> Neighbours:
        """The next lower and the next higher."""
        places = _ordered(members)
        return _checked(self, places, _circle(places, [1]))


@dataclass(frozen=True)
class Exponential:
    """Everybody with those 1, 2, 4, 8 … places further on and back: about 2 log2(n) neighbours."""

    def neighbours(self, members: Sequence[int]) -> Neighbours:
        """Those at distances that are powers of two, in both directions."""
        places = _ordered(members)
        powers = [1 << at for at in range((len(places) // 2).bit_length())]
        return _checked(self, places, _circle(places, powers))


@dataclass(frozen=True)
class Torus:
    """A rectangle, as square as can be, whose opposite sides are joined: four neighbours. A prime number is a ring."""

    def neighbours(self, members: Sequence[int]) -> Neighbours:
        """Left, right, above and below."""
        places = _ordered(members)
        rows = max(each for each in range(1, math.isqrt(len(places)) + 1) if len(places) % each == 0)
        columns = len(places) // rows
        edges = []
        for at, member in enumerate(places):
            row, column = divmod(at, columns)
            edges += [
                (member, places[row * columns + (column + 1) % columns]),
                (member, places[(row + 1) % rows * columns + column]),
            ]
        return _checked(self, places, edges)


@dataclass(frozen=True)
class RandomRegular:
    """Everybody with ``degree`` others, drawn at random: with 3 or more, an expander in all likelihood.

    Where there are not so many others, everybody with everybody; where an odd number of ends cannot be paired, one more
    neighbour for everybody.
    """

    degree: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.degree < 2:
            raise SettingError(f"RandomRegular: degree ({self.degree}) must be at least 2, or the graph falls apart")

    def neighbours(self, members: Sequence[int]) -> Neighbours:
        """The first connected graph that the seed and the members lead to."""
        places = _ordered(members)
        degree = self.degree + self.degree * len(places) % 2
        if degree >= len(places) - 1:
            return Complete().neighbours(places)
        generator = random.Random(repr((self.seed, places)))
        others = len(places) - 1 - degree
        for _ in range(ATTEMPTS):
            # Of few and of all but few neighbours one is easy to draw: who is not a neighbour, then.
            drawn = _paired(places, min(degree, others), generator)
            if drawn is None:
                continue
            every = {(a, b) for a in places for b in places if a < b}
            edges = drawn if degree <= others else sorted(every - set(drawn))
            if len(_parts(places, edges)) == 1:
                return _checked(self, places, edges)
        raise SettingError(
            f"no connected graph of degree {degree} was found for {len(places)} members; use another degree or seed"
        )


@dataclass(frozen=True)
class Edges:
    """A graph that is given: pairs of members. Who has left is bridged: its neighbours become each other's.

    Members that are in no pair are left out.
    """

    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if own := [pair for pair in self.edges if len(set(pair)) != 2]:
            raise SettingError(f"Edges: {own[0]} is not a pair of two members; nobody averages with itself")

    def neighbours(self, members: Sequence[int]) -> Neighbours:
        """The pairs that are given, and what bridges the members that are not there."""
        known = {member for pair in self.edges for member in pair}
        graph = {each: {b if a == each else a for a, b in self.edges if each in (a, b)} for each in known}
        for gone in sorted(known - set(members)):
            around = graph.pop(gone)
            for each in around:
                graph[each] = (graph[each] | around) - {gone, each}
        return _checked(self, sorted(graph), [(a, b) for a, others in graph.items() for b in others])


@dataclass(frozen=True)
class FromFile:
    """A graph in a text file: two numbers of members on every line, and comments after ``#``."""

    path: str | Path

    def __post_init__(self) -> None:
        self._read()

    def neighbours(self, members: Sequence[int]) -> Neighbours:
        """As :class:`Edges` of what the file says."""
        return self._read().neighbours(members)

    def _read(self) -> Edges:
        try:
            lines = Path(self.path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"the graph {self.path} cannot be read ({error}); give a text file") from error
        edges = []
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) != 2 or not all(word.isdecimal() for word in words):
                raise SettingError(
                    f'{self.path}, line {number}: "{line.strip()}" is not an edge; write the numbers of two members, '
                    'such as "0 3"'
                )
            edges.append((int(words[0]), int(words[1])))
        return Edges(tuple(edges))


def contraction(neighbours: Neighbours) -> float:
    """What part of the spread of the models one exchange takes away on average, at least.

    The spread is ``sum_i |x_i - mean|²``. A member drawn at random averages with a neighbour drawn at random, so that
    the pair (i, j) meets with probability p_ij = (1 / d_i + 1 / d_j) / n. Averaging takes ``|x_i - x_j|² / 2`` away,
    hence lambda_2 / 2 of the spread, with the second smallest eigenvalue of the Laplacian of the weights p_ij: the
    spectral gap of the averaging. For the complete graph that is 1 / (n - 1), whatever the models are.
    """
    places = {member: at for at, member in enumerate(sorted(neighbours))}
    laplacian = np.zeros((len(places), len(places)))
    for member, others in neighbours.items():
        for other in others:
            chance = (1 / len(others) + 1 / len(neighbours[other])) / len(places)
            laplacian[places[member], places[other]] -= chance
            laplacian[places[member], places[member]] += chance
    return float(np.linalg.eigvalsh(laplacian)[1]) / 2


def _circle(places: Sequence[int], distances: Iterable[int]) -> list[tuple[int, int]]:
    """Every member with those so many places further on."""
    return [(member, places[(at + far) % len(places)]) for far in distances for at, member in enumerate(places)]


def _paired(places: Sequence[int], degree: int, generator: random.Random) -> list[tuple[int, int]] | None:
    """As many ends of edges for every member as it has neighbours, paired at random; None if that fails.

    A pair that would be a member with itself, or twice the same, goes back (Steger and Wormald 1999).
    """
    edges: set[tuple[int, int]] = set()
    ends = [member for member in places for _ in range(degree)]
    while ends:
        generator.shuffle(ends)
        left = []
        for a, b in zip(ends[::2], ends[1::2], strict=True):
            pair = (min(a, b), max(a, b))
            if a == b or pair in edges:
                left += [a, b]
            else:
                edges.add(pair)
        if len(left) == len(ends):
            return None
        ends = left
    return sorted(edges)


def _parts(members: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The sets of members that are connected with each other."""
    part = {member: {member} for member in members}
    for a, b in edges:
        if part[a] is not part[b]:
            small, large = sorted((part[a], part[b]), key=len)
            large |= small
            for member in small:
                part[member] = large
    return sorted({id(each): sorted(each) for each in part.values()}.values())


def _ordered(members: Sequence[int]) -> list[int]:
    if len(members) < 2 or len(set(members)) < len(members):
        raise SettingError(f"gossip needs at least two different members, not {list(members)}; start more workers")
    return sorted(members)


def _checked(graph: Graph, members: Sequence[int], edges: Iterable[tuple[int, int]]) -> Neighbours:
    """As a table, if it connects all of the ``members``, which are in ascending order."""
    pairs = [(a, b) for a, b in edges if a != b]
    parts = _parts(members, pairs)
    if len(parts) > 1:
        raise SettingError(
            f"{graph!r} does not connect all members: it falls into {parts}, whose models would never meet; add edges"
        )
    found: dict[int, set[int]] = {member: set() for member in members}
    for a, b in pairs:
        found[a].add(b)
        found[b].add(a)
    return {member: tuple(sorted(others)) for member, others in found.items()}
