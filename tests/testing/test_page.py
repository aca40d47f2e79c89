"""The example of the documentation, as somebody would paste it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"


def test_the_example_passes(tmp_path: Path) -> None:
    files = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in files:
        (tmp_path / name).write_text(text)
    assert [name for name, _ in files] == ["conftest.py", "test_training.py"]
    # Links are cut in the tests of the lab.
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-k", "not link", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment, check=False
    )
    assert "2 passed, 1 deselected" in done.stdout, done.stdout + done.stderr
