"""``paceline probe`` in a cluster with slow links."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app
from tests.lab.needs import needs_lab


@needs_lab
def test_slow_links_are_seen(tmp_path: Path) -> None:
    file, out = tmp_path / "slow.toml", tmp_path / "found.json"
    file.write_text('[[worker]]\ncount = 2\ncpu = 0.9\nrate = "20mbit"\n')
    found = CliRunner().invoke(app, ["probe", "--cluster", str(file), "--seconds", "2", "--out", str(out)])
    assert found.exit_code == 0, found.output
    (link,) = json.loads(out.read_text())["survey"]["links"]
    assert link["bytes_per_second"] < 4e6  # 2.5 MB, and what a bucket holds at the beginning
