"""Equal shares."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Even"]


@dataclass(frozen=True)
class Even:
    """Everybody takes the same; where that leaves a remainder, the lower ranks take one more. The default."""

    def split(self, batch: int, workers: int) -> list[int]:
        """Shares that differ by at most one."""
        share, rest = divmod(batch, workers)
        return [share + (rank < rest) for rank in range(workers)]
