"""Every error that Paceline raises on purpose.

::

    PacelineError
    ├── SettingError          an argument is wrong (also a ValueError)
    ├── LoopError             the training loop was written in a way that cannot be right
    ├── NonFiniteLoss         a worker's loss is NaN or infinite
    ├── FleetError            something between the workers
    │   ├── WorkerLost        a worker died, froze, failed or left while others waited for it
    │   └── WorkersDisagree   the workers were given different models, data or settings
    ├── CheckpointError       a checkpoint cannot be written, or is not one, or is damaged
    ├── DataMissing           a data file is not on this machine
    └── LabError              the lab cannot build or take down its cluster

    Interrupted               Ctrl-C or SIGTERM, after all workers have stopped together (a SystemExit)
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DataMissing",
    "FleetError",
    "Interrupted",
    "LabError",
    "LoopError",
    "NonFiniteLoss",
    "PacelineError",
    "SettingError",
    "WorkerLost",
    "WorkersDisagree",
]


class PacelineError(Exception):
    """The root of Paceline's errors: catch this one to catch them all."""


class SettingError(PacelineError, ValueError):
    """An argument is wrong; the message says which, why, and what to write instead."""


class LoopError(PacelineError, RuntimeError):
    """The training loop misses a call, or makes one at the wrong place."""


class NonFiniteLoss(PacelineError, ArithmeticError):
    """The loss of one or more workers is NaN or infinite; raised on all workers, for the same step."""


class FleetError(PacelineError, RuntimeError):
    """Something between the workers failed."""


class WorkerLost(FleetError):
    """A worker died, froze, failed or left while this one waited for it.

    ``ranks`` are the workers that were missing (empty if that could not be found out), ``waited_for`` says
    what for, ``seconds`` how long.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...], waited_for: str, seconds: float) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.waited_for = waited_for
        self.seconds = seconds


class WorkersDisagree(FleetError):
    """The workers do not agree on what they train, on which data, or on the plan."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint could not be written, or what was found is not a sound one."""


class DataMissing(PacelineError, FileNotFoundError):
    """A data file is not on this machine; the message says how to get it."""


class Interrupted(SystemExit):
    """Ctrl-C or SIGTERM arrived and all workers stopped after the same step.

    It is a ``SystemExit``, so a script ends without a traceback and with the shell's usual code (130 or 143).
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number


class LabError(PacelineError, RuntimeError):
    """The lab lacks something that it needs, is in use, or could not build or take down its cluster."""
