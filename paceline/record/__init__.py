"""Recorders: what keeps and shows the events of a run.

A run hands every event to each of its recorders, on rank 0, under Gossip on every worker; :func:`folder` gives the
usual set of them. With up to four workers and steps of 10 ms, all together take less than 0.1 ms of processor time per
step; the trace adds about 5 microseconds for every further worker. A recorder that cannot be opened is an error; one
that fails later (a full disk, a closed pipe) warns once, and the training goes on without it.
"""

from __future__ import annotations

from paceline.record.console import Console
from paceline.record.folder import folder
from paceline.record.json_lines import AnyEvent, JsonLines, read
from paceline.record.summary import Summary, WorkerSummary, summary, table
from paceline.record.tensorboard import TensorBoard
from paceline.record.trace import Trace

__all__ = [
    "AnyEvent",
    "Console",
    "JsonLines",
    "Summary",
    "TensorBoard",
    "Trace",
    "WorkerSummary",
    "folder",
    "read",
    "summary",
    "table",
]
