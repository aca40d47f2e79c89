"""One minute of measuring: how fast each worker computes, and how fast they exchange."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from paceline.codec import Identity, Lattice, Uniform8
from paceline.errors import SettingError
from paceline.feed import check_dataset, to_device
from paceline.fleet import Fleet
from paceline.gossip.points import Points
from paceline.roles import Codec
from paceline.survey.predict import Link, Survey, fit
from paceline.sync.average import WeightedAverage

__all__ = ["measure", "pairings"]

PARTS = {"compute": 0.6, "sums": 0.25, "exchange": 0.05, "links": 0.1}
"""Of the time for each."""
MOST = 50  # sums or messages in a row: beyond that more say nothing new
LARGE = 1 << 18  # bytes of a message that shows the rate of a link, unless the model is larger
LARGEST = 1 << 22

Loss = Callable[[nn.Module, Any], Tensor]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def measure(
    model: nn.Module,
    loss: Loss,
    dataset: Dataset[Any],
    *,
    batch: int,
    seconds: float = 60.0,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    deadline: float = 300.0,
) -> Survey:
    """Measure the cluster that this worker is in; all workers call it together, and get the same.

    Args:
        model: that is to be trained. A copy is worked with; it is left as it is.
        loss: ``loss(model, batch)``, the mean over a collated batch.
        dataset: that is to be trained on.
        batch: examples of a step, all workers together.
        seconds: how long to measure, about. Where a step or a sum takes long, it takes longer: each is seen twice.
        optimizer: makes the optimizer from parameters; its step is part of what is measured.
        collate_fn: makes a batch of examples.
        deadline: seconds to wait for other workers.
    """
    length = check_dataset(dataset)
    if not 0 < seconds < math.inf:
        raise SettingError(f"seconds ({seconds}) must be above zero, and finite")
    if any(each.is_complex() for each in model.parameters() if each.requires_grad):
        raise SettingError("the model has complex parameters, which codecs do not take; measure without them")
    fleet = Fleet.join(deadline)
    try:
        if not fleet.size <= batch <= length:
            raise SettingError(
                f"batch ({batch}) must be from one example for each of the {fleet.size} workers to the {length} of the "
                "data set"
            )
        model = copy.deepcopy(model)
        trained = [each for each in model.parameters() if each.requires_grad]
        if not trained:
            raise SettingError("the model has no parameter that requires a gradient: there is nothing to train")
        shapes = [tuple(each.shape) for each in trained]
        told = {"batch": batch, "length of the data set": length, "seconds to measure": seconds, "model": shapes}
        fleet.agree({what: str(value) for what, value in told.items()})
        one_step = _steps(model, loss, dataset, optimizer(trained), collate_fn)
        steps = _compute(fleet, one_step, batch, seconds * PARTS["compute"])
        half = seconds * PARTS["sums"] / 2
        sums, coded = (_sum_seconds(fleet, trained, codec, half) for codec in (Identity(), Uniform8()))
        exchange = _exchange_seconds(fleet, trained, seconds * PARTS["exchange"])
        numbers = sum(each.numel() * each.element_size() for each in trained)
        links = _links(fleet, min(max(numbers, LARGE), LARGEST), seconds * PARTS["links"])
    except BaseException as error:
        fleet.fail(error)
        raise
    finally:
        fleet.close()
    speeds = [fit(points) for points in steps]
    return Survey(length, batch, numbers, speeds, steps, sums, coded, exchange, links)


def _steps(
    model: nn.Module,
    loss: Loss,
    dataset: Dataset[Any],
    optimizer: Optimizer,
    collate_fn: Callable[[list[Any]], Any],
) -> Callable[[int], None]:
    """What does a step with so many examples, as a loop would, the loading included."""
    places = cycle(range(check_dataset(dataset)))
    device = next(model.parameters()).device

    def step(examples: int) -> None:
        batch = collate_fn([dataset[next(places)] for _ in range(examples)])
        optimizer.zero_grad()
        loss(model, to_device(batch, device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if device.type == "cuda":  # not exercised by the tests, which have no GPU
            torch.cuda.synchronize(device)

    return step


def _compute(fleet: Fleet, step: Callable[[int], None], batch: int, seconds: float) -> list[list[tuple[int, float]]]:
    """Seconds of a step with several numbers of examples, of each worker, while all of them compute."""
    share = -(-batch // fleet.size)
    least = min(share, 2)  # batch normalisation cannot do with one example
    sizes = sorted({max(least, share // 4), max(least, share // 2), share, 2 * share})
    own: list[tuple[int, float]] = []
    for size in sizes:
        step(size)  # the first of its size makes room, and chooses algorithms
        fleet.gather(b"", f"the others to begin with steps of {size} examples")
        own.append((size, _repeat(partial(step, size), seconds / len(sizes))))
    blobs = fleet.gather(msgspec.json.encode(own), "the others to tell their speeds")
    return [msgspec.json.decode(blob, type=list[tuple[int, float]]) for blob in blobs]


def _repeat(work: Callable[[], None], seconds: float) -> float:
    """Seconds that it takes once, on average over so much time, and over two times at least."""
    began, times = time.perf_counter(), 0
    while times < 2 or time.perf_counter() - began < seconds:
        work()
        times += 1
    return (time.perf_counter() - began) / times


def _sum_seconds(fleet: Fleet, tensors: Sequence[Tensor], codec: Codec, seconds: float) -> float:
    """What an average over all workers takes, as Local SGD does it; one step's of gradients takes as long."""
    if fleet.size == 1:
        return 0.0
    average = WeightedAverage(fleet, codec)
    average.prepare(tensors, len(tensors), ())
    average.begin(tensors)
    fleet.gather(b"", "the others to begin to average")

    def one() -> None:
        average.of(tensors, 1.0, float(fleet.size), (), "an average that is measured").tensors()

    try:
        return max(_together(fleet, one, seconds))
    finally:
        average.close()


def _together(fleet: Fleet, one: Callable[[], None], seconds: float) -> list[float]:
    """Seconds, on each worker, that something takes which all do together, and equally often."""
    one()  # connections are made
    took = max(_told(fleet, _seconds(one, 2), "how long it takes"))
    times = max(2, min(MOST, int(seconds / max(took, 1e-6))))
    return _told(fleet, _seconds(one, times), "how long it took")


def _seconds(work: Callable[[], None], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


@torch.no_grad()
def _exchange_seconds(fleet: Fleet, tensors: Sequence[Tensor], seconds: float) -> list[float]:
    """What each worker does itself for an exchange under gossip, without the way."""
    flat = torch.cat([each.detach().reshape(-1).float().cpu() for each in tensors])
    points = Points(Lattice(8), flat.numel())
    points.prepare()
    room = torch.empty_like(flat)
    fleet.gather(b"", "the others to begin to encode")

    def one() -> None:
        payload, _ = points.encode(room.copy_(flat), points.levels[0], seed=0)
        points.decode(payload, points.levels[0], flat, seed=0)
        room.sub_(flat).mul_(0.5)

    one()
    return _told(fleet, _repeat(one, seconds), "how long they encode")


def _links(fleet: Fleet, size: int, seconds: float) -> list[Link]:
    """What messages between every two workers take, as many pairs at once as there can be."""
    found: list[Link] = []
    rounds = list(pairings(fleet.size))
    for partners in rounds:
        other = partners[fleet.rank]
        times = []
        for length in (1, size):
            sent = torch.zeros(length, dtype=torch.uint8, device=fleet.device)
            one = partial(fleet.pair_up, other, sent, torch.empty_like(sent), "messages that are measured")
            times.append(_together(fleet, one, seconds / len(rounds) / 2))
        for a, b in enumerate(partners):
            if a < b:
                short, long = (max(each[a], each[b]) for each in times)
                found.append(Link(a, b, short, size / long))
    return sorted(found, key=lambda link: (link.one, link.other))


def pairings(workers: int) -> Iterator[list[int]]:
    """Rounds in which everybody has a partner, or, if they are odd, one has itself; in all, every two meet once."""
    places = [*range(workers), *([-1] if workers % 2 and workers > 1 else [])]
    for _ in range(len(places) - 1):
        partners = list(range(workers))
        for one, other in zip(places, reversed(places), strict=True):
            if min(one, other) >= 0:
                partners[one] = other
        yield partners
        places = [places[0], places[-1], *places[1:-1]]


def _told(fleet: Fleet, value: float, what: str) -> list[float]:
    """What all workers have found, by rank."""
    return [float(blob) for blob in fleet.gather(repr(value).encode(), f"the others to tell {what}")]
