"""The worker's side of the harness: it tells how far it is, and waits until it may go on.

Standard library alone, and no effect at all in a process that no harness has started.
"""

from __future__ import annotations

import json
import os
import socket

from paceline.errors import PacelineError

__all__ = ["VARIABLE", "Line", "describe", "line", "reached"]

VARIABLE = "PACELINE_TESTING"
SECONDS = 60.0


class Line:
    """From a worker to the harness that has started it."""

    def __init__(self, description: str) -> None:
        self._path, self._worker, stops = json.loads(description)
        self._stops = {(step, stage) for step, stage in stops}

    def reached(self, step: int, stage: str) -> None:
        """If the harness wants to hear of this moment, tell it, and go on when it says so."""
        if (step, stage) in self._stops:
            self.tell(step=step, stage=stage)

    def tell(self, **message: object) -> None:
        """Send a message and wait, within limits, until the harness has acted on it."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to_harness:
                to_harness.settimeout(SECONDS)
                to_harness.connect(self._path)
                to_harness.send(json.dumps({"worker": self._worker, **message}).encode())
                answered = to_harness.recv(16)
        except TimeoutError:
            raise PacelineError(
                f"worker {self._worker} told its test {message} and got no answer within {SECONDS:g} s; call "
                "group.wait() soon after group.start()"
            ) from None
        except OSError as error:
            raise PacelineError(f"worker {self._worker} cannot reach the test that has started it: {error}") from error
        if not answered:
            raise PacelineError(f"the test that has started worker {self._worker} has ended")


def describe(path: str, worker: int, stops: list[tuple[int, str]]) -> str:
    """What the variable says to a worker: where to tell, who it is, and at which steps and stages it has to stop."""
    return json.dumps([path, worker, stops])


def line() -> Line | None:
    """The line to the harness; None in a process that was not started by one."""
    description = os.environ.get(VARIABLE)
    return None if description is None else Line(description)


def reached(step: int, stage: str = "computing") -> None:
    """Say in a training script without ``Run`` that this worker begins a step: faults for it happen now.

    Without a harness it does nothing. Scripts with ``Run`` need not call it.
    """
    if (to_harness := line()) is not None:
        to_harness.reached(step, stage)
