"""What numba compiles where it is installed (the extra ``fast``), and whether it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

__all__ = ["compiled", "has_numba"]


@cache
def has_numba() -> bool:
    """Whether functions can be compiled."""
    return find_spec("numba") is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile it when it is first called; kept for other processes where there is a folder for that."""
    from numba import njit  # takes a second

    settings: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        made: Callable[..., Any] = njit(cache=True, **settings)(function)
    except RuntimeError:  # numba finds no folder that it can write to
        made = njit(**settings)(function)
    return made
