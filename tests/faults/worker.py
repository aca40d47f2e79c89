"""A training worker, to which something happens from outside, or which is at fault itself."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from tests.problems import data, mlp

DEADLINE = 5.0
CULPRIT = 2
STEP = 7


def train(fault: str, wrap: bool = False, folder: Path | None = None, loaders: int = 0) -> None:
    """Train; one worker raises, diverges (``nan``) or leaves the loop (``break``) at a step, if that is the fault."""
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
            here = rank == CULPRIT and step.index == STEP
            for x, y in step:
                loss = F.cross_entropy(wrapped(x), y)
                if here:
                    print(f"{len(multiprocessing.active_children())} loader processes")
                    if fault == "raise":
                        raise ValueError("something is wrong with this batch")
                    if fault == "nan":
                        loss = loss * float("nan")
                step.backward(loss)
            optimizer.step()
            if here and fault == "break":
                break
        if fault == "break" and rank == CULPRIT:
            time.sleep(60)  # it has left the loop, but lives: the others must not wait for it
