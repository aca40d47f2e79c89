"""How many examples a step takes, all workers together."""

from paceline.batch.fixed import Fixed, Schedule

__all__ = ["Fixed", "Schedule"]
