"""Graphs of any members: connected, symmetric, the same for all, and as fast as their eigenvalues say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SettingError
from paceline.gossip import Complete, Edges, Exponential, FromFile, Graph, RandomRegular, Ring, Torus, contraction
from paceline.gossip.graph import Neighbours

GRAPHS: list[Graph] = [Complete(), Ring(), Exponential(), Torus(), RandomRegular(), RandomRegular(4, seed=7)]
members = st.sets(st.integers(0, 40), min_size=2, max_size=20).map(sorted)


@pytest.mark.parametrize("graph", GRAPHS, ids=repr)
@settings(max_examples=40, deadline=None)
@given(members, st.randoms(use_true_random=False))
def test_any_members_are_connected_alike_for_all(graph: Graph, members: list[int], chance: object) -> None:
    found = graph.neighbours(members)
    assert list(found) == members
    for member, others in found.items():
        assert others == tuple(sorted(set(others) - {member}))
        assert all(member in found[other] for other in others)
    assert reached(found, members[0]) == set(members)
    assert contraction(found) > 0
    assert graph.neighbours(members[::-1]) == found  # whoever lists them, and however


def reached(neighbours: Neighbours, member: int) -> set[int]:
    seen, new = {member}, {member}
    while new:
        new = {other for each in new for other in neighbours[each]} - seen
        seen |= new
    return seen


def test_what_they_look_like() -> None:
    def degrees(graph: Graph, size: int) -> set[int]:
        return {len(others) for others in graph.neighbours(range(size)).values()}

    assert degrees(Complete(), 7) == {6}
    assert degrees(Ring(), 7) == {2}
    assert Ring().neighbours([3, 5, 9, 20])[20] == (3, 9)
    assert Exponential().neighbours(range(16))[0] == (1, 2, 4, 8, 12, 14, 15)
    assert Torus().neighbours(range(12))[5] == (1, 4, 6, 9)  # three rows of four
    assert degrees(Torus(), 7) == {2}  # a prime number is a ring
    assert degrees(RandomRegular(3), 20) == {3}
    assert degrees(RandomRegular(3), 9) == {4}  # nine members cannot have three neighbours each
    assert degrees(RandomRegular(5), 4) == {3}
    assert degrees(RandomRegular(8), 10) == {8}  # hard to draw but for who is not a neighbour
    assert degrees(RandomRegular(7), 10) == {7}
    assert RandomRegular(3, seed=1).neighbours(range(20)) != RandomRegular(3, seed=2).neighbours(range(20))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_known_contractions(size: int) -> None:
    assert contraction(Complete().neighbours(range(size))) == pytest.approx(1 / (size - 1))
    if size == 16:  # the slowest models are +1, -1, +1, …: only two of seven neighbours are at an odd distance
        assert contraction(Exponential().neighbours(range(16))) == pytest.approx(4 / 56 / 2)
        assert contraction(Torus().neighbours(range(16))) == pytest.approx(2 / 32 / 2)
    if size > 2:  # eigenvalues of a circle: 2 - 2 cos(2 pi k / n)
        expected = (1 - math.cos(2 * math.pi / size)) / size
        assert contraction(Ring().neighbours(range(size))) == pytest.approx(expected)


@pytest.mark.parametrize("graph", [*GRAPHS, Edges(((0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (1, 4)))], ids=repr)
def test_an_exchange_takes_away_what_is_promised(graph: Graph) -> None:
    """Against all pairs that may meet, each with its probability; with the slowest models, exactly that."""
    size = 5
    found = graph.neighbours(range(size))
    promised = contraction(found)
    generator = np.random.default_rng(0)
    slowest = 1.0
    matrix = np.zeros((size, size))
    for i, others in found.items():
        for j in others:
            pair = np.eye(size)
            pair[[i, i, j, j], [i, j, i, j]] = 0.5
            matrix += pair.T @ pair / len(others) / size
    for models in [*generator.normal(size=(20, size)), *np.linalg.eigh(matrix)[1].T[:-1]]:
        centred = models - models.mean()
        left = float(centred @ matrix @ centred) / float(centred @ centred)
        slowest = min(slowest, 1 - left)
        assert left <= 1 - promised + 1e-12
    assert slowest == pytest.approx(promised)


def test_who_leaves_is_bridged() -> None:
    chain = Edges(((0, 1), (1, 2), (2, 3)))
    assert chain.neighbours([0, 1, 2, 3]) == {0: (1,), 1: (0, 2), 2: (1, 3), 3: (2,)}
    assert chain.neighbours([0, 3]) == {0: (3,), 3: (0,)}
    star = Edges(((0, 1), (0, 2), (0, 3)))
    assert star.neighbours([1, 2, 3]) == {1: (2, 3), 2: (1, 3), 3: (1, 2)}


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text("# a chain\n0 1\n1 2   # the far end\n\n")
    assert FromFile(file).neighbours([0, 1, 2]) == {0: (1,), 1: (0, 2), 2: (1,)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0 1\n1 two\n", r'line 2: "1 two" is not an edge; write the numbers of two members'),
        ("0 1 2\n", r'line 1: "0 1 2" is not an edge'),
        ("3 3\n", r"\(3, 3\) is not a pair of two members"),
        (None, "cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "graph.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingError, match=told):
        FromFile(file)


def test_bad_graphs() -> None:
    with pytest.raises(SettingError, match=r"falls into \[\[0, 1\], \[2, 3\]\], whose models would never meet"):
        Edges(((0, 1), (2, 3))).neighbours(range(4))
    assert Edges(((0, 1),)).neighbours(range(3)) == {0: (1,), 1: (0,)}  # who is in no pair is left out
    for graph in GRAPHS:
        with pytest.raises(SettingError, match="at least two different members"):
            graph.neighbours([])
    with pytest.raises(SettingError, match="at least two different members, not \\[4\\]; start more workers"):
        Complete().neighbours([4])
    with pytest.raises(SettingError, match="at least two different members"):
        Complete().neighbours([4, 4])
    with pytest.raises(SettingError, match=r"degree \(1\) must be at least 2"):
        RandomRegular(1)
