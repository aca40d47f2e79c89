"""Workers of different speeds: who trains fastest on them, and what do shares by speed bring?

Run as ``python benchmarks/uneven.py --target 0.9``; the options are those of ``contest.py``. Root, for the lab.
"""

from __future__ import annotations

import sys

from benchmarks import contest
from benchmarks.contestants import UNEVEN

if __name__ == "__main__":
    contest.main(["--cluster", "uneven", *sys.argv[1:]], UNEVEN)
