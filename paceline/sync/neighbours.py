"""Decentralised SGD in step: after every step all workers average with all of their neighbours (D-PSGD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import SettingError
from paceline.fleet import Fleet
from paceline.gossip.graph import Graph, Ring
from paceline.meeting import ends
from paceline.probe import Probe
from paceline.records import Meeting, Note
from paceline.replica import Replica
from paceline.role_check import refuse_comparing
from paceline.sync.average import assign
from paceline.sync.local_sgd import LocalSGD
from paceline.sync.notes import NotesTable

__all__ = ["Neighbours", "metropolis"]


def metropolis(neighbours: Mapping[int, Sequence[int]]) -> dict[int, dict[int, float]]:
    """Metropolis-Hastings weights: W_ij = 1 / (1 + max(d_i, d_j)) for neighbours, and the rest of 1 for oneself.

    Rows and columns sum to 1, so that an average by them keeps the mean of all (d_i is the number of neighbours of i).
    """
    degrees = {one: len(others) for one, others in neighbours.items()}
    weights = {
        one: {other: 1 / (1 + max(degrees[one], degrees[other])) for other in others}
        for one, others in neighbours.items()
    }
    return {one: {one: 1 - sum(row.values()), **row} for one, row in weights.items()}


class Neighbours(LocalSGD):
    """After every step average with all neighbours of a graph, all workers in the same moment (D-PSGD, Lian 2017).

    To compare :class:`Gossip` with: everybody waits for its neighbours in every step, and a lost worker ends the run.
    Every model counts by the graph alone, as published, so that shares should be equal. The state of the optimizer is
    each worker's own. At the end of the loop, and in ``run.consensus()``, the model is the average of all.
    """

    def __init__(self, graph: Graph = Ring()) -> None:  # noqa: B008 (it is immutable)
        super().__init__(1)
        self.graph = graph
        if not callable(getattr(graph, "neighbours", None)) or isinstance(graph, type):
            raise SettingError(f"graph ({graph!r}) must be a graph, such as gossip.Complete() or gossip.Ring()")

    def __repr__(self) -> str:
        return f"Neighbours({self.graph!r})"

    def refuse(self, roles: dict[str, object], always: bool, local_data: bool) -> None:
        """What compares gradients."""
        refuse_comparing(roles, always, "under Neighbours each hears of its neighbours alone")

    def attach(self, fleet: Fleet, replica: Replica, probe: Probe) -> None:
        """Begin to serve a run."""
        if fleet.size == 1:
            raise SettingError("Neighbours needs at least two workers; start more, or leave sync out")
        self._weights = metropolis(self.graph.neighbours(range(fleet.size)))[fleet.rank]
        self._table = NotesTable(fleet.rank, fleet.size)
        super().attach(fleet, replica, probe)

    def _end_round(self, note: Note, step: int) -> Meeting:
        self.fleet.doing(step, "averaging with neighbours")
        meeting = self._tell(note, f"the notes of step {step}")
        self._mix(f"the models of neighbours after step {step}")
        self._begin_round()
        if ends(meeting.notes):
            self.bytes_sent += self.merge.equalise(1.0, float(self.fleet.size))
            self._round.weight = 0.0
        else:
            self._round.weight = self._round.scale  # the models differ, and each counts as much as the others
        return meeting

    def _tell(self, note: Note, what: str) -> Meeting:
        numbers = np.empty(self._table.numel)
        self._table.own = note
        self._table.write(numbers)
        summed = torch.from_numpy(numbers).to(self.fleet.device)
        self.fleet.all_reduce(summed, what)
        self._table.read(summed.cpu().numpy())
        return Meeting(self._table.all)

    @torch.no_grad()
    def _mix(self, what: str) -> None:
        """x_i = sum_j W_ij x_j over this worker and its neighbours, in order of their ranks."""
        fleet, parameters = self.fleet, [p.detach() for p in self.merge.parameters]
        own = torch.cat([p.reshape(-1).float() for p in parameters]).to(fleet.device)
        others = sorted(set(self._weights) - {fleet.rank})
        splits = [len(own) if rank in others else 0 for rank in range(fleet.size)]
        sent = own.repeat(len(others))
        received = torch.empty_like(sent)
        fleet.wait(lambda: dist.all_to_all_single(received, sent, splits, splits, async_op=True), what)
        self.bytes_sent = sent.nbytes
        rows = dict(zip(others, received.view(len(others), -1), strict=True))
        rows[fleet.rank] = own
        mixed = torch.zeros_like(own)
        for rank in sorted(rows):
            mixed.add_(rows[rank], alpha=self._weights[rank])
        parts = torch.split(mixed, [p.numel() for p in parameters])
        assign(parameters, [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)])
