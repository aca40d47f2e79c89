"""How a worker comes to its swarm: together with all who begin, or, with an invitation, to those that have begun."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import msgspec
from torch import Tensor

from paceline.errors import SettingError
from paceline.fleet import Fleet
from paceline.gossip.graph import Graph
from paceline.gossip.invitation import Invitation, accept, answers, invite, withdraw
from paceline.gossip.node import Node
from paceline.gossip.start import Shape, open_node, start

__all__ = ["VARIABLE", "Entrance"]

VARIABLE = "PACELINE_INVITATION"
"""Of the environment: by it ``paceline run --independent`` tells its workers where their invitation is."""


class Entrance:
    """Keeps the invitation, a file, as long as the run goes on; ``path`` is None where nobody can come back.

    Whoever is started again may come when all who began with it have moved: to other ports, or to other machines. So
    the addresses in the file are those of the members that are known now.
    """

    def __init__(self, path: str | Path | None) -> None:
        found = os.environ.get(VARIABLE) if path is None else path
        self.path = Path(found) if found else None
        self._invitation: Invitation | None = None
        self.came_later = False
        """Whether this worker has come to a swarm that trained already."""

    def join(self, deadline: float) -> Fleet:
        """Come together with all who begin; whom the invitation leads to others comes alone."""
        found = None if self.path is None else accept(self.path)
        self.came_later = found is not None and answers(found)
        if found is None or not self.came_later:
            return Fleet.join(deadline)
        self._invitation = found
        fleet = Fleet.come_back(deadline)
        if not 0 <= fleet.rank < fleet.size == found.size:
            raise SettingError(
                f"the run that {self.path} invites to has {found.size} workers, but this one was started as rank "
                f"{fleet.rank} of {fleet.size}; start it as it was, or remove the file to begin a new run"
            )
        return fleet

    def open(
        self, fleet: Fleet, shape: Shape, counters: Tensor, graph: Graph, *, blocking: bool, bind: str, plain: bool
    ) -> Node:
        """Become a member."""
        if self.came_later:
            assert self._invitation is not None
            life = int(100 * time.time())  # later than that of any worker that was started before
            who = fleet.rank, life, self._invitation.secret, shape, counters, graph
            return open_node(*who, contacts=self._invitation.addresses, blocking=blocking, bind=bind)
        node, self._invitation = start(fleet, shape, counters, graph, blocking=blocking, bind=bind, plain=plain)
        try:
            if self.path is not None:
                invite(self.path, self._invitation)
        except BaseException:
            node.close()
            raise
        return node

    def keep(self, addresses: set[str]) -> None:
        """Members listen at these addresses now: write the invitation anew if it says something else."""
        if self.path is None or self._invitation is None or addresses == set(self._invitation.addresses):
            return
        self._invitation = msgspec.structs.replace(self._invitation, addresses=sorted(addresses))
        try:
            invite(self.path, self._invitation)
        except SettingError as error:  # the training need not end for that
            warnings.warn(f"{error}; who is started again may not find the run", stacklevel=2)

    def close(self) -> None:
        """The swarm has come to its end."""
        if self.path is not None:
            withdraw(self.path)
