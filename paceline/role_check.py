"""Whether what was given for a role is one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol, runtime_checkable

import torch

from paceline.errors import SettingError
from paceline.order.learnt import Learnt
from paceline.order.preconditioner import DIVISORS
from paceline.probe import Example, Probe
from paceline.probe.units import Unit
from paceline.rate import scales_of
from paceline.records import Plan
from paceline.roles import Asker, Balance, Need, Observer

__all__ = [
    "Choosy",
    "asking",
    "check_balance",
    "check_object",
    "check_roles",
    "compares_within",
    "mind_local_noise",
    "needs_of",
    "refuse_comparing",
]

# Of each role a method that every object for it must have, and an example of one.
METHODS = {
    "order": ("permutation", "order.Shuffle()"),
    "batch": ("size", "batch.Fixed(64)"),
    "balance": ("split", "balance.BySpeed() or pl.balance.Fixed([2, 1])"),
    "sync": ("attach", "sync.AllReduce() or pl.sync.LocalSGD(8)"),
    "lr": ("factor", "lr.Linear(64); the learning rate itself belongs to the optimizer, its scheduler to stateful="),
}


# Of each role a method that learns nothing.
PLAIN = {
    "order": "order.Shuffle",
    "batch": "batch.GrowthSchedule",
    "balance": "balance.Fixed",
    "lr": "lr.Linear",
}


def check_object(what: str, value: object, method: str, examples: str) -> None:
    """Refuse a class without its parentheses, and what has not the method that every object for this setting has."""
    if isinstance(value, type):
        raise SettingError(f"{what}={value.__name__} is a class; write {value.__name__}(…)")
    if isinstance(value, str) or not callable(getattr(value, method, None)):
        raise SettingError(f"{what}={value!r} has no method {method}; give an object such as {examples}")


@runtime_checkable
class Choosy(Protocol):
    """A role that does not go with every other."""

    def refuse(self, roles: dict[str, object], always: bool, local_data: bool) -> None:
        """Raise an error for what it cannot be combined with; ``always`` is that of the probe."""


def check_roles(
    roles: dict[str, object], optimizer: torch.optim.Optimizer, probe: Probe | None, local_data: bool
) -> None:
    """Refuse a class without its parentheses, what has not the methods of the role, and what does not go together."""
    for name, role in roles.items():
        method, example = METHODS[name]
        check_object(name, role, method, f"pl.{example}")
        if name != "sync" and callable(getattr(role, "attach", None)):
            raise SettingError(f"{name}={role!r} is a sync; write sync={role!r}")
    scales_of(roles["lr"], optimizer)
    _check_divides(roles["order"], optimizer)
    always = probe is not None and probe.always
    choosy = [role for role in roles.values() if isinstance(role, Choosy) and callable(role.refuse)]
    for role in choosy:
        role.refuse(roles, always, local_data)
    if not (probe is None or always or asking(roles, Need)):
        remedy = "leave it out"
        with suppress(SettingError):
            for role in choosy:
                role.refuse(roles, True, local_data)
            remedy += ", or write Probe(always=True, …) for the record"
        raise SettingError(f"probe={probe!r} has no effect, since no role asks for measurements; {remedy}")


def _check_divides(order: object, optimizer: torch.optim.Optimizer) -> None:
    """Where gradients are balanced as the optimizer divides them, it must be known by what."""
    if isinstance(order, Learnt) and order.preconditioned and type(optimizer) not in DIVISORS:
        *names, last = (kind.__name__ for kind in DIVISORS)
        raise SettingError(
            f"order={order!r} balances gradients as the optimizer divides them, but {type(optimizer).__name__} divides "
            f"by nothing, or by what is not known; use {', '.join(names)} or {last} of torch.optim, or leave "
            "preconditioned=True out"
        )


def asking(roles: dict[str, object], needs: Iterable[Need]) -> dict[str, object]:
    """The roles that ask the probe for any of these, by name."""
    wanted = frozenset(needs)
    return {name: role for name, role in roles.items() if isinstance(role, Asker) and wanted & set(role.needs)}


def refuse_comparing(roles: dict[str, object], always: bool, but: str, *, all_that_learn: bool = False) -> None:
    """Refuse roles that learn from the gradients of all workers, or from anything that they did together.

    ``but`` says why that cannot be.
    """
    comparing = asking(roles, Need)
    if all_that_learn:
        comparing |= {name: role for name, role in roles.items() if isinstance(role, Observer)}
    for name, role in comparing.items():
        far = asking({name: role}, (Need.DIRECTION, Need.COORDINATES))
        plain = f"{PLAIN[name]} as batch, and no balance" if roles["batch"] is roles["balance"] else PLAIN[name]
        raise SettingError(
            f"{name}={role!r} learns from what all workers did in the same step, but {but}; use "
            f"sync.{'AllReduce' if far else 'LocalSGD'}, or {plain}"
        )
    if always:
        raise SettingError(
            f"Probe(always=True) compares the gradients of all workers, but {but}; use sync.LocalSGD or "
            "sync.AllReduce, or leave the probe out"
        )


@runtime_checkable
class Growing(Protocol):
    """A batch that may grow."""

    @property
    def limit(self) -> int:
        """To what."""


def check_balance(balance: Balance, batch: object, workers: int, examples: int, synced_norm: str) -> None:
    """Refuse what a balance could not do hours later, or would do wrongly all the time.

    A batch that grows must be one that can be split when it has grown. ``synced_norm`` is a layer in which workers wait
    for each other in every forward pass, if there is one.
    """
    if batch is not balance and isinstance(batch, Growing) and isinstance(batch.limit, int):
        balance.split(min(batch.limit, examples), workers)
    if synced_norm and workers > 1 and isinstance(balance, Observer):
        raise SettingError(
            f"balance={balance!r} learns what each of {workers} workers does by itself, but in the layer {synced_norm} "
            "they wait for each other: all look equally fast, and all must do equally many forward passes. Use "
            "GroupNorm or LayerNorm there, or balance.Even()"
        )


def needs_of(roles: dict[str, object], unit: Unit, first: Plan) -> frozenset[Need]:
    """What the roles ask the probe for, of which there must be enough in the first step."""
    askers = {name: role for name, role in roles.items() if isinstance(role, Asker) and role.needs}
    needs = frozenset(need for role in askers.values() for need in role.needs)
    units = _units(unit, first)
    if Need.OWN in needs and min(units) < 2:
        raise SettingError(
            f"{roles['batch']!r} compares the gradients of each worker alone: give a micro of at most half of each "
            f"worker's first batch ({list(first.counts)})"
        )
    comparing = {name: role for name, role in askers.items() if role.needs != {Need.UNITS}}
    if comparing and sum(units) < 2:
        names = " and ".join(f"{name}={role!r}" for name, role in comparing.items())
        smaller = f"give micro={first.batch // 2} or less, or start more workers" if first.batch > 1 else "give more"
        raise SettingError(
            f"{names} compares gradients within a step, but a step of {first.batch} examples is one micro-batch of "
            f"one worker; {smaller}"
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
