"""What the workers of these tests do."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.lab.cgroups import find_hierarchy
from paceline.testing import reached, tell_digest
from tests.problems import data, mlp, train


def count(steps: int) -> None:
    """Steps without any training, and without a word to the other workers."""
    for step in range(steps):
        reached(step)
        print("did", step)


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("child got SIGTERM", file=sys.stderr, flush=True))
print("ready", flush=True)
time.sleep(600)
"""


def count_with_children(steps: int) -> None:
    """One child in this worker's session, and one that has left it; all of them hear SIGTERM, and stay."""
    signal.signal(signal.SIGTERM, lambda *_: print("worker got SIGTERM"))
    for leaves in (False, True):
        child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=leaves, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
    count(steps)
    time.sleep(600)


def run(steps: int) -> None:
    """The loop of the README."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(64), batch=8, deadline=5) as running:
        train(running, model, each=lambda step: print("did", step.index), steps=steps)
    tell_digest(model)


def run_unclosed(steps: int) -> None:
    """A script that raises outside of ``with``: the others hear of it only because it ends as a script does."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    running = pl.Run(model, optimizer, data(64), batch=8, deadline=5)
    for step in running.steps(steps=steps):
        if os.environ["RANK"] == "1" and step.index == 2:
            raise ValueError("the second worker does not like it")
        optimizer.zero_grad()
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()


def ddp(steps: int) -> None:
    """No part of Paceline but the two calls that tell the test how far this worker is."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data(8)[:]
    for step in range(steps):
        reached(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    tell_digest(model)


def diverge() -> None:
    """Every worker has a model of its own."""
    model = mlp()
    with torch.no_grad():
        next(model.parameters()).add_(int(os.environ["RANK"]))
    tell_digest(model)


def hang(folder: Path) -> None:
    """Start processes that would live on, leave all numbers, and hang."""
    children = [subprocess.Popen(["sleep", "600"], start_new_session=leaves) for leaves in (False, True)]
    leave_numbers(folder, [os.getpid(), *(child.pid for child in children)])
    print("hangs")
    time.sleep(600)


def leave_numbers(folder: Path, numbers: list[int]) -> None:
    part = folder / f"part-{os.environ['RANK']}"
    part.write_text(" ".join(map(str, numbers)))
    part.rename(folder / f"numbers-{os.environ['RANK']}")


def talk() -> None:
    """The second worker says ten words to the first, and each is answered, until nothing comes for a while."""
    with socket.create_server(("", 5000)) if os.environ["RANK"] == "0" else socket.socket() as own:
        if os.environ["RANK"] == "0":
            other, _ = own.accept()
        else:
            other = own
            while other.connect_ex((os.environ["MASTER_ADDR"], 5000)):
                time.sleep(0.02)
        other.settimeout(5)
        try:
            for step in range(10):
                reached(step)
                print(f"step {step}: {granted()}")
                if other is own:
                    other.sendall(b"x")
                if not other.recv(1):
                    break
                if other is not own:  # not before it was asked: else an answer could be there before a link is cut
                    other.sendall(b"x")
        except TimeoutError:
            print("heard nothing")


def granted() -> str:
    """The processor quota and the rate of this worker, as the kernel has them."""
    shape = subprocess.run(["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True).stdout
    rate = re.search(r"rate (\S+)", shape)
    (group,) = {line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if "paceline" in line}
    hierarchy = find_hierarchy()
    folder = hierarchy.cpu / group.lstrip("/")
    if hierarchy.version == 2:
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{one}_us").read_text() for one in ("quota", "period"))
    return f"{int(quota) / int(period):g} cores, {rate[1] if rate else 'no rate'}"
