"""Several machines: the command of the README, with one agent of torchrun in each of two namespaces."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from paceline import record
from paceline.lab import Lab, example_files, read_cluster, run_workers
from tests.lab.needs import needs_lab

ROOT = Path(__file__).parent.parent.parent


@needs_lab
def test_the_command_of_the_readme_trains_on_two_machines(tmp_path: Path) -> None:
    (line,) = re.findall(r"^torchrun --nnodes 2 .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    program, *words, script = shlex.split(line.replace("FIRST-MACHINE", "w0"))
    assert (program, script) == ("torchrun", "train.py")
    demo = ["-m", "paceline.tasks.train", "--epochs", "1", "--folder", str(tmp_path / "run")]
    command = [sys.executable, "-m", "torch.distributed.run", *words, *demo]
    said: list[str] = []
    with Lab(read_cluster(example_files()["even"])) as lab:
        report = run_workers(lab, command, show=lambda name, line: said.append(f"{name} | {line}"), limit=120)
    assert [worker.exit for worker in report.workers] == [0, 0], "\n".join(said)
    events = record.read(tmp_path / "run" / "events.jsonl")
    assert len(record.summary(events).workers) == 4
    for worker in report.workers:  # gradients of 23 steps went over the link
        assert worker.bytes_sent > 1_000_000
