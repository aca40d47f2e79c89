"""What a run is: versions and settings as text, to compare between workers and to keep in records."""

from __future__ import annotations

import platform
import re
from typing import TYPE_CHECKING

import torch

from paceline.compiled import has_numba
from paceline.role_check import asking
from paceline.roles import Need

if TYPE_CHECKING:
    from paceline.run import Run

__all__ = ["__version__", "identity", "versions"]

__version__ = "0.1.0"

STATISTICS = frozenset(Need) - {Need.UNITS}
"""What all workers decide by."""


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def identity(run: Run) -> dict[str, str]:
    """What must be the same on all workers, as text."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    length = {} if run.local_data else {"dataset length": run.length}
    settings = {**length, **run.roles(), "seed": run.seed, "micro": run.micro, "local_data": run.local_data}
    settings["probe"] = run.probe
    decides = run.probe.always or asking(run.roles(), STATISTICS)
    # Sums in another order differ by a bit, and all must decide alike by them.
    way = {"way to take norms": "numba" if has_numba() else "torch, without numba"} if decides else {}
    return {
        "model": run.replica.shape(),
        "optimizer": f"{type(run.optimizer).__name__} {groups}",
        **{name: _without_addresses(value) for name, value in settings.items()},
        **way,
        **versions(),
    }


def _without_addresses(value: object) -> str:
    return re.sub(r"( object)? at 0x[0-9a-f]+", "", repr(value))
