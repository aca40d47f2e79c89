"""Does a swarm go on when workers die, freeze, or are cut off, and does it learn as much as without?

Eight workers train with Gossip, in two sites of the lab, each with a fifth of a core. A fault befalls each training, at
moments that are drawn by its seed; all together have to use as many examples as without any fault. One, three or seven
are killed and stay dead; one is killed and started again with the invitation, or frozen; the link of one, or of a whole
site, is cut for 20 s, and whole again. Told are the longest time between the ends of two rounds of the workers that
nothing was done to (and of the others, as long as they did any), when those that came back have averaged again, whether
all that are alive at the end have one model, and its accuracy beside that of the training with the same seed and no
fault.

Needs what ``paceline lab`` needs; with ``--local``, which cannot cut, all is done on this machine as it is.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from benchmarks.blows import Blow, Course, Healed
from benchmarks.growth import longest_stall
from benchmarks.survivor import LIMIT, Job, events_of, model_of, train
from benchmarks.training import Done
from benchmarks.victims import Victim, wait_for
from paceline import record
from paceline.events import Event, Gossiped
from paceline.lab import Cluster, Link, cluster
from paceline.lab.tools import missing
from paceline.testing.digest import digest
from paceline.testing.places import InLab, Loopback, Place
from paceline.testing.processes import Work

__all__ = [
    "FAULTS",
    "FOR_EVER",
    "PASSING",
    "WORKERS",
    "Blow",
    "Healed",
    "back",
    "line",
    "one",
    "plan",
    "sites",
    "wrong",
]

WORKERS, CORES = 8, 0.2
LINK = Link(10**9, 10**9)
SITES = {"east": range(4), "west": range(4, 8)}
FAULTS = ["none", "kill 1", "kill 3", "kill 7", "kill and return", "freeze", "link", "site"]
CUTS = {"link", "site"}
FOR_EVER, PASSING = (25, 75), (25, 50)  # percent of the examples between which such a fault begins
CUT = 20.0  # seconds
FREEZE = (2.0, 8.0)  # seconds
AGAIN = 1.0  # seconds until who was killed is started again, as a launcher does it
STALL = 2.0  # seconds that a round may take of a worker to which nothing was done
WORSE = 0.5  # points of accuracy that a fault may cost


def plan(fault: str, seed: int) -> list[Blow]:
    """What befalls a training, in the order of time."""
    chance = random.Random(f"{fault}, {seed}")
    worker, soon = chance.randrange(WORKERS), chance.randint(*PASSING)
    match fault.split():
        case ["kill", count]:
            dead = chance.sample(range(WORKERS), int(count))
            return sorted(Blow(chance.randint(*FOR_EVER), "kill", each) for each in dead)
        case ["kill", "and", "return"]:
            return [Blow(soon, "kill", worker, AGAIN)]
        case ["freeze"]:
            return [Blow(soon, "freeze", worker, round(chance.uniform(*FREEZE), 1))]
        case ["link"]:
            return [Blow(soon, "cut", worker, CUT)]
        case ["site"]:
            return [Blow(soon, "cut", chance.choice(sorted(SITES)), CUT)]
    return []


def sites() -> Cluster:
    """Eight machines, slow and all the same, in two places."""
    at = {rank: site for site, ranks in SITES.items() for rank in ranks}
    workers = (cluster.Worker(f"w{rank}", rank, CORES, LINK, at[rank]) for rank in range(WORKERS))
    return Cluster(tuple(workers), tuple(cluster.Site(site, LINK) for site in SITES))


def one(fault: str, job: Job, place: Place) -> dict[str, Any]:
    """One training, and what came of it."""
    folder, blows = Path(job.folder), plan(fault, job.seed)
    workers = [Victim(rank, place, Work(train, (job,)), folder) for rank in range(WORKERS)]
    try:
        wait_for(lambda: all(each.trains for each in workers), workers, "all workers to train", LIMIT)
        began = time.monotonic()
        course = Course(workers, place, blows, folder)
        course.happen()
        seconds = time.monotonic() - began
        alive = [each.rank for each in workers if each.finished]
    finally:
        for each in workers:
            each.close()
    events: dict[int, list[Event]] = {rank: list(record.read(events_of(folder, rank))) for rank in range(WORKERS)}
    stalls = {each.rank: longest_stall(events[each.rank], each.frozen) for each in workers}
    hit = set[int]().union(*(blow.workers for blow in blows))
    counted = [event for each in events.values() for event in each if isinstance(event, Gossiped)]
    return {
        "blows": [blow._asdict() | {"seconds": None if blow.seconds == math.inf else blow.seconds} for blow in blows],
        "alive": alive,
        **_final(job, alive),
        "stall": round(max(stall for rank, stall in stalls.items() if rank not in hit), 2),
        "own stall": round(max(stalls[rank] for rank in hit), 2) if hit else None,
        "back": [back(healed, events) for healed in course.healed],
        "examples": max(event.examples for event in counted),
        **{name: sum(getattr(event, name) for event in counted) for name in ("exchanges", "timeouts", "lost", "late")},
        "seconds": round(seconds, 1),
    }


def _final(job: Job, alive: Sequence[int]) -> dict[str, Any]:
    """How many models there are, and how good the worst of them is."""
    task = job.load()
    model, found = task.model(job.model), dict[str, float]()
    for rank in alive:
        model.load_state_dict(torch.load(model_of(Path(job.folder), rank), weights_only=True))
        if (name := digest(model)) not in found:
            found[name] = task.evaluate(model)["accuracy"]
    return {"digests": len(found), "accuracy": min(found.values())}


def back(healed: Healed, events: dict[int, list[Event]]) -> float | None:
    """Seconds from the end of a fault until all whom it had kept away have averaged again, with whom they could not."""
    target = healed.blow.target
    if isinstance(target, int):
        met = [_first(events[target], healed.time, {*range(WORKERS)} - {target})]
    else:
        east, west = (set(ranks) for ranks in SITES.values())
        met = [_first(events[rank], healed.time, west if rank in east else east) for rank in range(WORKERS)]
    times = [each for each in met if each is not None]
    return round(max(times) - healed.time, 1) if len(times) == len(met) else None


def _first(events: Iterable[Event], since: float, partners: set[int]) -> float | None:
    """When a worker has told of an exchange with one of these; its first round may have begun before."""
    told = [event for event in events if isinstance(event, Gossiped) and event.time > since]
    return next((event.time for event in told[1:] if event.exchanges and event.partner in partners), None)


def wrong(fault: str, found: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it should be."""
    told = []
    for seed, (mine, other) in enumerate(zip(found, base, strict=True)):
        where = f"{fault}, training {seed}"
        told += [f"{where}: {mine['digests']} final models"] if mine["digests"] != 1 else []
        told += [f"{where}: a round took {mine['stall']:g} s"] if mine["stall"] > STALL else []
        told += [f"{where}: who came back took no part again"] if None in mine["back"] else []
        lost = 100 * (other["accuracy"] - mine["accuracy"])
        told += [f"{where}: {lost:.2f} points less"] if lost > WORSE else []
    return told


def line(fault: str, found: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> str:
    """A row for people."""
    accuracies = [100 * each["accuracy"] for each in found]
    away = [mine - 100 * other["accuracy"] for mine, other in zip(accuracies, base, strict=True)]
    times = [time for each in found for time in each["back"]]
    own = [each["own stall"] for each in found if each["own stall"] is not None]
    returned = [f"{time:.1f}" if time is not None else "never" for time in times]
    return (
        f"{fault:16s} stall {max(each['stall'] for each in found):5.2f} s"
        f" (own {f'{max(own):5.2f}' if own else '    -'})  back {', '.join(returned) or '-':18s}"
        f" models {max(each['digests'] for each in found)}"
        f"  {statistics.mean(accuracies):.2f} %  {statistics.mean(away):+.2f} ({min(away):+.2f} … {max(away):+.2f})"
        f"  {statistics.mean(each['seconds'] for each in found):.0f} s"
    )


def main() -> None:
    """Answer the question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="fashion-mnist")
    parser.add_argument("--model", default="lenet", help="of the task")
    parser.add_argument("--epochs", type=float, default=5.0, help="of all workers together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fault", action="append", choices=FAULTS[1:], dest="faults", help="by default all")
    parser.add_argument("--local", action="store_true", help="on this machine as it is, without cuts")
    parser.add_argument("--anew", action="store_true", help="train also what was trained before")
    options = vars(parser.parse_args())
    first, count, anew = (options.pop(name) for name in ("first", "seeds", "anew"))
    usual = [each for each in FAULTS[1:] if not (options["local"] and each in CUTS)]
    faults = ["none", *(options.pop("faults") or usual)]
    if options["local"] and CUTS & {*faults}:
        raise SystemExit("only the lab has links that can be cut; leave --local out")
    if not options["local"] and (lacks := missing()):
        raise SystemExit(f"the lab cannot work here: {'; '.join(lacks)}")
    done = Done(f"survive-{options['task']}", anew)
    found: dict[str, list[dict[str, Any]]] = {fault: [] for fault in faults}
    for seed in range(first, first + count):
        for fault in faults[seed % len(faults) :] + faults[: seed % len(faults)]:
            if (came := done.get(fault, seed, options)) is None:
                came = _train(fault, seed, options)
                done.add(fault, seed, options, came)
            found[fault].append(came)
            print(f"seed {seed}, {fault}: {came}", flush=True)
    for fault, each in found.items():
        print(line(fault, each, found["none"]))
    bad = [what for fault, each in found.items() for what in wrong(fault, each, found["none"])]
    print("\n".join(bad) or "nobody was held up, all came back, and all ended with one model that is as good")
    bench.report(f"survive-{options['task']}", {"options": options, "faults": found, "wrong": bad})


def _train(fault: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    place: Place = Loopback(WORKERS) if options["local"] else InLab(sites())
    told = {name: options[name] for name in ("task", "model", "epochs", "lr")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            place.open()
            return one(fault, Job(**told, seed=seed, folder=folder), place)
        finally:
            place.close()


if __name__ == "__main__":
    main()
