"""What the roles ask the probe for, step by step."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.probe import Probe
from paceline.records import Plan, Progress
from paceline.roles import Asker, Due, Need, Sync

__all__ = ["Asking"]


class Asking:
    """The roles that ask."""

    def __init__(self, roles: Iterable[object]) -> None:
        self._askers = [role for role in roles if isinstance(role, Asker) and role.needs]

    def needs(self, progress: Progress, plan: Plan, probe: Probe, sync: Sync) -> frozenset[Need]:
        """What is looked at in the step that begins here: units in every step, statistics when all agree on it."""
        if not probe.active:
            return frozenset()
        asked = (one.needs for one in self._askers if not isinstance(one, Due) or one.due(progress))
        due: frozenset[Need] = frozenset().union(*asked)
        units = due & {Need.UNITS}
        if not (probe.statistics and sync.measures(progress, plan, probe.always or due != units)):
            return units
        return due | {Need.VARIANCE}  # also if nobody asks for it but the user, who wants it always
