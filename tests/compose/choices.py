"""Which combinations are tried."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import combinations

from tests.compose.catalogue import CATALOGUE, ROLES, Method, method
from tests.compose.rules import Choice, broken, choice, writable

__all__ = ["covering", "pairs", "sampled"]

# First what rules out most.
ORDER_OF_CHOICE = ("sync", "batch", "balance", "codec", "order", "lr", "probe")
Names = frozenset[tuple[str, str]]


def pairs() -> list[Choice]:
    """Every two methods of different roles, with the defaults of the others, or what the two need."""
    found = [choice(*pair) for pair in combinations(CATALOGUE, 2) if pair[0].role != pair[1].role and writable(*pair)]
    return list({tuple(sorted(each.items())): each for each in found}.values())


def covering() -> list[Choice]:
    """Full combinations that go together, so that every two methods that go together are in one of them.

    Those with most that is not in the ones before come first.
    """
    wanted = {pair for each in pairs() if not broken(each) for pair in _within(each)}
    found, left = list[Choice](), set(wanted)
    while left:
        filled = _filled(min(left, key=sorted), left)
        found.append(filled)
        left -= _within(filled)
    ordered, left = list[Choice](), wanted
    while found:
        ordered.append(max(found, key=lambda each: len(_within(each) & left)))
        found.remove(ordered[-1])
        left = left - _within(ordered[-1])
    return ordered


def _within(chosen: Choice) -> set[Names]:
    return {frozenset(pair) for pair in combinations(chosen.items(), 2)}


def _filled(pair: Names, left: set[Names]) -> Choice:
    """A combination with this pair, and of each other role the method that covers most of what is left."""
    filled: Choice = dict(pair)
    for role in ORDER_OF_CHOICE:
        if role not in filled:
            fitting = [each for each in CATALOGUE if each.role == role and _fits(each, filled)]
            if fitting:
                filled[role] = max(fitting, key=lambda each: len(_within({**filled, role: each.name}) & left)).name
    whole = {*ROLES} - {"codec", "probe"} <= filled.keys()
    return filled if whole and not broken(filled) else choice(*(method(*name) for name in sorted(pair)))


def _fits(one: Method, chosen: Choice) -> bool:
    present = [method(*name) for name in chosen.items()]
    return writable(one, *present) and not any(len(named) > 1 for named, _ in broken({**chosen, one.role: one.name}))


def sampled(count: int, *, refused: bool) -> list[Choice]:
    """Full combinations at random, all different: those that are refused, or those that are not."""
    draws = random.Random(0)
    found: dict[str, Choice] = {}
    while len(found) < count:
        drawn = [draws.choice(each) for each in _by_role()]
        chosen = {each.role: each.name for each in drawn}
        if writable(*drawn) and bool(broken(chosen)) is refused:
            found[str(chosen)] = chosen
    return list(found.values())


def _by_role() -> Iterable[Sequence[Method]]:
    return [[each for each in CATALOGUE if each.role == role] for role in ROLES]
