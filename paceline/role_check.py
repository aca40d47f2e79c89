"""Whether what was given for a role is one."""

from __future__ import annotations

import warnings
from typing import Protocol, runtime_checkable

from paceline.errors import SettingError
from paceline.probe import Example
from paceline.probe.units import Unit
from paceline.records import Plan
from paceline.roles import Asker, Balance, Need, Unmet

__all__ = ["check_limit", "check_object", "check_roles", "compares_within", "mind_local_noise", "needs_of"]

# Of each role a method that every object for it must have, and an example of one.
METHODS = {
    "order": ("permutation", "order.Shuffle()"),
    "batch": ("size", "batch.Fixed(64)"),
    "balance": ("split", "balance.Fixed([2, 1])"),
    "sync": ("attach", "sync.AllReduce() or pl.sync.LocalSGD(8)"),
    "lr": ("factor", "lr.Linear(64); the learning rate itself belongs to the optimizer"),
}


def check_object(what: str, value: object, method: str, examples: str) -> None:
    """Refuse a class without its parentheses, and what has not the method that every object for this setting has."""
    if isinstance(value, type):
        raise SettingError(f"{what}={value.__name__} is a class; write {value.__name__}(…)")
    if not callable(getattr(value, method, None)):
        raise SettingError(f"{what}={value!r} has no method {method}; give an object such as {examples}")


def check_roles(roles: dict[str, object], local_data: bool) -> None:
    """Refuse a class without its parentheses, what has not the methods of the role, and what does not go together."""
    for name, role in roles.items():
        method, example = METHODS[name]
        check_object(name, role, method, f"pl.{example}")
    if isinstance(roles["sync"], Unmet):
        roles["sync"].refuse(roles, local_data)


@runtime_checkable
class Growing(Protocol):
    """A batch that may grow."""

    @property
    def limit(self) -> int:
        """To what."""


def check_limit(batch: object, balance: Balance, workers: int, examples: int) -> None:
    """A batch that grows must be one that can be split when it has grown: an error now instead of hours later."""
    if batch is not balance and isinstance(batch, Growing) and isinstance(batch.limit, int):
        balance.split(min(batch.limit, examples), workers)


def needs_of(roles: dict[str, object], unit: Unit, first: Plan) -> frozenset[Need]:
    """What the roles ask the probe for, of which there must be enough in the first step."""
    askers = {name: role for name, role in roles.items() if isinstance(role, Asker) and role.needs}
    needs = frozenset(need for role in askers.values() for need in role.needs)
    units = _units(unit, first)
    if Need.OWN in needs and (roles["balance"] is not roles["batch"] or min(units) < 2):
        raise SettingError(
            f"{roles['batch']!r} gives every worker a batch of its own, by its own gradients: give it as batch and as "
            f"balance, and a micro of at most half of each worker's first batch ({list(first.counts)})"
        )
    comparing = {name: role for name, role in askers.items() if role.needs != {Need.UNITS}}
    if comparing and sum(units) < 2:
        names = " and ".join(f"{name}={role!r}" for name, role in comparing.items())
        raise SettingError(
            f"{names} compares gradients within a step, but a step of {first.batch} examples is one micro-batch of "
            f"one worker; give micro={first.batch // 2} or less, or start more workers"
        )
    return needs


def compares_within(needs: frozenset[Need], unit: Unit, first: Plan, ddp: bool) -> bool:
    """Whether the noise of gradients can be seen within each worker, where all have data of their own."""
    if Need.COORDINATES in needs or (ddp and isinstance(unit, Example)):
        return False
    return min(_units(unit, first)) > 1


def mind_local_noise(needs: frozenset[Need]) -> None:
    """Workers with data of their own differ in every step, however large: a test between them takes that for noise."""
    if needs - {Need.UNITS} and Need.OWN not in needs:
        warnings.warn(
            "with local_data=True and one micro-batch a worker (or CoordinateTest, or single examples under DDP), what "
            "the workers' data differ in counts as noise of the gradient, which no batch is large enough for: a batch "
            "that follows it grows to its limit. Give a micro of at most half of each worker's share, so that "
            "gradients are compared within each worker",
            stacklevel=5,
        )


def _units(unit: Unit, first: Plan) -> list[int]:
    """How many each worker has in the first step."""
    return [n if isinstance(unit, Example) else len(first.pieces(rank)) for rank, n in enumerate(first.counts)]
