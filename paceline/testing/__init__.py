"""A fault harness for tests of distributed training: start workers, let a fault happen at a step, check what follows.

Put ``pytest_plugins = ["paceline.testing"]`` into ``conftest.py`` to have the fixtures ``workers`` and ``lab_workers``.
Nothing here but the fixtures needs pytest, so that a training script can call :func:`reached`. (PYTEST_DONT_REWRITE:
a script that is tested imports this package before pytest does.)
"""

from paceline.testing.digest import digest, tell_digest
from paceline.testing.faults import At
from paceline.testing.group import Group
from paceline.testing.outcome import Ending, Outcome
from paceline.testing.starters import LabWorkers, Workers
from paceline.testing.tell import reached

__all__ = ["At", "Ending", "Group", "LabWorkers", "Outcome", "Workers", "digest", "reached", "tell_digest"]

pytest_plugins = ["paceline.testing.fixtures"]
