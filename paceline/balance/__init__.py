"""Who takes how many of the examples of a step."""

from paceline.balance.by_speed import BySpeed
from paceline.balance.even import Even
from paceline.balance.fixed import Fixed

__all__ = ["BySpeed", "Even", "Fixed"]
