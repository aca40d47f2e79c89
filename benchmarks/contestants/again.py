"""Start a worker again when it has failed, as one would who gives the same command on all machines once more.

Run as ``python -m benchmarks.contestants.again RESTARTS MODULE ARGUMENTS``. Every life has a port of its own, so that
nobody finds the meeting place of the life before.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.contestants.race import LIFE
from paceline.cli import worker
from paceline.cli.failures import shell_code


def main() -> None:
    restarts, command = int(sys.argv[1]), sys.argv[2:]
    code, port = 1, int(os.environ["MASTER_PORT"])
    for life in range(restarts + 1):
        told = {**os.environ, "MASTER_PORT": str(port + life), LIFE: str(life)}
        # A session of its own: when the worker is killed with what it has started, this is not.
        words = [sys.executable, worker.__file__, "-m", *command]
        code = subprocess.Popen(words, env=told, start_new_session=True).wait()
        if code == 0:
            break
        print(f"life {life} ended with code {code}", flush=True)
    sys.exit(shell_code(code))


if __name__ == "__main__":
    main()
