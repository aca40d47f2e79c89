"""How numbers look on the wire."""

from paceline.codec.identity import Identity

__all__ = ["Identity"]
