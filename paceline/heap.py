"""How glibc is told to keep the memory that a training step frees: the next step needs the same again."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["keep_freed"]

LARGEST = 32 * 2**20
"""Bytes of the largest block that comes from the heap, as many as glibc allows; larger ones are always mapped anew."""
SPARE = 2**40
"""Freed bytes at the end of the heap that are given back: more than there are."""


def keep_freed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to a worker's environment; none if it says something of its own about the heap.

    Left to itself, glibc gives the end of its heap back to the system whenever enough of it is free, and that may be in
    every step: the pages must then be cleared and mapped again. Whether it happens depends on which small block lies
    where, so it differs from process to process.
    """
    if "glibc.malloc." in environment.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in environment
    ):
        return {}
    return {"MALLOC_MMAP_THRESHOLD_": str(LARGEST), "MALLOC_TRIM_THRESHOLD_": str(SPARE)}
