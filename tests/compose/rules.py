"""What cannot be together, and what to write instead: said here, not found out by trying."""

from __future__ import annotations

from dataclasses import dataclass

from tests.compose.catalogue import DEFAULTS, Method, method

__all__ = ["NEEDS", "RULES", "Choice", "Name", "Rule", "broken", "choice", "repeats", "writable"]

Choice = dict[str, str]
"""The name of a method for each role; none for a codec that the sync chooses, and for no probe."""
Name = tuple[str, str]
"""Of a method: its role and name."""


@dataclass(frozen=True)
class Rule:
    """A method of one kind cannot be with one of another; the error names both, and what goes together instead."""

    one: str
    other: str
    instead: tuple[Name, ...]
    """Each in the place of one of the two mends it."""


SYNCS = ("LocalSGD", "AllReduce", "Gossip", "LocalSGD with Reset", "LocalSGD with Average")
LOCAL, ALL, GOSSIP, RESET, AVERAGE = (("sync", name) for name in SYNCS)
SHUFFLE, GROWTH, SHARES = ("order", "Shuffle"), ("batch", "GrowthSchedule"), ("balance", "Fixed")
LINEAR, NORM, OWN = ("lr", "Linear"), ("batch", "NormTest"), ("batch", "EachOwn")
HALF, BFLOAT, LATTICE, EXACT = (("codec", name) for name in ("Half", "BFloat16", "Lattice", "Identity"))

RULES = [
    Rule("never meets", "learns an order", (LOCAL, SHUFFLE)),
    Rule("never meets", "compares lengths", (LOCAL, GROWTH)),
    Rule("never meets", "compares directions", (ALL, GROWTH)),
    Rule("never meets", "decides for each", (LOCAL, GROWTH)),
    Rule("never meets", "measures speeds", (LOCAL, SHARES)),
    Rule("never meets", "measures gains", (LOCAL, LINEAR)),
    Rule("never meets", "measures always", (LOCAL, ALL)),
    Rule("never meets", "rounds", (LATTICE, EXACT)),
    Rule("meets in parts", "learns an order", (LOCAL, SHUFFLE)),
    Rule("meets in parts", "compares lengths", (LOCAL, GROWTH)),
    Rule("meets in parts", "compares directions", (ALL, GROWTH)),
    Rule("meets in parts", "decides for each", (LOCAL, GROWTH)),
    Rule("meets in parts", "measures gains", (LOCAL, LINEAR)),
    Rule("meets in parts", "measures always", (LOCAL, ALL)),
    Rule("averages models", "compares directions", (ALL, NORM)),
    Rule("averages models", "needs near numbers", (GOSSIP, HALF, BFLOAT)),
    Rule("averages in the background", "learns an order", (LOCAL, SHUFFLE)),
    Rule("has other moments on each worker", "divides gradients", (ALL, AVERAGE)),
    Rule("averages momentum", "rounds", (RESET,)),
    Rule("averages gradients", "decides for each", (LOCAL, NORM)),
    Rule("averages gradients", "keeps what is lost", (LOCAL, HALF, BFLOAT)),
    Rule("averages gradients", "needs near numbers", (GOSSIP, HALF, BFLOAT)),
    Rule("sends sums", "needs near numbers", (GOSSIP, HALF, BFLOAT)),
    Rule("decides for each", "shares", (("balance", "EachOwn"),)),
    Rule("decides for all", "shares for each", (OWN,)),
]
COMPARING = {"compares lengths", "decides for each", "measures gains", "measures always"}
# What has no effect without any of those, and what the error proposes.
NEEDS = [("measures late", COMPARING, (NORM, ("lr", "AdaScale")))]


def choice(*wanted: Method) -> Choice:
    """These methods, and for the other roles what goes with them, or the defaults."""
    found = dict(DEFAULTS)
    for each in wanted:
        found.update(each.beside)
    return found | {each.role: each.name for each in wanted}


def writable(*wanted: Method) -> bool:
    """Whether there is a way to write it: a sync that takes no codec has no argument for one."""
    takes_none = any("takes no codec" in each.kinds for each in wanted)
    return not (takes_none and any(each.role == "codec" for each in wanted))


def broken(chosen: Choice) -> list[tuple[tuple[Method, ...], tuple[Name, ...]]]:
    """The rules that it breaks: the methods that do, each of which the error names, and what it proposes."""
    present = [method(*name) for name in chosen.items()]
    pairs = [
        ((one, other), rule.instead)
        for rule in RULES
        for one in present
        for other in present
        if rule.one in one.kinds and rule.other in other.kinds
    ]
    kinds = frozenset().union(*(each.kinds for each in present))
    alone = [
        ((each,), instead)
        for kind, any_of, instead in NEEDS
        for each in present
        if kind in each.kinds and not kinds & any_of
    ]
    return [*pairs, *alone]


def repeats(chosen: Choice) -> bool:
    """Whether a resumed run must end with the bits of one that never stopped."""
    return all(method(*name).repeats for name in chosen.items())
