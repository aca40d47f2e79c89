"""How the learning rate follows the batch."""

from paceline.lr.adascale import AdaScale, gain
from paceline.lr.constant import Constant
from paceline.lr.pace import Pace
from paceline.lr.scales import Scales, Scaling
from paceline.lr.scaling import Linear, SquareRoot

__all__ = ["AdaScale", "Constant", "Linear", "Pace", "Scales", "Scaling", "SquareRoot", "gain"]
