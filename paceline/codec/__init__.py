"""How numbers look on the wire."""

from paceline.codec.half import BFloat16, Half
from paceline.codec.identity import Identity
from paceline.codec.lattice import Lattice
from paceline.codec.uniform import Uniform8

__all__ = ["BFloat16", "Half", "Identity", "Lattice", "Uniform8"]
