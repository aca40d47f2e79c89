"""When the loop is left early on one worker: the others are told, or met once more at the end of the round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.hooks import RemovableHandle

from paceline.machinery import Machinery
from paceline.step import Phase

if TYPE_CHECKING:
    from paceline.loop import Loop
    from paceline.run import Run

__all__ = ["Absence"]


class Absence:
    """This worker's, from the loop that the others are still in.

    Whether it was left by ``break`` or by an error cannot be seen at that moment. So who can be met is met when it
    matters: before anything that uses the model or the run (:meth:`settle`); if an error follows instead, the others
    get it.
    """

    def __init__(self, run: Run, loop: Loop) -> None:
        self._run, self._loop = run, loop
        self.lasts = False
        """Whether the others are still to be met."""
        self._handles: list[RemovableHandle] = []

    def begin(self, parts: Machinery) -> None:
        """The loop was left."""
        run, loop = self._run, self._loop
        if loop.current and loop.current.phase is Phase.APPLIED:
            loop.close_step(loop.current)
        loop.current = None
        # Who works alone may survive an error, and begin another loop: what it has used of its hand must count then.
        alone = loop.pace.hand is not None and run.fleet.size == 1
        if (parts.failure and not alone) or run.fleet.closed:
            return
        if not run.sync.waits_for_leavers:
            loop.tell_of_leaving()
            return
        module = run.replica.module
        self.lasts = True
        self._handles = [
            module.register_forward_pre_hook(lambda *_: self.settle()),
            module.register_state_dict_pre_hook(lambda *_: self.settle()),  # type: ignore[no-untyped-call]
        ]

    def settle(self) -> None:
        """If the loop was left: take part in what the others do until they end it, too."""
        if not self.lasts:
            return
        self._end()
        try:
            self._loop.meet_the_others()
        finally:
            self._loop.forget_round()

    def give_up(self) -> None:
        """An error is why the loop was left: there is nobody to be met."""
        self._end()
        self._loop.forget_round()

    def _end(self) -> None:
        self.lasts = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
