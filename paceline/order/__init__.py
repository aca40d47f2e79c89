"""Which examples come next."""

from paceline.order.shuffle import Sequential, Shuffle, ShuffleOnce

__all__ = ["Sequential", "Shuffle", "ShuffleOnce"]
