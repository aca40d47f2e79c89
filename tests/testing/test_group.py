"""Real workers, real faults, at the very step that was asked for."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.errors import SettingError
from paceline.testing import Workers
from tests.testing import jobs


def did(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"did (\d+)", output)]


def test_a_worker_is_killed_at_its_step_and_no_other_is(workers: Workers) -> None:
    group = workers(jobs.count, 20, size=2)
    group.at(step=7, worker=1).kill()
    outcome = group.wait(60)
    well, killed = outcome.endings
    assert (well.code, did(well.output)) == (0, list(range(20)))
    assert (killed.code, did(killed.output)) == (-signal.SIGKILL, list(range(7)))
    assert killed.faults == ("kill worker 1 at step 7 (computing)",)
    outcome.check_survivors([0])


def test_a_frozen_worker_need_not_end(workers: Workers) -> None:
    group = workers(jobs.count, 20, size=2)
    group.at(step=7, worker=1).freeze()
    outcome = group.wait(60)
    assert outcome.endings[1].code is None
    assert did(outcome.endings[1].output) == list(range(7))
    outcome.check_survivors([0])


def test_a_worker_that_is_frozen_for_a_while_goes_on(workers: Workers) -> None:
    group = workers(jobs.count, 10, size=1)
    for step in (3, 5):
        group.at(step=step, worker=0).freeze(seconds=0.2)
    outcome = group.wait(60)
    outcome.check_survivors([0])
    assert len(outcome.endings[0].faults) == 2
    assert outcome.endings[0].seconds > 0.4  # it stood still twice; no load can make it less


def test_a_signal_reaches_the_worker_at_its_step_and_all_its_children(workers: Workers) -> None:
    group = workers(jobs.count_with_children, 5, size=1)
    group.at(step=2, worker=0).signal(signal.SIGTERM)
    group.at(step=4, worker=0, delay=0.2).kill()
    (ending,) = group.wait(60).endings
    assert ending.code == -signal.SIGKILL
    assert did(ending.output) == list(range(5))  # the delayed fault has let it go on
    assert ending.output.count("child got SIGTERM") == 2
    assert ending.output.index("did 1") < ending.output.index("worker got SIGTERM") < ending.output.index("did 2")


def test_a_run_tells_its_stages(workers: Workers) -> None:
    """Without other workers, too: the fleet of one has no watch."""
    group = workers(jobs.run, 6, size=1)
    group.at(step=1, worker=0).mark()
    group.at(step=2, worker=0, stage="averaging gradients").mark()
    group.at(step=3, worker=0, stage="updating").kill()
    (ending,) = group.wait(60).endings
    assert did(ending.output) == [0, 1, 2]
    assert len(ending.faults) == 3


def test_a_lost_worker_of_a_run_is_detected(workers: Workers) -> None:
    group = workers(jobs.run, 1000, size=3)
    group.at(step=4, worker=1).kill()
    outcome = group.wait(60)
    outcome.check_detected(within=15, error="WorkerLost", says=r"rank 1 (ended|gave no sign of life)")
    assert outcome.survivors == ()


def test_a_function_ends_as_a_script_does(workers: Workers) -> None:
    """What ``atexit`` has to do is done, so that the other worker hears what was raised."""
    group = workers(jobs.run_unclosed, 100, size=2)
    group.at(step=1, worker=1, stage="updating").mark()
    outcome = group.wait(60)
    outcome.check_detected(within=15, error="WorkerLost", says="rank 1 raised ValueError: the second worker does not")


def test_plain_ddp_with_equal_models(workers: Workers) -> None:
    alone = workers(jobs.ddp, 5, size=1).wait(60)
    together = workers(jobs.ddp, 5, size=2).wait(60)
    together.check_survivors([0, 1])
    together.check_same_digest(alone)  # both workers have the same data, and (a + a) / 2 is a, to the bit
    with pytest.raises(AssertionError, match="the digest of worker 0 of other outcome 1 is"):
        together.check_same_digest(workers(jobs.ddp, 4, size=1).wait(60))


def test_plain_ddp_with_a_dead_worker(workers: Workers) -> None:
    group = workers(jobs.ddp, 1000, size=2)
    group.at(step=5, worker=1).kill()
    group.wait(60).check_detected(within=20, error="RuntimeError")


def test_different_models_are_told_from_each_other(workers: Workers) -> None:
    outcome = workers(jobs.diverge, size=2).wait(60)
    outcome.check_survivors([0, 1])
    with pytest.raises(AssertionError, match=r"the digest of worker 0 is \w{12}…\nthe digest of worker 1 is"):
        outcome.check_same_digest()


SCRIPT = """
import os, sys
from paceline.testing import reached
for step in range(5):
    reached(step, "my stage")
    print("did", step, os.environ["COLOUR"], sys.argv[1:])
"""


def test_a_command(workers: Workers, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    group = workers([sys.executable, str(script), "--lr", "3"], size=1, environment={"COLOUR": "blue"})
    group.at(step=3, worker=0, stage="my stage").kill()
    (ending,) = group.wait(60).endings
    assert ending.code == -signal.SIGKILL
    assert ending.output.splitlines() == [f"did {step} blue ['--lr', '3']" for step in range(3)]


def test_a_command_has_the_variables_of_torchrun(workers: Workers) -> None:
    outcome = workers(["env"], size=2, environment={"COLOUR": "blue"}).wait(30)
    outcome.check_survivors([0, 1])
    for rank, ending in enumerate(outcome.endings):
        found = dict(line.split("=", 1) for line in ending.output.splitlines() if "=" in line)
        assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == (str(rank), "2", str(rank))
        assert found["MASTER_ADDR"] == "127.0.0.1"
        assert found["COLOUR"] == "blue"


def test_a_fault_that_could_not_happen_is_an_error(workers: Workers) -> None:
    group = workers(jobs.count, 5, size=2)
    group.at(step=3, worker=0).mark()
    group.at(step=5, worker=1).kill()
    with pytest.raises(SettingError) as caught:
        group.wait(60)
    message = str(caught.value)
    assert "the run ended before this could happen: kill worker 1 at step 5 (computing); the worker" in message
    assert "did 4" in message


def test_a_delayed_fault_that_came_too_late_is_an_error(workers: Workers) -> None:
    group = workers(jobs.count, 5, size=1)
    group.at(step=3, worker=0, delay=30).kill()
    with pytest.raises(SettingError, match="kill worker 0 30 s after step 3"):
        group.wait(60)


def test_a_worker_that_need_not_end_meets_with_its_fault_all_the_same(workers: Workers) -> None:
    group = workers(jobs.count_with_children, 5, size=2)
    group.at(step=2, worker=0, delay=0.1).kill()
    killed, other = group.wait(60, besides=[0, 1]).endings
    assert (killed.code, other.code) == (-signal.SIGKILL, None)


def test_a_function_that_cannot_be_imported_is_told_in_the_output(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("only_here")
    exec("def job(): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    (ending,) = workers(module.job, size=1).wait(60).endings
    assert ending.code == 1
    assert "No module named 'only_here'" in ending.output
