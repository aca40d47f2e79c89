"""What a run is: versions and settings as text, to compare between workers and to keep in records."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

import torch

__all__ = ["__version__", "describe", "versions"]

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def describe(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as text that is the same in every process: without the addresses of objects."""
    return {name: re.sub(r" object at 0x[0-9a-f]+", "", repr(value)) for name, value in settings.items()}
