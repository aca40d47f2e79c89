"""The run: the one file that knows all roles."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline import snapshot
from paceline.balance import Even
from paceline.batch import as_policy
from paceline.checkpoint import Checkpoint
from paceline.clock import Clock
from paceline.errors import Interrupted, LoopError, SettingError
from paceline.events import Measured, Resumed, Saved
from paceline.feed import Feed, Loading, check_dataset
from paceline.fleet import Fleet
from paceline.goal import Goal
from paceline.identity import identity
from paceline.journal import Journal
from paceline.loader import Collate
from paceline.loop import Loop
from paceline.lr import Constant
from paceline.machinery import Machinery
from paceline.measure import Measure
from paceline.memory import Memory, advise
from paceline.order import Shuffle
from paceline.planner import Cursor
from paceline.probe import Probe
from paceline.records import Progress
from paceline.replica import Replica
from paceline.role_check import check_balance, check_roles, compares_within, mind_local_noise, needs_of
from paceline.roles import Balance, Batch, LearningRate, Order, Recorder, Stateful, Sync, Unmet
from paceline.settings import check_settings
from paceline.step import Phase, Step
from paceline.sync import AllReduce
from paceline.together import come_together, lend_average, refuse_in_consensus, refuse_within_a_round

__all__ = ["Run"]


class Run:
    """Trains a model on a data set, alone or with all workers that the launcher has started.

    Args:
        model: any module, or one wrapped in ``DistributedDataParallel``.
        optimizer: any torch optimizer over its parameters.
        dataset: a map-style data set.
        batch: examples in a step, all workers together; a whole number means ``batch.Fixed``.
        order: which examples come next.
        balance: who takes how many of them.
        sync: when, what and with whom to average.
        lr: how the learning rate follows the batch.
        micro: the largest number of examples in one forward pass; by default a worker's whole share.
        local_data: ``dataset`` holds this worker's own examples, and every worker goes through its own.
        seed: for the order of the examples and for random numbers in the data set.
        collate_fn: as in torch's ``DataLoader``, as are ``num_workers`` and ``pin_memory``.
        num_workers: loader processes of each worker; 0 loads in the training process.
        prefetch: micro-batches that each loader process works ahead (2).
        pin_memory: copy tensors to page-locked memory first (for GPUs).
        scaler: a ``GradScaler``; ``step.backward`` then scales the loss (do not scale it yourself).
        stateful: more objects with a ``state_dict`` to save and restore, by name: schedulers, averages.
        probe: how gradient statistics are measured, where a role asks for them.
        record: where the events go: recorders, or a folder for all that ``record.folder`` makes; on rank 0 only, but
            under Gossip on every worker, each in a folder of its own.
        checkpoint: when and where to save by itself.
        deadline: the longest wait for other workers, in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any],
        *,
        batch: int | Batch,
        order: Order = Shuffle(),
        balance: Balance = Even(),
        sync: Sync | None = None,
        lr: LearningRate = Constant(),
        micro: int | None = None,
        local_data: bool = False,
        seed: int = 0,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        prefetch: int | None = None,
        pin_memory: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        probe: Probe | None = None,
        record: Sequence[Recorder] | str | Path = (),
        checkpoint: Checkpoint | None = None,
        deadline: float = 300.0,
    ) -> None:
        flags = {"local_data": local_data, "pin_memory": pin_memory}
        check_settings(micro, seed, deadline, scaler, stateful, record, checkpoint, **flags)
        length = check_dataset(dataset)
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.order, self.balance, self.sync, self.lr = order, balance, sync or AllReduce(), lr
        self.batch, self.probe = as_policy(batch), probe or Probe()
        check_roles(self.roles(), optimizer, probe, local_data)
        self.stateful, self.checkpoint = dict(stateful or {}), checkpoint
        self.micro, self.local_data, self.seed, self.length = micro, local_data, seed, length
        self._closed = False
        self._iterator: Callable[[], Generator[Step] | None] = lambda: None
        self.fleet = self.sync.join(deadline) if isinstance(self.sync, Unmet) else Fleet.join(deadline)
        self.checkpoint = snapshot.own_policy(self)
        attached = ExitStack()
        try:
            self._replica = Replica(model, optimizer)
            self.fleet.agree(identity(self))
            self._replica.equalise(self.fleet)
            gathered = self.fleet.gather(str(length).encode(), "the lengths of the others' data sets")
            self.lengths = tuple(map(int, gathered)) if local_data else (length,)
            self._loop = Loop(self)
            first = self._loop.plan(self._loop.cursor, None)  # a batch that cannot be split is an error now
            check_balance(balance, self.batch, self.fleet.size, sum(self.lengths), self._replica.synced_norm)
            probe, needs = self.probe, needs_of(self.roles(), self.probe.unit, first)
            apart = local_data and self.fleet.size > 1
            probe.within = apart and compares_within(needs, probe.unit, first, self._replica.ddp is not None)
            if apart and not probe.within and self.fleet.rank == 0:
                mind_local_noise(needs)
            probe.attach(self._replica.module, self._replica.parameters, needs, optimizer)
            attached.callback(probe.detach)
            self._loop.lessons.begin(self.lengths, first, probe)
            self.sync.attach(self.fleet, self._replica, probe)
            attached.callback(self.sync.detach)
            # Torch's generators use 32 bits of a seed.
            own_seed = seed + (1_000_003 * self.fleet.rank if local_data else 0)
            loading = Loading(collate_fn, num_workers, prefetch, pin_memory, deadline)
            feed = Feed(dataset, order, self.fleet.rank, own_seed, self._replica.device, loading)
            self._journal = Journal(record, self.fleet.rank, each=isinstance(self.sync, Unmet))
            self.fleet.meanwhile = self._journal.catch_up
        except BaseException as error:
            attached.close()
            self.fleet.fail(error)
            self.fleet.close()
            raise
        measure = Measure(self.fleet, probe)
        wants = self._loop.wishes, self._loop.looks
        own = Clock(), Memory(in_pieces=micro is not None), self._replica, scaler
        self._parts = Machinery(self.fleet, feed, self.sync, probe, measure, *own, *wants)
        self._loop.equip(self._parts, self._journal)

    @property
    def replica(self) -> Replica:
        """The model and optimizer as the roles see them."""
        if hasattr(self, "_loop"):  # it is asked for before there is one
            self._loop.absence.settle()
        return self._replica

    @property
    def progress(self) -> Progress:
        """Steps, epochs and examples done."""
        self._loop.absence.settle()
        return self._loop.progress

    @property
    def cursor(self) -> Cursor:
        """Where the run stands in its data."""
        self._loop.absence.settle()
        return self._loop.cursor

    def roles(self) -> dict[str, object]:
        """The roles by name."""
        return {"order": self.order, "batch": self.batch, "balance": self.balance, "sync": self.sync, "lr": self.lr}

    def steps(
        self, *, epochs: int | None = None, examples: int | None = None, steps: int | None = None
    ) -> Iterator[Step]:
        """Train until the run has done so many epochs, examples or steps in all.

        The count is from the beginning of the run, also when it was resumed: the same call ends at the same place.
        """
        goal = Goal(epochs=epochs, examples=examples, steps=steps)
        refuse_in_consensus(self._parts, "run.steps", "train outside of it, and evaluate inside")
        self._loop.absence.settle()
        if self._closed or self._loop.current is not None:
            why = "the run was closed" if self._closed else "another loop over run.steps() has not ended"
            raise LoopError(f"run.steps cannot begin: {why}")
        self._loop.cautions.mind_totals(goal, self._loop.progress)
        loop = self._loop.steps(goal)
        self._iterator = weakref.ref(loop)
        return loop

    def stop(self) -> None:
        """Let all workers end the loop after the same step: the next one that ends. One worker's call is enough."""
        self._loop.stop_wanted = True

    def consensus(self) -> AbstractContextManager[None]:
        """``with run.consensus():`` the model is the average over all workers; all must enter together."""
        current = self._loop.current
        if current is not None and current.phase is Phase.READY and self.scaler is not None:
            # The scaler has skipped the step here, which counts all the same. It must not end yet: where others have
            # stepped, theirs goes on, and with its end they may have to tell each other something.
            self._loop.advance(current)
        refuse_within_a_round(self._loop, "run.consensus")
        return lend_average(self._loop, self._parts)

    def log(self, **values: float) -> None:
        """Record numbers of your own, such as ``run.log(accuracy=0.97)``."""
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:  # torch's, of a tensor with several numbers
                raise SettingError(f"run.log takes numbers, but {name} is {value!r}") from error
        self._journal.write(Measured(time.time(), self.progress.step, numbers))

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint after a step or outside of the loop: all workers must call it, unless under Gossip."""
        refuse_in_consensus(self._parts, "run.save", "call it after the block: the file holds the average, too")
        if (current := self._loop.current) is not None:
            if current.phase is Phase.READY and self.scaler is None:
                raise LoopError(f"run.save was called before optimizer.step() in step {current.index}; call it after")
            self._loop.close_step(current)
        refuse_within_a_round(self._loop, "run.save")
        with self._parts.clock.stopped():
            come_together(self._loop, self.fleet, self.sync, "run.save")
        return self._save(snapshot.own_path(self, Path(path)))

    def _save(self, path: Path) -> Path:
        began = time.perf_counter()
        self._loop.lessons.exchange(self._loop.cursor.progress, self._parts)
        with self._parts.clock.stopped():
            path, size = snapshot.save(self, path)
        self._journal.write(Saved(time.time(), self.progress.step, str(path), size, time.perf_counter() - began))
        return path

    def resume(self, path: str | Path, *, missing_ok: bool = False) -> bool:
        """Go on from a checkpoint file, or from the newest sound one of a folder; the number of workers may differ.

        Rank 0 reads it and sends it to the others; under Gossip each reads its own. With ``missing_ok``, nothing found
        is no error: False is returned.
        """
        refuse_in_consensus(self._parts, "run.resume", "call it before the block")
        self._loop.absence.settle()
        if self._loop.current is not None:
            raise LoopError("run.resume was called inside of the loop over run.steps(); call it before")
        found = snapshot.find(self, Path(path), missing_ok)
        if found is not None:
            file, tree = found
            self._loop.cursor = snapshot.restore(self, tree)
            self._parts.feed.forget()
            self._parts.skipped = False
            self._journal.write(Resumed(time.time(), self.cursor.progress.step, str(file), tree["workers"]))
        return snapshot.resumed(self, found is not None)

    def close(self) -> None:
        """Remove all hooks, end loader processes and records, leave the fleet."""
        try:
            if (loop := self._iterator()) is not None:
                loop.close()  # it was left, but somebody holds it: a progress bar, say
            self._loop.absence.settle()
        finally:
            self._closed = True
            self._loop.hooks.remove()
            self.sync.detach()
            self._parts.probe.detach()
            self._parts.feed.close()
            self._journal.close()
            self.fleet.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Interrupted):
            advise(error)
            self._parts.failure = type(error).__name__  # whoever still holds the loop's iterator: it was no break
            self._loop.absence.give_up()
            self.fleet.fail(error)
        self.close()

    def save_by_itself(self) -> None:
        """Save where the checkpoint policy says, if there is one: all workers must call it."""
        if self.checkpoint:
            self._save(self.checkpoint.path(self.progress.step))
            if snapshot.writes(self):
                self.checkpoint.mark(time.monotonic())
                self.checkpoint.prune()
