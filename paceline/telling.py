"""What a worker tells the others of a step, and what comes of it where they average its gradients."""

from __future__ import annotations

import math

from paceline.losses import Losses
from paceline.machinery import Machinery
from paceline.records import Note, Plan, Round

__all__ = ["note_of", "round_of_step"]


def note_of(parts: Machinery, plan: Plan, losses: Losses) -> Note:
    """What this worker has computed in a step; its gradients are laid together for their journey meanwhile."""
    # Before anything is laid together to be sent, which may change what is in .grad.
    within = parts.probe.within and parts.probe.measuring and bool(losses)
    own_sqnorm = parts.probe.own_sqnorm() if within else 0.0
    units, unit_sqnorm = parts.probe.numbers(parts.sync.collect(plan))
    stop, save = parts.wishes()
    loss, weight = losses.sum(), sum(losses.weights)
    parts.clock.computed()  # reading the losses has waited for the device, where there is one
    return Note(
        plan=plan.digest(),
        examples=plan.counts[parts.fleet.rank],
        weight=weight,
        loss=loss,
        stop=stop,
        save=save,
        load_seconds=parts.clock.load,
        compute_seconds=parts.clock.compute,
        busy_seconds=parts.clock.busy,
        units=units,
        unit_sqnorm=math.nan if parts.probe.mixed() else unit_sqnorm,
        measured=weight if within else 0.0,
        own_sqnorm=own_sqnorm,
        most=parts.memory.largest_share,
        skipped=float(parts.skipped),
    )


def round_of_step(parts: Machinery, plan: Plan, notes: tuple[Note, ...]) -> Round:
    """What all have told of a step, and the statistics of its gradients if it was measured: ``.grad`` is their mean."""
    stats = coordinates = None
    if parts.probe.measuring:
        scale = parts.scaler.get_scale() if parts.scaler is not None else 1.0
        sqnorm = parts.probe.mean_sqnorm(scale, parts.sync.flat_gradients())
        stats = parts.measure.stats(notes, sqnorm, scale, plan.step)
        coordinates = parts.measure.coordinates(stats, scale, plan.step)
        if parts.measure.bytes_sent:
            parts.sync.bytes_sent += parts.measure.bytes_sent
            parts.clock.exchanged_more()
    return Round(plan=plan, notes=notes, stats=stats, coordinates=coordinates)
