"""Orders that learn from the gradients of a run: PairBalance (PairGraB, CD-GraB) and GraB."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from paceline.errors import LoopError, SettingError
from paceline.given import check_flags
from paceline.order.balancing import Balancer, MeanBalancer, PairBalancer
from paceline.order.fragments import Fold, Fragment, pack, unpack
from paceline.order.ledger import Ledger
from paceline.order.preconditioner import Preconditioner
from paceline.order.signs import Greedy, Rule
from paceline.order.streams import OneStream, WorkerStreams, deal, line_up
from paceline.probe.units import Example
from paceline.records import Progress
from paceline.roles import Need

if TYPE_CHECKING:
    from paceline.probe import Probe

__all__ = ["GraB", "Learnt", "PairBalance"]

SKETCH = 256  # numbers of an image that decide: enough for signs, and little to send


class Learnt:
    """What the orders have in common: units, what is known of their gradients, and the order that follows from it.

    A unit is a group of examples that stays together; which those are is drawn once. What is left over, fewer examples
    than a unit has, comes last in every epoch.
    """

    rule: Rule
    foresees = False
    needs: ClassVar[frozenset[Need]] = frozenset({Need.UNITS})

    def __init__(
        self,
        make: Callable[..., Balancer],
        unit: int | None,
        streams: OneStream | WorkerStreams,
        sketch: int | None,
        exact: bool,
        preconditioned: bool,
    ) -> None:
        name = type(self).__name__
        check_flags(f"{name}: ", exact=exact, preconditioned=preconditioned)
        if unit is not None and (type(unit) is not int or unit < 1):
            raise SettingError(f"{name}: unit ({unit!r}) must be a whole number of examples, at least 1")
        if sketch is not None and (exact or type(sketch) is not int or sketch < 1):
            raise SettingError(
                f"{name}: sketch ({sketch!r}) must be a whole number, at least 1, and has no effect with exact=True"
            )
        if not isinstance(streams, OneStream | WorkerStreams):
            raise SettingError(f"{name}: streams ({streams!r}) must be order.OneStream() or order.WorkerStreams()")
        self._make, self._wanted, self._streams = make, unit, streams
        self._sketch, self._exact = sketch or SKETCH, exact
        self.preconditioned = preconditioned
        """Whether gradients are balanced as the optimizer divides them."""
        self.epoch = 0
        """The epoch whose order it gives."""
        self.digest = 0
        """A check sum of that order, which is the same on all workers."""
        self._unit, self._single = 0, False

    def __repr__(self) -> str:
        told = [f"unit={self._wanted}", f"streams={self._streams!r}"]
        told.append("exact=True" if self._exact else f"sketch={self._sketch}")
        told += ["preconditioned=True"] if self.preconditioned else []
        return f"{type(self).__name__}({', '.join(told)}, rule={self.rule!r})"

    @property
    def unit(self) -> int:
        """Examples of a unit, which a micro-batch has to keep to; 0 where single examples are seen anyway."""
        return 0 if self._single else self._unit

    @property
    def alone(self) -> bool:
        """Whether the order of a worker depends on its own gradients alone, so that workers need not meet."""
        return isinstance(self._streams, WorkerStreams) and not self._streams.shared_sum

    @property
    def orders(self) -> list[list[int]]:
        """The units of each stream in the order of the epoch."""
        return [list(order) for order in self._orders]

    def begin(self, rank: int, workers: int, lengths: tuple[int, ...], share: int, probe: Probe) -> None:
        """Begin to serve a run; ``share`` is what a unit has if nothing else is said."""
        name, self._local = type(self).__name__, len(lengths) > 1
        if self._exact and not probe.exact:
            raise SettingError(f"{name}(exact=True) compares whole gradients: give Run probe=Probe(exact=True), too")
        if self._local and isinstance(self._streams, OneStream):
            raise SettingError(
                f"{name} has one stream, but with local_data=True every worker has its own; write "
                "order.PairBalance(streams=order.WorkerStreams())"
            )
        self._single = isinstance(probe.unit, Example)
        if self._single and self._wanted not in (None, 1):
            raise SettingError(
                f"{name}: unit ({self._wanted}) has no effect with Probe(unit=Example(…)), which sees single examples"
            )
        self._rank, self._workers, self._lengths = rank, workers, lengths
        self._unit = 1 if self._single else self._wanted or share
        self._size = probe.image_size if self._exact else min(self._sketch, probe.image_size)
        self._number = "<f8" if self._exact else "i1"
        self._fold = Fold(probe.image_size, self._size, probe.seed) if self._size < probe.image_size else None
        self._own: list[Fragment] = []
        self._rule = deepcopy(self.rule)  # one that draws lots begins anew with every run
        self._start(0, self._first_orders())
        self._preconditioner = Preconditioner(probe) if self.preconditioned else None

    def _first_orders(self) -> list[list[int]]:
        counts = [length // self._unit for length in self._lengths]
        if min(counts) < 2:
            raise SettingError(
                f"{type(self).__name__}: of {min(self._lengths)} examples there are {min(counts)} units of "
                f"{self._unit}, and nothing to order; give a smaller unit, or a smaller micro to the Run"
            )
        return [list(range(count)) for count in counts] if self._local else self._deal(list(range(counts[0])))

    @property
    def _parted(self) -> int:
        """In how many streams data that all can read are parted."""
        return self._workers if isinstance(self._streams, WorkerStreams) else 1

    def _deal(self, units: list[int]) -> list[list[int]]:
        """Units of data that all can read, one after the other to each stream."""
        streams = self._parted
        if len(units) < 2 * streams:
            raise SettingError(
                f"{type(self).__name__}: {len(units)} units of {self._unit} examples are too few for {streams} "
                "streams; give a smaller unit, or order.OneStream()"
            )
        return deal(units, streams)

    def _start(self, epoch: int, orders: list[list[int]]) -> None:
        self.epoch, self._orders = epoch, orders
        self._balancer = self._make(orders, rule=self._rule)
        self._open()

    def _open(self) -> None:
        self._ledger = Ledger([len(order) for order in self._orders], self._unit, self._exact)
        told = repr((self.epoch, self._unit, self._orders)).encode()
        self.digest = zlib.crc32(told)

    def permutation(self, length: int, epoch: int, seed: int) -> Tensor:
        """The examples of the epoch that the run is in, unit by unit."""
        if epoch != self.epoch:
            raise LoopError(f"the order of epoch {epoch} is not known in epoch {self.epoch}")
        examples = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
        whole = length // self._unit * self._unit
        units = examples[:whole].view(-1, self._unit)
        return torch.cat([units[torch.tensor(self._sequence())].reshape(-1), examples[whole:]])

    def _sequence(self) -> list[int]:
        """The units of this worker's data in the order of the epoch."""
        return self._orders[self._rank] if self._local else line_up(self._orders)

    def see(self, fragments: Sequence[Fragment]) -> None:
        """Take what this worker has seen in a step."""
        whole = self._lengths[self._rank if self._local else 0] // self._unit * self._unit
        ranked = [each for each in fragments if each.start < whole]
        seen = [each for each in ranked if each.weight]
        if self._fold is not None and seen:
            images = self._fold.of(torch.stack([each.image for each in seen]))
            seen = [each._replace(image=image) for each, image in zip(seen, images, strict=True)]
        self._own += seen + [each for each in ranked if not each.weight]

    def tell(self) -> bytes:
        """What this worker has seen since it was asked the last time, for all others."""
        own, self._own = self._own, []
        return pack(own, self._size, self._number)

    def hear(self, blobs: Sequence[bytes], now: Progress) -> None:
        """Take what all workers have told, by rank. In a new epoch there is a new order: the same on all."""
        told = [unpack(blob, self._size, self._number) for blob in blobs]
        self._ledger.begin([each for fragments in told for each in fragments])
        for rank, fragments in enumerate(told):
            for each in fragments:
                self._ledger.add(*self._place(rank, each.start // self._unit), each)
        for stream in range(len(self._orders)):
            self._watch(stream, self._ledger.take(stream))
        if now.epoch > self.epoch:
            for stream, rows in enumerate(self._ledger.rest()):
                self._watch(stream, rows)
            self._turn(now.epoch)

    def _watch(self, stream: int, rows: Tensor | None) -> None:
        if rows is not None:
            self._balancer.observe(rows, stream)

    def _place(self, rank: int, slot: int) -> tuple[int, int]:
        """The stream of a unit, and its number there."""
        streams = len(self._orders)
        return (rank, slot) if self._local else (slot % streams, slot // streams)

    def _turn(self, epoch: int) -> None:
        self.epoch, self._orders = epoch, self._balancer.next_orders()
        anew = self._preconditioner is not None and self._preconditioner.freeze()
        if anew:  # the mean and the norms of gradients say nothing of gradients that are divided
            self._rule = deepcopy(self.rule)
        if not self._local and len(self._orders) != self._parted:  # another number of workers has resumed the run
            self._start(epoch, self._deal(self._sequence()))
        elif anew:
            self._start(epoch, self._orders)
        else:
            self._open()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, in the middle of an epoch, too: all that was told must have been heard."""
        balancer, ledger = self._balancer.state_dict(), self._ledger.state_dict()
        known = {"epoch": self.epoch, "unit": self._unit, "orders": self._orders}
        factors = {} if self._preconditioner is None else {"factors": self._preconditioner.factors()}
        return {**known, "balancer": balancer, "ledger": ledger, **factors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back; units stay what they were."""
        self._unit, self._own = state["unit"], []
        self._start(state["epoch"], [list(order) for order in state["orders"]])
        self._balancer.load_state_dict(state["balancer"])
        self._ledger.load_state_dict(state["ledger"])
        if self._preconditioner is not None:
            self._preconditioner.take_back(state["factors"])


class PairBalance(Learnt):
    """Differences of neighbours cancel each other: PairGraB, and with a stream for each worker CD-GraB.

    Args:
        unit: examples of a unit; by default those of a micro-batch (``micro``, or a worker's share of the first step).
        streams: one for all (:class:`OneStream`), or one for each worker (:class:`WorkerStreams`).
        sketch: numbers that are kept and sent of each gradient (256).
        exact: compare whole gradients, for comparison; needs ``Probe(exact=True)``.
        preconditioned: balance gradients as the optimizer divides them (Adam and its relatives, Adagrad, RMSprop): each
            number over sqrt(v) + eps, as it is when the epoch begins; in a first epoch, gradients as they are. There is
            no theory for it.
        rule: how signs are chosen: :class:`Greedy`, :class:`Walk`, :class:`Halving`.
    """

    def __init__(
        self,
        *,
        unit: int | None = None,
        streams: OneStream | WorkerStreams = OneStream(),  # noqa: B008 (it is frozen)
        sketch: int | None = None,
        exact: bool = False,
        preconditioned: bool = False,
        rule: Rule | None = None,
    ) -> None:
        self.rule = rule or Greedy()
        shared = not isinstance(streams, WorkerStreams) or streams.shared_sum
        super().__init__(partial(PairBalancer, coordinated=shared), unit, streams, sketch, exact, preconditioned)


class GraB(Learnt):
    """Gradients minus the mean of the epoch before cancel each other; all units are one stream.

    Args:
        unit: examples of a unit; by default those of a micro-batch (``micro``, or a worker's share of the first step).
        sketch: numbers that are kept and sent of each gradient (256).
        exact: compare whole gradients, for comparison; needs ``Probe(exact=True)``.
        preconditioned: balance gradients as the optimizer divides them, as in :class:`PairBalance`; their mean is that
            of the epoch before, divided as it was there.
        rule: how signs are chosen: :class:`Greedy`, :class:`Walk`, :class:`Halving`.
    """

    def __init__(
        self,
        *,
        unit: int | None = None,
        sketch: int | None = None,
        exact: bool = False,
        preconditioned: bool = False,
        rule: Rule | None = None,
    ) -> None:
        self.rule = rule or Greedy()
        super().__init__(partial(MeanBalancer, rounded=not exact), unit, OneStream(), sketch, exact, preconditioned)
