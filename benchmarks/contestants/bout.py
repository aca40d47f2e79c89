"""One training of one contestant: how it is started, how it ends, and what it is worth."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.contestants import Contestant
from benchmarks.contestants.job import Settings
from benchmarks.contestants.judge import Disqualified, Lost, judge, speed
from benchmarks.contestants.launch import ROOT, Outcome, run_workers
from benchmarks.contestants.race import KILLED

__all__ = ["Bout", "command_of", "resources"]

GRACE = 120.0  # seconds that a contestant may need for everything but training: imports, connections, parting
PATIENCE, PAUSE = 3600.0, 5.0  # seconds to wait for another lab, and between two attempts
IN_USE = "a lab is already running"
RESTARTS = 3
AGAIN, ALONE = "benchmarks.contestants.again", "benchmarks.contestants.alone"


class Bout:
    """The trainings with one seed, one after the other, each in a folder that is gone afterwards."""

    def __init__(
        self,
        settings: Settings,
        target: float,
        evaluate: Callable[[Tensor], float],
        cluster: str,
        workers: int,
        alone: float,
        folder: Path,
    ) -> None:
        self._settings, self._target, self._evaluate = settings, target, evaluate
        self._cluster, self._workers, self._folder = cluster, workers, folder
        self._seconds_alone = alone
        self._alone: float | None = None

    def let(self, contestant: Contestant, seconds: float) -> dict[str, Any]:
        """Let one contestant train for so long, and judge it."""
        if not python_of(contestant).exists():
            place = f".peers/{contestant.environment}"
            return {"failed": f"not installed: there is no {place}; run `make peers`", "unstarted": True}
        before = self._measure() if self._alone is None else self._alone  # of the contestant before: just now
        found = self._train(contestant, replace(self._settings, seconds=seconds))
        self._alone = self._measure()
        if "failed" in found:
            return found
        rate = found["examples_per_second"]
        # Speeds of a machine change from hour to hour, so both are measured beside the training.
        efficiency = 2 * rate / (before + self._alone) if self._seconds_alone else None
        return {**found, "efficiency": efficiency, "alone_before": before, "alone_after": self._alone}

    def _train(self, contestant: Contestant, settings: Settings) -> dict[str, Any]:
        spare = settings.lost
        lost = None if spare is None else Lost(spare, settings.lost_at)
        self._folder.mkdir()
        try:
            outcome = self._run(command_of(contestant, self._folder, unreliable=lost is not None), settings, spare)
            killed = (self._folder / KILLED).exists()
            if outcome.failure and not outcome.workers:  # the lab's, not the contestant's
                return {"failed": outcome.failure, "unstarted": True}
            if outcome.failure and not killed:
                return {"failed": outcome.failure}
            if lost and not killed:
                return {"failed": "the worker that was to be killed lived on"}
            workers = self._workers if self._cluster == "local" else len(outcome.workers)
            verdict = judge(self._folder / "snapshots", workers, self._target, self._evaluate, lost)
        except Disqualified as error:
            return {"failed": str(error)}
        finally:
            shutil.rmtree(self._folder)
        died: dict[str, Any] = {}
        if outcome.failure:  # nothing came after it, in all the time that there was
            verdict = replace(verdict, seconds=settings.seconds)
            died = {"died": f"lost with the worker: {outcome.failure}"}
        rate = verdict.examples / verdict.seconds
        return {**asdict(verdict), "examples_per_second": rate, **resources(outcome, verdict.examples), **died}

    def _measure(self) -> float:
        """Examples per second of all workers together if none knows of the others; 0 if that is not asked for."""
        if not self._seconds_alone:
            return 0.0
        self._folder.mkdir()
        try:
            settings = replace(self._settings, seconds=self._seconds_alone, lost=None)
            outcome = self._run([sys.executable, "-m", ALONE, str(self._folder)], settings)
            if outcome.failure:
                raise RuntimeError(f"the workers could not train even alone: {outcome.failure}")
            return speed(self._folder / "snapshots", len(outcome.workers))
        finally:
            shutil.rmtree(self._folder)

    def _run(self, command: Sequence[str], settings: Settings, spare: int | None = None) -> Outcome:
        """Run the workers; as long as another lab has the machine, wait, rather than lose what was just trained."""
        settings.write(self._folder)
        end, limit = time.monotonic() + PATIENCE, settings.seconds + GRACE
        while True:
            outcome = run_workers(self._cluster, self._workers, command, self._folder, limit, spare)
            if outcome.workers or IN_USE not in (outcome.failure or "") or time.monotonic() > end:
                return outcome
            time.sleep(PAUSE)


def python_of(contestant: Contestant) -> Path:
    """Where its Python is."""
    return (
        ROOT / ".peers" / contestant.environment / "bin" / "python" if contestant.environment else Path(sys.executable)
    )


def command_of(contestant: Contestant, folder: Path, *, unreliable: bool) -> list[str]:
    """What every worker runs; where one is killed, those that can come back are started so that they do."""
    words, python = [contestant.module, str(folder), *contestant.arguments], str(python_of(contestant))
    if not unreliable or contestant.comes_back == "never":
        return [python, "-m", *words]
    if contestant.comes_back == "together":
        return [python, "-m", AGAIN, str(RESTARTS), *words]
    # Each worker is a machine with a launcher of its own, which knows its rank when it is started.
    own = f"--node-rank $RANK --nodes $WORLD_SIZE --at $MASTER_ADDR:$MASTER_PORT --invitation {folder}/invitation-$RANK"
    script = f'exec "$0" -m paceline run --independent --workers 1 --restarts {RESTARTS} {own} -m "$@"'
    return ["sh", "-c", script, python, *words]


def resources(outcome: Outcome, examples: int) -> dict[str, Any]:
    """What the workers used, by the launcher's count: everything since they were started, not training alone."""
    rows = outcome.workers
    sent = None if any(row["bytes_sent"] is None for row in rows) else sum(row["bytes_sent"] for row in rows)
    known = [row for row in rows if row["waiting_seconds"] is not None and row["wall_seconds"] > 0]
    waits = [row["waiting_seconds"] / row["wall_seconds"] for row in known]
    return {
        "bytes_sent": sent,
        "bytes_per_example": None if sent is None else sent / examples,
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
        "largest_wait": max(waits, default=None),
    }
