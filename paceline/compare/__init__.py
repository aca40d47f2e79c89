"""The same task under several settings, trained one after the other, and a report on all of them.

``paceline compare`` does all of it. From Python, :func:`read_trial` reads what any run has recorded, and :func:`page`
makes the report of such trials.
"""

from paceline.compare.page import page
from paceline.compare.rows import Row, cells, rows, terminal_table
from paceline.compare.settings import SETTINGS
from paceline.compare.trial import Piece, Point, Trial, read_trial

__all__ = ["SETTINGS", "Piece", "Point", "Row", "Trial", "cells", "page", "read_trial", "rows", "terminal_table"]
