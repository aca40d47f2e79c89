"""What all workers do together in the middle of a loop: to evaluate, or to save."""

from __future__ import annotations

from paceline.errors import LoopError
from paceline.fleet import Fleet
from paceline.loop import Loop
from paceline.roles import Sync

__all__ = ["come_together", "refuse_within_a_round"]


def refuse_within_a_round(loop: Loop, call: str) -> None:
    """Where every worker goes at its own pace, there is no place where all are at once."""
    loop.settle()
    if loop.hand is not None:
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
