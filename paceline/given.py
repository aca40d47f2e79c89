"""Numbers that a user gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeGuard, TypeVar

from paceline.errors import SettingError

__all__ = ["check_flags", "check_numbers", "check_whole", "is_number", "is_whole", "list_of"]

Kind = TypeVar("Kind")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number; ``True`` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number; ``True`` is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_whole(what: str, value: object, smallest: int) -> None:
    """Refuse what is not a whole number of at least so many."""
    if not is_whole(value) or value < smallest:
        raise SettingError(f"{what} ({value!r}) must be a whole number of at least {smallest}")


def check_flags(what: str, **values: object) -> None:
    """Refuse what is neither ``True`` nor ``False``: a text such as ``"no"`` would count as yes."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise SettingError(f"{what}{name} ({value!r}) must be True or False")


def list_of(fits: Callable[[object], TypeGuard[Kind]], values: object) -> list[Kind] | None:
    """What a list, tuple, array or tensor holds; None if it is nothing of these, or anything in it does not fit."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        return None
    found = [value for value in plain if fits(value)]
    return found if len(found) == len(plain) else None


def check_numbers(owner: Any) -> None:
    """Refuse what is not a number in those fields of a dataclass that are for one."""
    for each in dataclasses.fields(owner):
        kind, *other = str(each.type).split(" | ")
        if not each.init or kind not in ("int", "float") or other not in ([], ["None"]):
            continue
        value = getattr(owner, each.name)
        if not is_number(value) and not (other and value is None):
            raise SettingError(f"{type(owner).__name__}: {each.name} ({value!r}) must be a number")
