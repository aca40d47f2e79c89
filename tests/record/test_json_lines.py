from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from paceline import record
from paceline.errors import PacelineError, SettingError
from paceline.events import Event, Measured, StepDone
from paceline.records import GradientStats

from .fake import one_of_each, step


def written(path: Path, events: list[Event]) -> Path:
    recorder = record.JsonLines(path)
    for event in events:
        recorder.record(event)
    recorder.close()
    return path


def test_every_event_comes_back_as_it_was(tmp_path: Path) -> None:
    events = one_of_each()
    path = written(tmp_path / "events.jsonl", events)
    assert list(record.read(path)) == events
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


def test_no_event_is_forgotten() -> None:
    known = {kind for kind in Event.__subclasses__() if kind.__module__ == "paceline.events"}
    assert set(get_args(record.AnyEvent)) == known
    assert {type(event) for event in one_of_each()} == known


def test_what_is_not_a_number_becomes_null_and_is_read_as_nan(tmp_path: Path) -> None:
    stats = GradientStats(units=1, weight=64.0, variance=math.nan, mean_sqnorm=1.0)
    path = written(
        tmp_path / "events.jsonl",
        [
            step(0, loss=math.inf, wait=[0.0, math.nan], stats=stats),
            step(1, loss=math.nan),
            Measured(1.0, 2, {"a": -math.inf, "b": 1.0}),
        ],
    )

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    first, second, third = record.read(path)
    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert isinstance(third, Measured)
    assert math.isnan(first.loss)
    assert first.wait_seconds[0] == 0.0
    assert math.isnan(first.wait_seconds[1])
    assert first.stats is not None
    assert math.isnan(first.stats.variance)
    assert first.stats.mean_sqnorm == 1.0
    assert math.isnan(second.loss)
    assert second.stats is None  # a null that may be one stays one
    assert math.isnan(third.values["a"])
    assert third.values["b"] == 1.0


@pytest.mark.parametrize("torn", [b'{"ty', b'{"type":"StepDone","time":17', b"\0" * 100_000])
def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = written(tmp_path / "events.jsonl", [step(0), step(1)])
    with path.open("ab") as file:
        file.write(torn)
    assert list(record.read(path)) == [step(0), step(1)]
    written(path, [step(2)])
    assert list(record.read(path)) == [step(0), step(1), step(2)]


def test_a_file_that_is_only_a_torn_line_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type"')
    assert list(record.read(written(path, [step(0)]))) == [step(0)]


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"type":"StepDone","ti\n',
        b'{"type":"Unheard","time":1.0}\n',
        b'{"type":"Ended","time":1.0,"step":null,"examples":1,"reason":"done"}\n',
        b"\n",
        b"[]\n",
        b'{"type":"Ended","time":1.0,"step":1,"examples":1,"reason":"\xff"}\n',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damaged: bytes) -> None:
    path = written(tmp_path / "events.jsonl", [step(0)])
    with path.open("ab") as file:
        file.write(damaged)
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[0])
    events = record.read(path)
    assert next(events) == step(0)
    with pytest.raises(PacelineError, match=r"events\.jsonl, line 2 is not an event"):
        next(events)


def test_an_event_after_close_is_kept(tmp_path: Path) -> None:
    recorder = record.JsonLines(tmp_path / "events.jsonl")
    for number in range(3):
        recorder.record(step(number))
        recorder.close()
        recorder.close()
    assert list(record.read(tmp_path / "events.jsonl")) == [step(0), step(1), step(2)]


def test_folders_are_made_and_bad_paths_refused(tmp_path: Path) -> None:
    written(tmp_path / "a" / "b" / "events.jsonl", [step(0)])
    with pytest.raises(SettingError, match=r"cannot write events to .*events\.jsonl/x \(Not a directory\)|File exists"):
        record.JsonLines(tmp_path / "a" / "b" / "events.jsonl" / "x")
    with pytest.raises(SettingError, match="Is a directory"):
        record.JsonLines(tmp_path)
    with pytest.raises(SettingError, match=r"cannot read events from .*missing"):
        list(record.read(tmp_path / "missing"))


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work, no newline at the end")
    with pytest.raises(SettingError, match=r"thesis\.txt exists and does not hold events"):
        record.JsonLines(path)
    assert path.read_text() == "years of work, no newline at the end"


def test_a_full_disk_warns_once_and_the_run_goes_on() -> None:
    recorder = record.JsonLines("/dev/full")
    with pytest.warns(RuntimeWarning, match=r"events \(/dev/full\) cannot be written .*No space left"):
        recorder.record(step(0))
    recorder.record(step(1))  # a second warning would be an error here
    recorder.close()


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path) -> None:
    # A limit on the size of files makes the kernel write a part of a line and refuse the rest, as a full disk does.
    program = """
import resource, sys
from paceline import record
from paceline.events import Ended
recorder = record.JsonLines(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(100):
    recorder.record(Ended(1.0, number, number, "done"))
recorder.close()
print("trained to the end")
"""
    path = tmp_path / "events.jsonl"
    child = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert child.stdout == "trained to the end\n"
    assert child.stderr.count("cannot be written any more (File too large)") == 1
    assert path.stat().st_size == 1000  # so the last line is torn: 1000 is no multiple of a line
    events = list(record.read(path))
    assert [event.step for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert len(events) > 10


def test_a_killed_writer_loses_at_most_the_last_line(tmp_path: Path) -> None:
    program = """
import os, sys
from paceline import record
from paceline.events import Ended
recorder = record.JsonLines(sys.argv[1])
for number in range(10**9):
    recorder.record(Ended(1.0, number, number, "x" * (number % 5000)))
    if number >= 100:
        os.write(1, b"%d\\n" % number)
"""
    path = tmp_path / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        told = child.stdout.read().split()
    last_told = int(told[-1]) if told else 100
    events = list(record.read(path))
    assert [event.step for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert len(events) > last_told
    written(path, [step(0)])
    assert list(record.read(path)) == [*events, step(0)]
