"""What the workers told each other: as a round, and whether it fits together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from paceline.errors import WorkersDisagree
from paceline.records import Meeting, Note, Plan, Round, combine

__all__ = ["both", "compare_models", "compare_plans", "ends", "pauses", "round_of"]


def round_of(plan: Plan, meeting: Meeting) -> Round:
    """What a round of several steps has come to; ``plan`` is that of its last step."""
    return Round(plan, meeting.notes, meeting.stats, meeting.apart, meeting.background)


def compare_plans(notes: tuple[Note, ...], step: int) -> None:
    """Workers that did as many steps must have followed the same plans."""
    if all(note.plan == notes[0].plan for note in notes):  # in nearly every step
        return
    groups: defaultdict[float, dict[int, float]] = defaultdict(dict)
    for rank, note in enumerate(notes):
        groups[note.steps][rank] = note.plan
    for plans in groups.values():
        first, plan = next(iter(plans.items()))
        other = [rank for rank, theirs in plans.items() if theirs != plan]
        if other:
            raise WorkersDisagree(
                f"the plan of step {step} differs between workers (ranks {other} against rank {first}): a role decided "
                "from something that is not the same everywhere"
            )


def compare_models(skipped: Sequence[float], step: int) -> None:
    """Where gradients are averaged, workers of which some have stepped, and others not, have different models."""
    ranks = [rank for rank, without in enumerate(skipped) if without]
    if 0 < len(ranks) < len(skipped):
        raise WorkersDisagree(
            f"optimizer.step() was called in step {step} on some workers, but not on ranks {ranks}: their models "
            "differ since then; call it on all workers or on none, whatever one of them has seen"
        )


def pauses(meeting: Meeting) -> bool:
    """Whether all have to come together now: to stop, or to save, where one may be waiting who has left the loop."""
    return any(note.stop for note in meeting.notes) or bool(meeting.notes[0].save)


def ends(notes: Sequence[Note]) -> bool:
    """Whether the loop ends here, on all workers."""
    return any(note.final or note.stop for note in notes)


def both(first: Meeting | None, second: Meeting) -> Meeting:
    """One meeting for two, one after the other."""
    if first is None:
        return second
    # What was measured belongs to one step: that of the later round, if there was one.
    names = ("units", "unit_sqnorm", "measured", "own_sqnorm")
    found = second if second.stats is not None else first
    notes = tuple(
        msgspec.structs.replace(
            combine(one, other),
            busy_seconds=one.busy_seconds + other.busy_seconds,
            **{name: getattr(its, name) for name in names},
        )
        for one, other, its in zip(first.notes, second.notes, found.notes, strict=True)
    )
    return Meeting(notes, second.apart, second.background, found.stats)
