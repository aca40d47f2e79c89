"""What tests of single examples share."""

from __future__ import annotations

import pytest

from .taps import Ear


@pytest.fixture
def ear(monkeypatch: pytest.MonkeyPatch) -> Ear:
    return Ear(monkeypatch)
