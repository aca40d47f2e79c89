"""A time line of every worker, for Perfetto."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable
from itertools import accumulate

import msgspec

from paceline.errors import SettingError
from paceline.events import Ended, Event, Gossiped, Remark, Resumed, Saved, Started, StepDone
from paceline.record.appending import AppendFile

__all__ = ["Trace", "consecutive", "step_entries"]

_PHASES = ("load", "compute", "wait", "communicate")
_THREAD = 1  # Perfetto reads thread 0 as "not given"


class _StepArgs(msgspec.Struct):
    count: int
    batch: int
    epoch: int
    loss: float


class _Slice(msgspec.Struct, tag_field="ph", tag="X", omit_defaults=True):
    name: str
    pid: int
    tid: int
    ts: int
    dur: int
    args: _StepArgs | None = None


class _Counter(msgspec.Struct, tag_field="ph", tag="C"):
    name: str
    pid: int
    ts: int
    args: dict[str, float]


class _Instant(msgspec.Struct, tag_field="ph", tag="i"):
    name: str
    pid: int
    ts: int
    s: str
    args: Event


class _Name(msgspec.Struct, tag_field="ph", tag="M"):
    name: str
    pid: int
    args: dict[str, str]


def _worker_name(rank: int) -> _Name:
    return _Name("process_name", rank, {"name": f"worker {rank}"})


# A closed array ends with an entry that no comma follows: a name, because giving one again changes nothing.
_FOOTER = msgspec.json.encode(_worker_name(0)) + b"]\n"


class Trace:
    """Writes the trace-event format: open the file at https://ui.perfetto.dev or ``chrome://tracing``.

    Each worker is a process with its steps, and in each step what the time went to, one after the other: load, compute,
    wait, communicate; what is left belongs to none of them (the optimizer, evaluation, your own code). The real order
    within a step is finer, as loading and computing alternate by micro-batch: the slices show how much, not when.
    All workers' steps begin when rank 0's do. Batch and loss are counter tracks; under ``sync.Gossip`` so are members,
    exchanges, bytes sent and the distance of the models, as far as the worker whose record it is knows them.

    The file is a JSON array. A killed run leaves it without its end, which the viewers accept; going on with the same
    path, as a resumed run does, repairs it. Beyond ``limit_megabytes`` (a viewer gets slow long before a disk gets
    full) steps are left out: the trace says so, and a warning does.
    """

    patient = True

    def __init__(self, path: str | os.PathLike[str], *, limit_megabytes: float = 256) -> None:
        if not limit_megabytes > 0:
            raise SettingError(f"limit_megabytes ({limit_megabytes}) must be above zero; leave Trace out instead")
        self._file = AppendFile(path, "a trace", signature=b"[\n", header=b"[\n", footer=_FOOTER)
        self._limit = limit_megabytes * 1e6
        self._encode = msgspec.json.Encoder().encode
        self._named = 0
        self._end = 0  # microseconds: no step begins before
        self._full = False

    def record(self, event: Event) -> None:
        """Add the slices and marks of one event."""
        match event:
            case StepDone():
                if not self._full:
                    self._step(event)
            case Gossiped():
                if not self._full:
                    self._write(gossip_entries(event))
            case Started():
                self._write(self._new_names(event.workers))
            case Remark():
                self._mark(event.text, event)
            case Saved():
                self._mark(f"saved after step {event.step}", event)
            case Resumed():
                self._mark(f"resumed at step {event.step}", event)
            case Ended():
                self._mark(f"ended: {event.reason}", event)

    def close(self) -> None:
        """End the array, so that every JSON reader takes the file; an event that comes later opens it again."""
        self._file.close()

    def _step(self, event: StepDone) -> None:
        stop = max(_microseconds(event.time), self._end)
        start = max(stop - _microseconds(event.seconds), self._end)  # clocks are set, but steps must not overlap
        self._end = stop
        self._write(self._new_names(len(event.counts)) + step_entries(event, start, stop))
        if self._file.size > self._limit:
            self._full = True
            self._mark("the trace is full: later steps are not in it", event)
            warnings.warn(
                f"the trace {self._file.path} has reached {self._limit / 1e6:g} MB: steps after {event.step} are left "
                f"out of it; raise limit_megabytes to get more",
                RuntimeWarning,
                stacklevel=3,
            )

    def _new_names(self, workers: int) -> list[msgspec.Struct]:
        new = range(self._named, workers)
        self._named = max(self._named, workers)
        return [_worker_name(rank) for rank in new]

    def _mark(self, name: str, event: Event) -> None:
        self._write([_Instant(name, 0, _microseconds(event.time), "p", event)])

    def _write(self, entries: list[msgspec.Struct]) -> None:
        if entries:
            # Encoding the list at once is faster than one by one; its brackets are not wanted, the file has its own.
            self._file.write(self._encode(entries)[1:-1] + b",\n")


def gossip_entries(event: Gossiped) -> list[msgspec.Struct]:
    """What was exchanged since the last time, as counters."""
    values: dict[str, dict[str, float]] = {
        "members": {"taking part": event.members},
        "exchanges": {"done": event.exchanges, "refused": event.refusals, "failed": event.timeouts},
        "bytes": {"sent": event.bytes_sent},
    }
    if event.distance is not None:
        values["distance"] = {"of a model from the mean": event.distance}
    return [_Counter(name, 0, _microseconds(event.time), args) for name, args in values.items()]


def step_entries(event: StepDone, start: int, stop: int) -> list[msgspec.Struct]:
    """The trace of one step that lasted from ``start`` to ``stop``, in microseconds."""
    entries: list[msgspec.Struct] = [_Counter("batch", 0, start, {"examples": event.batch})]
    if math.isfinite(event.loss):
        entries.append(_Counter("loss", 0, start, {"mean": event.loss}))
    name = f"step {event.step}"
    communicate = event.communicate_seconds
    times = zip(event.counts, event.load_seconds, event.compute_seconds, event.wait_seconds, strict=True)
    for rank, (count, load, compute, wait) in enumerate(times):
        args = _StepArgs(count, event.batch, event.epoch, event.loss)
        entries.append(_Slice(name, rank, _THREAD, start, stop - start, args))
        begin = start
        for phase, end in zip(_PHASES, consecutive(start, stop, (load, compute, wait, communicate)), strict=True):
            if end > begin:
                entries.append(_Slice(phase, rank, _THREAD, begin, end - begin))
                begin = end
    return entries


def consecutive(start: int, stop: int, seconds: Iterable[float]) -> list[int]:
    """Lay times out one after the other from ``start``: where each ends, in microseconds, none beyond ``stop``."""
    return [min(stop, start + int(total * 1e6)) for total in accumulate(seconds)]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
