from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import record
from paceline.errors import SettingError
from paceline.events import Ended, Event, Resumed, Saved
from paceline.record.trace import consecutive

from .fake import START, gossiped, one_of_each, started, step

PHASES = {"load", "compute", "wait", "communicate"}


def trace(path: Path, events: list[Event]) -> list[dict[str, Any]]:
    recorder = record.Trace(path)
    for event in events:
        recorder.record(event)
    recorder.close()
    return load(path)


def load(path: Path) -> list[dict[str, Any]]:
    entries = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(entries, list)
    return entries


def slices(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["ph"] == "X"]


def assert_sound(entries: list[dict[str, Any]]) -> None:
    """Steps of a worker do not overlap, neither do phases, and every phase lies within a step."""
    tracks = defaultdict(list)
    for entry in slices(entries):
        assert isinstance(entry["ts"], int)
        assert isinstance(entry["dur"], int)
        assert entry["dur"] >= 0
        kind = "phase" if entry["name"] in PHASES else "step"
        tracks[entry["pid"], kind].append((entry["ts"], entry["ts"] + entry["dur"]))
    for track in tracks.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(track)))
    for (rank, kind), track in tracks.items():
        if kind == "phase":
            steps = tracks[rank, "step"]
            assert all(any(begin <= b and e <= end for begin, end in steps) for b, e in track)


def test_a_step_is_laid_out_from_its_start(tmp_path: Path) -> None:
    entries = trace(tmp_path / "trace.json", [started(), step(0, time=START + 0.01, loss=0.25)])
    begin = int(START * 1e6)
    of_worker_1 = [(e["name"], e["ts"] - begin, e["dur"]) for e in slices(entries) if e["pid"] == 1]
    assert of_worker_1 == [
        ("step 0", 0, 10_000),
        ("load", 0, 1000),
        ("compute", 1000, 4000),
        ("wait", 5000, 2000),
        ("communicate", 7000, 500),
    ]
    # A slice of no length says nothing: worker 0 did not wait.
    assert "wait" not in [e["name"] for e in slices(entries) if e["pid"] == 0]
    args = [e["args"] for e in slices(entries) if e["name"] == "step 0"]
    assert args == [{"count": count, "batch": 64, "epoch": 0, "loss": 0.25} for count in (48, 16)]
    names = {e["pid"]: e["args"]["name"] for e in entries if e["ph"] == "M"}
    assert names == {0: "worker 0", 1: "worker 1"}
    counters = {e["name"]: list(e["args"].values()) for e in entries if e["ph"] == "C"}
    assert counters == {"batch": [64], "loss": [0.25]}
    assert_sound(entries)


def test_exchanges_are_counters(tmp_path: Path) -> None:
    entries = trace(tmp_path / "trace.json", [started(), gossiped(START + 0.5)])
    counters = {e["name"]: (e["ts"] - int(START * 1e6), list(e["args"].values())) for e in entries if e["ph"] == "C"}
    expected = {"members": [4], "exchanges": [3, 1, 0], "bytes": [4000], "distance": [0.25]}
    assert counters == {name: (500_000, values) for name, values in expected.items()}


def test_what_happens_besides_steps_is_marked(tmp_path: Path) -> None:
    entries = trace(tmp_path / "trace.json", one_of_each())
    marks = [(e["name"], e["ts"]) for e in entries if e["ph"] == "i"]
    assert marks == [
        ("resumed at step 100", round((START + 1) * 1e6)),
        ("worker 1 is slow", round((START + 3) * 1e6)),
        ("saved after step 1", round((START + 4) * 1e6)),
        ("ended: done", round((START + 5) * 1e6)),
    ]


times = st.floats(0, 0.03)


@given(
    st.lists(
        st.tuples(st.floats(-0.05, 0.05), times, st.lists(st.tuples(times, times, times), min_size=1, max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_slices_never_overlap_whatever_the_clocks_say(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[float, float, list[tuple[float, float, float]]]],
) -> None:
    events: list[Event] = []
    now = START
    for number, (jump, seconds, workers) in enumerate(steps):
        now += seconds + jump
        load, compute, wait = zip(*workers, strict=True)
        counts = [1] * len(workers)
        events.append(step(number, time=now, seconds=seconds, counts=counts, load=load, compute=compute, wait=wait))
    entries = trace(tmp_path_factory.mktemp("trace") / "trace.json", events)
    assert_sound(entries)
    assert sum(e["name"].startswith("step") for e in slices(entries)) == sum(len(workers) for _, _, workers in steps)


def test_consecutive_keeps_within_the_step() -> None:
    assert consecutive(100, 1000, (0.0002, 0.0, 0.0003)) == [300, 300, 600]
    assert consecutive(100, 250, (0.0001, 0.0001, 0.0001)) == [200, 250, 250]


def test_a_loss_that_is_no_number_is_still_json(tmp_path: Path) -> None:
    entries = trace(tmp_path / "trace.json", [step(0, loss=math.nan), step(1, loss=math.inf)])
    assert [e["args"]["loss"] for e in slices(entries) if e["name"].startswith("step")] == [None] * 4
    assert not [e for e in entries if e["name"] == "loss"]


def test_a_killed_run_lacks_only_the_end_and_the_next_repairs_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recorder = record.Trace(path)
    recorder.record(started())
    recorder.record(step(0))
    left = path.read_bytes()  # what a killed process leaves: everything is with the operating system
    whole = json.loads(left.removesuffix(b",\n") + b"]")
    assert len(slices(whole)) == 9
    recorder.close()

    path.write_bytes(left + left.splitlines(keepends=True)[-1][:100])
    entries = trace(path, [Resumed(START + 1, 1, "c", 2), step(1)])
    assert [e["name"] for e in slices(entries) if e["name"].startswith("step")] == ["step 0"] * 2 + ["step 1"] * 2


def test_a_closed_trace_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recorder = record.Trace(path)
    recorder.close()
    assert slices(load(path)) == []
    for number in range(3):
        recorder.record(step(number))
        recorder.close()
        recorder.close()
        assert len([e for e in slices(load(path)) if e["name"].startswith("step")]) == 2 * (number + 1)
    trace(path, [Ended(START + 9, 3, 192, 'killed by "quotes"')])
    assert load(path)[-2]["name"] == 'ended: killed by "quotes"'


def test_a_full_trace_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recorder = record.Trace(path, limit_megabytes=0.002)
    recorder.record(step(0))
    with pytest.warns(RuntimeWarning, match="steps after 1 are left out.*raise limit_megabytes"):
        recorder.record(step(1))
    for number in range(2, 50):
        recorder.record(step(number))
    recorder.record(Saved(START + 1, 50, "c", 1, 0.1))
    recorder.close()
    entries = load(path)
    assert {e["name"] for e in slices(entries)} - PHASES == {"step 0", "step 1"}
    assert [e["name"] for e in entries if e["ph"] == "i"] == [
        "the trace is full: later steps are not in it",
        "saved after step 50",
    ]


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="limit_megabytes"):
        record.Trace(tmp_path / "trace.json", limit_megabytes=0)
    with pytest.raises(SettingError, match="No space left"):
        record.Trace("/dev/full")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SettingError, match="does not hold a trace"):
        record.Trace(tmp_path / "other.json")
