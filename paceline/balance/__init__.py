"""Who takes how many of the examples of a step."""

from paceline.balance.even import Even

__all__ = ["Even"]
