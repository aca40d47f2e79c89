"""Measure a cluster with a built-in task: what every worker of ``paceline probe`` runs.

paceline run --workers 4 -m paceline.survey.task --task digits --batch 64 --out found.json
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from paceline import tasks
from paceline.survey.measure import measure

__all__ = ["main"]


def main() -> None:
    """Read the arguments, measure, and let rank 0 write what was found."""
    parser = argparse.ArgumentParser(prog="python -m paceline.survey.task", description=__doc__)
    parser.add_argument("--task", default="digits", help=", ".join(tasks.names()))
    parser.add_argument("--model", help="the task's first by default")
    parser.add_argument("--batch", type=int, default=64, help="of all workers together")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    task = tasks.load(chosen.task)
    found = measure(task.model(chosen.model), task.loss, task.train, batch=chosen.batch, seconds=chosen.seconds)
    if os.environ.get("RANK", "0") == "0":
        chosen.out.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
