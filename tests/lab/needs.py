"""Tests that build a real cluster: they need root, iproute2 and cgroups, and say so where they are skipped."""

from __future__ import annotations

import functools

import pytest

from paceline.lab.tools import missing


@functools.cache
def reason() -> str:
    return "; ".join(missing())


needs_lab = pytest.mark.skipif(bool(reason()), reason=f"the lab cannot work here: {reason()}")
