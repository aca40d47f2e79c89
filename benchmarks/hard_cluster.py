"""The hard cluster: uneven machines behind slow links. Who trains best there: peers, our methods alone, or recipes?

    python benchmarks/hard_cluster.py --task fashion-mnist --seeds 3
    python benchmarks/hard_cluster.py --task cifar10 --seeds 3 --unreliable

The options are those of ``contest.py``. What came of each training is kept, so that this can be interrupted and go on,
and workers train alone between the contestants, for the efficiency. Root, for the lab.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from benchmarks import contest
from benchmarks.contest import Usual
from benchmarks.contestants import HARD

CLUSTER = Path(__file__).with_name("hard-cluster.toml")
USUAL = {**contest.USUAL, "fashion-mnist": Usual("cnn", 0.9)}
ALONE = 15.0  # seconds

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and files are gone then, too
    contest.main(["--cluster", str(CLUSTER), "--alone", str(ALONE), "--keep", *sys.argv[1:]], HARD, usual=USUAL)
