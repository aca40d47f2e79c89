"""What all workers do together in the middle of a loop: to evaluate, or to save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import LoopError
from paceline.fleet import Fleet
from paceline.loop import Loop
from paceline.machinery import Machinery
from paceline.roles import Sync

__all__ = ["come_together", "lend_average", "refuse_in_consensus", "refuse_within_a_round"]


@contextmanager
def lend_average(loop: Loop, parts: Machinery) -> Iterator[None]:
    """The model is the average of all workers' for as long as it lasts."""
    with parts.clock.stopped():
        come_together(loop, parts.fleet, parts.sync, "run.consensus")
        with parts.sync.consensus():
            before, parts.lent = parts.lent, True
            try:
                yield
            finally:
                parts.lent = before


def refuse_in_consensus(parts: Machinery, call: str, instead: str) -> None:
    """What a consensus lends is taken back at its end, and this worker's own model is not there meanwhile."""
    if parts.lent:
        raise LoopError(
            f"{call} was called inside of run.consensus(), where the model is the average of all workers and each gets "
            f"its own back at the end; {instead}"
        )


def refuse_within_a_round(loop: Loop, call: str) -> None:
    """Where every worker goes at its own pace, there is no place where all are at once."""
    loop.absence.settle()
    if loop.pace.hand is not None:
        raise LoopError(
            f"{call} was called in the middle of a round in which every worker does its own number of steps, so that "
            "they would not come here together; call it in the steps where step.round is not None, which are the same "
            "on all workers"
        )


def come_together(loop: Loop, fleet: Fleet, sync: Sync, call: str) -> None:
    """Wait for all. One that has left the loop waits in another exchange: not to be met there by mistake."""
    if loop.current is not None and sync.waits_for_leavers:
        fleet.doing(loop.current.index, f"waiting for the others to call {call}, which all workers must do")
        fleet.gather(b"", f"the others to call {call}, which all workers must do")
