"""How many examples fit into the memory of this worker at once, as far as that was found out."""

from __future__ import annotations

import warnings

import msgspec
import torch

from paceline.errors import PacelineError
from paceline.records import Plan

__all__ = ["Memory", "advise", "ran_out"]


class Memory:
    """The largest micro-batch of this worker: what a plan asks for, until that did not fit."""

    def __init__(self, in_pieces: bool) -> None:
        self._in_pieces = in_pieces
        self.most = 0
        """Examples; 0 as long as everything has fitted."""

    @property
    def largest_share(self) -> int:
        """What the balance should give at most; 0 for any number, since shares are done in pieces anyway."""
        return 0 if self._in_pieces else self.most

    def fit(self, plan: Plan) -> Plan:
        """The plan with pieces of which each should fit."""
        if not self.most or self.most >= plan.micro:
            return plan
        return msgspec.structs.replace(plan, micro=self.most)

    def shrink(self, examples: int, step: int) -> None:
        """So many did not fit: try half of them."""
        self.most = examples // 2
        warnings.warn(
            f"{examples} examples at once are too many for this worker's memory (step {step}); the step is done again "
            f"with at most {self.most}",
            stacklevel=5,
        )
        if torch.cuda.is_available():  # not exercised by the tests, which have no GPU
            torch.cuda.empty_cache()


def advise(error: BaseException) -> None:
    """Tell the user of a step that did not fit that there is a remedy."""
    if ran_out(error):
        error.add_note(
            "Paceline can do a step that does not fit into the memory again in smaller pieces: put the whole body of "
            "the loop over its micro-batches into `with step.attempt():`, or give Run a smaller micro"
        )


def ran_out(error: BaseException) -> bool:
    """Whether memory is what was missing: on a GPU, or on the CPU, where torch has no error of its own for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Not what another worker has told us.
    told = str(error) if isinstance(error, RuntimeError) and not isinstance(error, PacelineError) else ""
    return any(words in told for words in ("can't allocate memory", "out of memory", "ALLOC_FAILED"))
