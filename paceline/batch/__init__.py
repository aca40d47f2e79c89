"""How many examples a step takes, all workers together."""

from paceline.batch.fixed import Fixed, Schedule, as_policy

__all__ = ["Fixed", "Schedule", "as_policy"]
