"""Paceline: the argument names the roles that differ from the defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks.contestants.job import Job, Settings
from benchmarks.contestants.network import own_address
from benchmarks.contestants.race import Race

FOREVER = 10**9

VARIANTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "all-reduce": lambda settings: {"sync": pl.sync.AllReduce()},
    "by-speed": lambda settings: {"sync": pl.sync.AllReduce(), "balance": pl.balance.BySpeed()},
    "local-sgd-by-speed": lambda settings: {
        "sync": pl.sync.LocalSGD(settings.every),
        "balance": pl.balance.BySpeed(),
        "lockstep": settings.every,
    },
    "local-sgd": lambda settings: {"sync": pl.sync.LocalSGD(settings.every), "lockstep": settings.every},
    "local-sgd-seldom": lambda settings: {
        "sync": pl.sync.LocalSGD(settings.every * 2),
        "lockstep": settings.every * 2,
    },
    "local-sgd-8bit": lambda settings: {
        "sync": pl.sync.LocalSGD(settings.every, codec=pl.codec.Uniform8()),
        "lockstep": settings.every,
    },
    "local-sgd-overlap": lambda settings: {
        "sync": pl.sync.LocalSGD(settings.every, overlap=settings.every // 2),
        "lockstep": settings.every,
    },
    "local-sgd-seconds": lambda settings: {"sync": pl.sync.LocalSGD(pl.sync.Seconds(2.0)), "lockstep": None},
    "local-sgd-short": lambda settings: {"sync": pl.sync.LocalSGD(pl.sync.Seconds(0.4)), "lockstep": None},
    "gossip": lambda settings: {"sync": pl.sync.Gossip(settings.every, bind=own_address()), "lockstep": None},
    "hierarchical": lambda settings: {
        "sync": pl.sync.Hierarchical(settings.every // 4, settings.every * 2),
        "lockstep": settings.every * 2,
    },
}
"""For each variant the arguments of ``Run``, and ``lockstep`` if workers wait for each other less than once a step."""


def main() -> None:
    job = Job.from_command_line()
    roles = VARIANTS[sys.argv[2]](job.settings)
    lockstep = roles.pop("lockstep", 1)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    batch = job.settings.batch * job.workers
    race = Race(job, model, lockstep=lockstep)
    with pl.Run(
        model, optimizer, TensorDataset(job.x, job.y), **{"batch": batch, "seed": job.settings.seed, **roles}
    ) as run:
        steps = run.steps(steps=FOREVER)
        race.start()
        for step in steps:
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if race.step(step.plan.counts[job.rank]):
                break


if __name__ == "__main__":
    main()
