"""What workers exchange one by one, over more than one event: for a line, a point or a whole run."""

from __future__ import annotations

import math

import msgspec
from rich.filesize import decimal

from paceline.events import Gossiped

__all__ = ["sentence", "together"]

SUMS = (
    "exchanges",
    "refusals",
    "timeouts",
    "lost",
    "late",
    "wider",
    "bytes_sent",
    "bytes_received",
    "unheard",
    "strangers",
)


def together(before: Gossiped | None, event: Gossiped) -> Gossiped:
    """Two events as one, which stands where the later does: sums, means over exchanges, and the latest of the rest."""
    if before is None:
        return event
    moves = before.exchanges + before.late, event.exchanges + event.late
    apart = _mean([_square(before.distance), _square(event.distance)], moves)
    return msgspec.structs.replace(
        event,
        **{name: getattr(before, name) + getattr(event, name) for name in SUMS},
        bits=_mean([before.bits, event.bits], (before.exchanges, event.exchanges)),
        staleness=_mean([before.staleness, event.staleness], moves),
        distance=None if apart is None else math.sqrt(apart),
        spread=before.spread if event.spread is None else event.spread,
        partner=before.partner if event.partner is None else event.partner,
    )


def sentence(event: Gossiped) -> str:
    """An event as people read it; what did not happen is left out."""
    failed = [f"{event.timeouts:,} failed"] if event.timeouts else []
    failed += [f"{event.lost:,} of them lost"] if event.lost else []
    failed += [f"{event.late:,} late"] if event.late else []
    told = [f"{event.members} of {event.known} members", f"{event.exchanges:,} exchanges"]
    told += [f"{event.refusals:,} refused"] if event.refusals else []
    told += [", ".join(failed)] if failed else []
    told += [f"last with {event.partner}"] if event.partner is not None else []
    told += [f"{event.distance:.3g} apart"] if event.distance is not None else []
    told += [f"spread {event.spread:.3g}"] if event.spread is not None else []
    told += [f"{event.bits:.3g} bits{_wider(event)}"] if event.bits is not None else []
    told += [f"{decimal(event.bytes_sent)} sent"]
    told += [f"{event.strangers:,} strangers"] if event.strangers else []
    told += [f"{event.unheard - event.strangers:,} letters unheard"] if event.unheard > event.strangers else []
    told += [f"by {event.kernel}"] if event.kernel is not None else []
    return "  ".join(told)


def _wider(event: Gossiped) -> str:
    return f" ({event.wider:,} wider)" if event.wider else ""


def _square(value: float | None) -> float | None:
    return None if value is None else value**2


def _mean(values: list[float | None], weights: tuple[int, int]) -> float | None:
    """Of those that are known; one that nothing was exchanged for counts once."""
    known = [(value, max(weight, 1)) for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None
