"""A training worker that meets with a fault."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from tests.problems import data, mlp

DEADLINE = 5.0


def train_until(fault: str, at_rank: int, at_step: int, wrap: bool, folder: Path | None, loaders: int = 0) -> None:
    """Train; at this rank and step the fault happens."""
    rank = int(os.environ["RANK"])
    model = mlp()
    wrapped: torch.nn.Module = model
    if wrap:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoint = pl.Checkpoint(folder) if folder else None
    with pl.Run(
        wrapped, optimizer, data(400), batch=16, deadline=DEADLINE, checkpoint=checkpoint, num_workers=loaders
    ) as run:
        for step in run.steps(epochs=1000):
            optimizer.zero_grad()
            here = rank == at_rank and step.index == at_step
            for x, y in step:
                loss = F.cross_entropy(wrapped(x), y)
                if here:
                    print(f"fault {time.time()}", flush=True)
                    if fault == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    elif fault == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    elif fault == "raise":
                        raise ValueError("something is wrong with this batch")
                    elif fault == "nan":
                        loss = loss * float("nan")
                step.backward(loss)
            optimizer.step()
            if here and fault == "break":
                break
            if here and fault == "signal":
                print("at the step", flush=True)
            time.sleep(0.005)
        if fault == "break" and rank == at_rank:
            time.sleep(60)  # it has left the loop, but lives: the others must not wait for it
