"""Two sites with a slow link between them: does it pay to average inside of a site more often than between sites?

Run as ``python benchmarks/two_sites.py --target 0.85``; the options are those of ``contest.py``. Root, for the lab.
"""

from __future__ import annotations

import sys

from benchmarks import contest
from benchmarks.contestants import SITES

if __name__ == "__main__":
    contest.main(["--cluster", "two-sites", *sys.argv[1:]], SITES)
