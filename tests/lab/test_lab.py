"""Real clusters, built and taken down; what happens to them while a command runs."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from paceline.errors import LabError, SettingError
from paceline.lab import Cluster, Lab, Report, read_cluster, run_workers
from paceline.lab.cgroups import find_hierarchy
from paceline.lab.lab import check_command
from paceline.lab.network import namespaces
from paceline.lab.remains import HOSTS, clean, only_lab, remains
from tests.lab.needs import needs_lab

pytestmark = needs_lab

ON_TIME = 0.2  # seconds: the promise for events


def cluster(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def run(tmp_path: Path, text: str, *command: str, limit: float = 60.0) -> tuple[Report, dict[str, list[str]]]:
    """Run a command in a cluster; the report, and what each worker wrote."""
    described = cluster(tmp_path, text)
    said: dict[str, list[str]] = {name: [] for name in ("lab", *(worker.name for worker in described.workers))}
    with Lab(described) as lab:
        report = run_workers(lab, command, show=lambda name, line: said[name].append(line), limit=limit)
    assert_nothing_is_left()
    return report, said


def assert_nothing_is_left() -> None:
    assert remains() == []
    assert not HOSTS.exists()
    assert not any((root / "paceline-lab").exists() for root in find_hierarchy().roots)


def interfaces() -> str:
    return subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout


TWO = """
[[worker]]
cpu = 0.4
rate = "50mbit"
count = 2
"""


def test_every_worker_is_a_machine_of_its_own(tmp_path: Path) -> None:
    before = interfaces()
    script = "hostname; echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $GLOO_SOCKET_IFNAME; "
    script += "getent hosts w1; ip -br addr show dev eth0; ip -br link; grep paceline /proc/self/cgroup"
    report, said = run(tmp_path, TWO, "sh", "-c", script)
    assert report.exit == 0
    for rank, name in enumerate(("w0", "w1")):
        host, variables, _, own, *rest = said[name]
        assert host == name
        assert variables == f"{rank} 0 2 198.18.0.2 29500 eth0"
        assert f"198.18.0.{rank + 2}/16" in own
        assert re.findall(r"^(\S+)", "\n".join(rest), re.MULTILINE)[:2] == ["lo", rest[1].split()[0]]
        assert any(f"paceline-lab/w-{name}" in line for line in rest)
    assert said["w0"][2].split() == ["198.18.0.3", "w1"]
    assert interfaces() == before


def test_the_report(tmp_path: Path) -> None:
    """Worker 1 sends a known number of bytes to worker 0, and computes; worker 0 waits."""
    script = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("", 7000)) as server:
        stream, _ = server.accept()
        while stream.recv(1 << 20): pass
else:
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
    for _ in range(100):
        try:
            with socket.create_connection(("w0", 7000)) as stream: stream.sendall(bytes(4_000_000))
            break
        except ConnectionRefusedError: time.sleep(0.1)
"""
    described = cluster(tmp_path, TWO)
    folder = tmp_path / "out"
    with Lab(described) as lab:
        shown: list[str] = []
        run_workers(
            *(lab, [sys.executable, "-c", script]), show=lambda name, line: shown.append(line), folder=folder, limit=60
        )
    report = msgspec.json.decode((folder / "lab.json").read_bytes(), type=Report)
    first, second = report.workers
    assert (first.exit, second.exit) == (0, 0), shown
    # Headers of about 4 %; the interface counts large segments with one header.
    assert 4_000_000 < second.bytes_sent < 1.06 * 4_000_000
    assert 4_000_000 < first.bytes_received < 1.06 * 4_000_000
    assert second.cpu_seconds > 0.3
    assert second.throttled_seconds > 0  # 0.4 of a core
    assert first.waiting_seconds > 0.3  # for the other's computation, at least
    for worker in report.workers:
        parts = worker.cpu_seconds + worker.throttled_seconds + worker.waiting_seconds
        assert parts == pytest.approx(worker.wall_seconds, rel=0.05)
    assert (folder / "w1.log").exists()


@pytest.mark.parametrize(("script", "code"), [("exit $((RANK * 3))", 3), ("kill -9 $$", 137), ("true", 0)])
def test_the_exit_code_is_that_of_the_worker_that_failed(tmp_path: Path, script: str, code: int) -> None:
    assert run(tmp_path, TWO, "sh", "-c", script)[0].exit == code


def test_output_without_an_end_of_line_and_very_long_lines(tmp_path: Path) -> None:
    script = 'import os; print("x" * 3_000_000); print("end", end="")'
    report, said = run(tmp_path, TWO, sys.executable, "-c", script)
    assert report.exit == 0
    assert sum(len(line) for line in said["w0"]) == 3_000_003
    assert said["w0"][-1].endswith("end")


EVENTS = """
[[worker]]
cpu = 0.3
rate = "50mbit"
count = 4

[[event]]
at = 1.0
do = "freeze"
worker = "w1"

[[event]]
at = 1.2
do = "set"
worker = "w0"
cpu = 0.1
rate = "5mbit"

[[event]]
at = 1.5
do = "cut"
worker = "w0"

[[event]]
at = 2.0
do = "thaw"
worker = "w1"

[[event]]
at = 2.5
do = "restore"
worker = "w0"

[[event]]
at = 2.7
do = "start"
worker = "w3"

[[event]]
at = 3.0
do = "kill"
worker = "w2"

[[event]]
at = 99
do = "set"
worker = "w2"
cpu = 0.2
"""

# Worker 2 sends a datagram to worker 0 every 20 ms, which writes when it came, as worker 1 writes the time.
BEAT = """
import os, socket, subprocess, time
name, end = os.environ["PACELINE_LAB_WORKER"], time.time() + 4
wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
wire.bind(("", 7000)); wire.settimeout(0.1)
if name == "w3": print("beat", time.time(), flush=True); raise SystemExit
while time.time() < end:
    try:
        if name == "w0":
            wire.recv(10)
        elif name == "w2":
            wire.sendto(b"beat", ("w0", 7000))
        print("beat", time.time(), flush=True)
    except TimeoutError: pass
    if name != "w0": time.sleep(0.02)
if name == "w0":
    print(subprocess.run(["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout)
    print("quota", open("/sys/fs/cgroup/cpu/paceline-lab/w-w0/cpu.cfs_quota_us").read(), flush=True)
"""


def late_in(report: Report, said: dict[str, list[str]]) -> list[str]:
    """What was not done within 0.2 s of its time, by the lab's own report and by what the workers wrote."""
    *happened, _ = report.events
    late = [str(event) for event in happened if event.happened is None or not 0 <= event.happened - event.due < ON_TIME]
    beats = {
        # The last line of a worker that is killed may be torn.
        name: [float(line.split()[1]) - report.started for line in lines if line.startswith("beat ")]
        for name, lines in said.items()
    }
    for name, begin, end in (("w1", 1.0, 2.0), ("w0", 1.5, 2.5)):  # frozen, and cut off
        gap = max(itertools.pairwise(beats[name]), key=lambda pair: pair[1] - pair[0])
        if gap[0] != pytest.approx(begin, abs=ON_TIME) or gap[1] != pytest.approx(end, abs=ON_TIME):
            late.append(f"the longest gap of {name} is {gap}")
    if max(beats["w2"]) != pytest.approx(3.0, abs=ON_TIME):
        late.append(f"w2 was last heard at {max(beats['w2'])}")
    if report.workers[3].started != pytest.approx(2.7, abs=ON_TIME) or beats["w3"][0] <= 2.7:
        late.append(f"w3 was started at {report.workers[3].started} and heard at {beats['w3'][0]}")
    return late


def test_events_happen_on_time_and_do_what_they_say(tmp_path: Path) -> None:
    late: list[list[str]] = []
    for attempt in range(3):  # the machine itself may be taken away for longer than 0.2 s
        report, said = run(tmp_path, EVENTS, sys.executable, "-c", BEAT)
        assert report.exit == 0  # the killed one was the lab's
        assert [event.due for event in report.events[:-1]] == [1.0, 1.2, 1.5, 2.0, 2.5, 2.7, 3.0]
        assert report.events[-1].happened is None  # the run had ended
        killed = report.workers[2]
        assert (killed.exit, killed.ended_by) == (-signal.SIGKILL, "kill event")
        told = "\n".join(said["w0"])
        assert "rate 5Mbit" in told
        if find_hierarchy().version == 1:
            assert "quota 2000" in told
        late.append(late_in(report, said))
        if not late[attempt]:
            return
    raise AssertionError(late)


def test_an_event_at_the_very_start_finds_its_worker(tmp_path: Path) -> None:
    text = TWO + "[[event]]\nat = 0\ndo = 'kill'\nworker = 'w1'\n"
    report, said = run(tmp_path, text, "sh", "-c", "sleep 1; echo alive")
    assert [(each.exit, each.ended_by) for each in report.workers] == [(0, None), (-9, "kill event")]
    assert said["w1"] == []


def test_a_cluster_in_which_all_come_late(tmp_path: Path) -> None:
    text = '[[worker]]\ncpu = 0.4\nrate = "50mbit"\n[[event]]\nat = 0.3\ndo = "start"\nworker = "w0"\n'
    report, said = run(tmp_path, text, "echo", "here")
    assert report.exit == 0
    assert said["w0"] == ["here"]


@pytest.mark.parametrize("names", [("switch", "tasks"), ("core", "lo")])
def test_names_that_the_lab_uses_itself(tmp_path: Path, names: tuple[str, str]) -> None:
    text = "".join(f'[[worker]]\nname = "{name}"\ncpu = 0.4\nrate = "50mbit"\n' for name in names)
    report, said = run(tmp_path, text, "hostname")
    assert report.exit == 0
    assert [said[name] for name in names] == [[name] for name in names]


def test_output_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "w0.log").symlink_to("/dev/full")
    with pytest.raises(LabError, match=r"cannot be written: .*No space left"), Lab(cluster(tmp_path, TWO)) as lab:
        run_workers(lab, ["yes"], show=lambda name, line: None, folder=folder, limit=60)
    assert_nothing_is_left()


def test_groups_that_a_worker_has_made_go_with_it(tmp_path: Path) -> None:
    (root, *_) = find_hierarchy().roots
    report, _ = run(tmp_path, TWO, "sh", "-c", f"mkdir -p {root}/paceline-lab/w-w0/sub/sub")
    assert report.exit == 0


def test_a_process_that_flees_with_the_output_does_not_hold_up_the_lab(tmp_path: Path) -> None:
    joins = "; ".join(f"echo $$ > {root}/cgroup.procs" for root in find_hierarchy().roots)
    text = '[[worker]]\ncpu = 0.4\nrate = "50mbit"\n'
    report, _ = run(tmp_path, text, "sh", "-c", f"sh -c '{joins}; exec sleep 30' & sleep 0.5", limit=60)
    assert report.exit == 0
    assert report.seconds < 20  # not the thirty that it sleeps; what is still in the namespace is killed with it


def test_a_limit_also_holds_for_who_comes_late(tmp_path: Path) -> None:
    text = TWO + "[[event]]\nat = 0.5\ndo = 'start'\nworker = 'w1'\n"
    report, _ = run(tmp_path, text, "sleep", "300", limit=0.5)
    assert report.exit == 124


def test_who_is_frozen_for_ever_does_not_hold_up_the_lab(tmp_path: Path) -> None:
    text = TWO + "[[event]]\nat = 0.2\ndo = 'freeze'\nworker = 'w1'\n"
    report, _ = run(tmp_path, text, "sh", "-c", "sleep 1")
    assert [(each.exit, each.ended_by) for each in report.workers] == [(0, None), (-9, "frozen")]


def test_what_a_worker_leaves_running_ends_with_it(tmp_path: Path) -> None:
    """It even holds the worker's output open."""
    report, said = run(tmp_path, TWO, "sh", "-c", "sleep 300 & echo done")
    assert report.exit == 0
    assert said["w0"] == ["done"]
    assert max(worker.wall_seconds for worker in report.workers) < 2  # the worker's own time


def test_an_event_that_fails_is_an_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, name: str) -> None:
        raise LabError("the link does not exist")

    monkeypatch.setattr("paceline.lab.network.Network.cut", fail)
    with pytest.raises(LabError, match="the link does not exist"):
        run(tmp_path, TWO + "[[event]]\nat = 0.1\ndo = 'cut'\nworker = 'w1'\n", "sleep", "300")
    assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "cluster.toml").write_text(TWO)
    # The script is a child of the worker's first process: it is told, too.
    inner = "import signal, sys, time\ndef end(*_): print('told'); sys.exit(9)\n"
    inner += "signal.signal(2, end); signal.signal(15, end); print('ready'); time.sleep(300)"
    script = f'trap : INT TERM; {sys.executable} -c "{inner}"; exit 9'
    start = [sys.executable, "-m", "paceline", "lab", "run", str(tmp_path / "cluster.toml"), "--"]
    lab = subprocess.Popen([*start, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert lab.stdout is not None
    try:
        assert {lab.stdout.readline() for _ in range(2)} == {"w0 | ready\n", "w1 | ready\n"}
        lab.send_signal(number)
        rest, _ = lab.communicate(timeout=60)
    finally:
        lab.kill()
        lab.wait()
    assert sorted(rest.splitlines()) == ["w0 | told", "w1 | told"]
    assert lab.returncode == 9
    assert_nothing_is_left()


def test_the_limit(tmp_path: Path) -> None:
    report, _ = run(tmp_path, TWO, "sleep", "60", limit=0.5)
    assert report.exit == 124
    assert {each.ended_by for each in report.workers} == {"limit of 0.5 s"}


SITES = """
[[site]]
name = "a"
rate = "4mbit"
[[worker]]
name = "in"
count = 2
cpu = 0.4
rate = "1gbit"
site = "a"
[[worker]]
name = "b"
cpu = 0.4
rate = "1gbit"
"""


def test_workers_know_their_site(tmp_path: Path) -> None:
    _, said = run(tmp_path, SITES, "sh", "-c", "echo site: $PACELINE_SITE")
    assert {name: said[name] for name in ("in-0", "in-1", "b")} == {
        "in-0": ["site: a"],
        "in-1": ["site: a"],
        "b": ["site:"],
    }


def test_sites_are_slow_between_and_fast_inside(tmp_path: Path) -> None:
    """The same bytes to a worker of the same site and of the other: what took longer had the slow link."""
    script = """
import os, socket, time
def connect(host):
    for _ in range(100):
        try: return socket.create_connection((host, 7000), 10)
        except ConnectionRefusedError: time.sleep(0.05)
def seconds(host):
    with connect(host) as stream:
        since = time.monotonic()
        stream.sendall(bytes(500_000)); stream.shutdown(socket.SHUT_WR); stream.recv(1)
        return time.monotonic() - since
if os.environ["RANK"] == "0":
    print(seconds("in-1"), seconds("b"))
else:
    with socket.create_server(("", 7000)) as server:
        stream, _ = server.accept()
        while stream.recv(1 << 20): pass
        stream.sendall(b"x")
"""
    report, said = run(tmp_path, SITES, sys.executable, "-c", script)
    assert report.exit == 0, said
    near, far = map(float, said["in-0"][-1].split())
    assert far > 0.8 > 10 * near  # 4 Mbit at 4 Mbit/s, less what the buckets hold; inside 250 times the rate


def test_a_lab_that_was_killed_leaves_remains_and_the_next_removes_them(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(TWO)
    marker = f"paceline-test-{os.getpid()}"
    # The second process of each worker has no parent that could end it: only its group and namespace tell whose it is.
    script = f"(exec -a {marker} sleep 300) & exec sleep 300"
    command = [
        sys.executable,
        "-m",
        "paceline",
        "lab",
        "run",
        str(tmp_path / "cluster.toml"),
        "--",
        "bash",
        "-c",
        script,
    ]
    lab = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def running() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if marker in (each.info["cmdline"] or [""])[0]]

    try:
        end = time.monotonic() + 60
        while len(running()) < 2:
            assert time.monotonic() < end, "the workers did not start within 60 s"
            time.sleep(0.05)
        with pytest.raises(LabError, match=rf"already running .* process {lab.pid} \(cluster cluster, since"):
            Lab(cluster(tmp_path, TWO)).__enter__()
    finally:
        lab.kill()
        lab.wait()
    assert len(namespaces()) == 3
    assert any("control group" in each for each in remains())
    assert run(tmp_path, TWO, "true")[0].exit == 0  # the next start, which checks that nothing is left
    assert running() == []
    with only_lab("test"):
        assert clean() == []


def test_a_signal_while_building_leaves_nothing(tmp_path: Path) -> None:
    text = '[[worker]]\ncount = 20\ncpu = 0.05\nrate = "1mbit"\n'
    (tmp_path / "cluster.toml").write_text(text)
    start = [sys.executable, "-m", "paceline", "lab", "run", str(tmp_path / "cluster.toml"), "--", "sleep", "300"]
    lab = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while len(namespaces()) < 3:
        assert time.monotonic() < end, "nothing was built within 60 s"
        time.sleep(0.005)
    lab.terminate()
    assert lab.wait(60) == 128 + signal.SIGTERM
    assert_nothing_is_left()


def test_a_second_signal_kills_and_is_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(TWO)
    start = [sys.executable, "-m", "paceline", "lab", "run", str(tmp_path / "cluster.toml"), "--"]
    deaf = ["sh", "-c", "trap '' INT TERM; echo ready; sleep 300"]
    lab = subprocess.Popen([*start, *deaf], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert lab.stdout is not None
    for _ in range(2):
        lab.stdout.readline()
    lab.send_signal(signal.SIGINT)
    time.sleep(0.3)
    lab.send_signal(signal.SIGINT)
    lab.communicate(timeout=30)
    assert lab.returncode == 128 + signal.SIGINT
    assert_nothing_is_left()


def test_an_error_while_building_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, cores: float) -> None:
        raise LabError("no more groups")

    monkeypatch.setattr("paceline.lab.cgroups.CpuGroup.create", fail)
    with pytest.raises(LabError, match="no more groups"):
        Lab(cluster(tmp_path, TWO)).__enter__()
    assert_nothing_is_left()


@pytest.mark.parametrize("command", [[], ["no-such-command-anywhere"], [__file__]])
def test_a_command_that_cannot_be_started(command: list[str]) -> None:
    with pytest.raises(SettingError, match=r"no command was given|does not exist, or is not executable"):
        check_command(command)
