from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import SettingError
from paceline.lab import Cluster, Link, example_files, find_cluster, read_cluster
from paceline.lab.cluster import parse_rate, show_rate

TWO = """
[[worker]]
cpu = 0.5
rate = "100mbit"
count = 2
"""


def read(tmp_path: Path, text: str, cores: int = 2) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_cluster(path, cores)


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        [[site]]
        name = "here"
        up = "10mbit"
        down = "20mbit"

        [[worker]]
        name = "big"
        rate = "1gbit"

        [[worker]]
        name = "small"
        count = 2
        cpu = 0.25
        rate = "2.5mbit"
        site = "here"

        [[event]]
        at = 9
        do = "restore"
        site = "here"

        [[event]]
        at = 1.5
        do = "set"
        worker = "small-1"
        cpu = 0.1
        rate = "64kbit"

        [[event]]
        at = 2
        do = "cut"
        site = "here"

        [[event]]
        at = 3
        do = "start"
        worker = "big"
        """,
    )
    assert [(each.name, each.rank, each.cpu, each.site) for each in found.workers] == [
        ("big", 0, 1.0, None),
        ("small-0", 1, 0.25, "here"),
        ("small-1", 2, 0.25, "here"),
    ]
    assert found.workers[1].link == Link(2_500_000, 2_500_000)
    assert found.sites[0].link == Link(10_000_000, 20_000_000)
    assert [str(event) for event in found.events] == [
        "set small-1 cpu 0.1, 64kbit up, 64kbit down",
        "cut here",
        "start big",
        "restore here",
    ]
    assert found.late == {"big"}


def test_the_examples_can_be_built_on_two_cores() -> None:
    files = example_files()
    assert set(files) == {"even", "uneven", "slow", "two-sites", "hard", "disturbed"}
    for path in files.values():
        assert read_cluster(path, cores=2).workers
    assert [worker.cpu for worker in read_cluster(files["uneven"], 2).workers] == [1, 0.5, 0.25]
    assert find_cluster("slow") == files["slow"]


@pytest.mark.parametrize(("rate", "bits"), [("8kbit", 8_000), ("100mbit", 10**8), ("2.5 Gbit", 25 * 10**8)])
def test_rates(rate: str, bits: int) -> None:
    assert parse_rate(rate) == bits
    assert parse_rate(show_rate(bits)) == bits


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[worker]\n", r"mine.toml is not a TOML file that can be read: .*line 1"),
        ("", r"mine.toml: Object missing required field `worker`"),
        ("worker = []", r"0 workers: there must be from 1 to 64"),
        (TWO + "speed = 3", r"Object contains unknown field `speed` - at `\$.worker\[0\]`"),
        ("[[machine]]\nname = 'a'\n" + TWO, r"unknown field `machine`"),
        ("[[worker]]\ncpu = 0.5", r"worker 'w0' needs a rate for both directions: rate = '100mbit', or up = "),
        ("[[worker]]\nup = '1mbit'", r"worker 'w0' needs a rate for both directions"),
        ("[[worker]]\nrate = '1mbit'\nup = '1mbit'", r"worker 'w0' has rate and up or down; write either"),
        ("[[worker]]\nrate = '0mbit'", r"a rate of '0mbit' cannot be built; it must be from 8kbit to 100gbit"),
        ("[[worker]]\nrate = 'fast'", r"a rate of 'fast' is not understood; write a number and a unit"),
        ("[[worker]]\nrate = 100", r"Expected `str \| null`, got `int` - at `\$.worker\[0\].rate`"),
        ("[[worker]]\nrate = '1mbit'\ncpu = 3.0", r"need 3 cores together, but this machine has 2; lower their cpu"),
        ("[[worker]]\nrate = '1mbit'\ncount = 3", r"the workers need 3 cores together"),
        ("[[worker]]\nrate = '1mbit'\ncpu = 0.0", r"worker 'w0' has cpu = 0; it must be at least 0.02"),
        ("[[worker]]\nrate = '1mbit'\ncpu = nan", r"worker 'w0' has cpu = nan"),
        ("[[worker]]\nrate = '1mbit'\ncount = 0", r"a worker has count = 0; it must be from 1 to 64"),
        ("[[worker]]\nrate = '1mbit'\ncount = 1000000000", r"count = 1000000000; it must be from 1 to 64"),
        ("[[worker]]\nrate = '1mbit'\nup = ''", r"worker 'w0' has rate and up or down"),
        ("[[worker]]\nup = ''\ndown = '1mbit'", r"a rate of '' is not understood"),
        (f"[[worker]]\nrate = '{'9' * 400}mbit'", r"a rate of '9+mbit' is not understood"),
        ("[[worker]]\nrate = '1mbit'\nname = 'localhost'", r"the worker name 'localhost' cannot be used"),
        ("[[worker]]\nrate = '1mbit'\nname = ''", r"the worker name '' cannot be used"),
        ("[[worker]]\nrate = '1mbit'\nname = 'My Box'", r"the worker name 'My Box' cannot be used: it must begin"),
        (TWO + "[[worker]]\nname = 'w1'\nrate = '1mbit'", r"the name 'w1' is used twice"),
        (TWO + "site = 'x'", r"worker 'w0' is at site 'x', which is not described; there is no \[\[site\]\]"),
        (TWO + "[[site]]\nname = 'x'\nrate = '1mbit'", r"no worker is at site 'x'; give one site = 'x'"),
        (TWO + "[[event]]\nat = 1\ndo = 'kill'", r"the event at 1 s needs one target: worker = … or site = …"),
        (TWO + "[[event]]\nat = 1\ndo = 'kill'\nworker = 'w7'", r"worker 'w7', which does not exist; there are w0, w1"),
        (TWO + "[[event]]\nat = 1\ndo = 'cut'\nsite = 'x'", r"site 'x', which is not described"),
        (TWO + "[[event]]\nat = -1\ndo = 'kill'\nworker = 'w0'", r"the event at -1 s must be at 0 seconds or later"),
        (TWO + "[[event]]\nat = 1\ndo = 'explode'\nworker = 'w0'", r"Invalid enum value 'explode'"),
        (TWO + "[[event]]\nat = 1\ndo = 'set'\nworker = 'w0'", r"sets nothing; give it cpu, or rate"),
        (TWO + "[[event]]\nat = 1\ndo = 'kill'\nworker = 'w0'\ncpu = 1.0", r"so cpu, rate, up and down have no effect"),
        (TWO + "[[event]]\nat = 1\ndo = 'set'\nworker = 'w0'\ncpu = 0.0", r"sets cpu = 0; it must be at least 0.02"),
        (TWO + "[[event]]\nat = 4\ndo = 'set'\nworker = 'w0'\ncpu = 1.9", r"need 2.4 cores from 4 s on together"),
        (TWO + "[[event]]\nat = 1\ndo = 'thaw'\nworker = 'w0'", r"\(thaw w0\) has no effect: there is no 'freeze'"),
        (
            TWO + "[[event]]\nat = 1\ndo = 'kill'\nworker = 'w0'\n[[event]]\nat = 2\ndo = 'freeze'\nworker = 'w0'",
            r"comes after the worker was killed",
        ),
        (
            TWO + "[[event]]\nat = 1\ndo = 'kill'\nworker = 'w0'\n[[event]]\nat = 2\ndo = 'start'\nworker = 'w0'",
            r"comes before the worker is started",
        ),
        (
            TWO + "[[event]]\nat = 1\ndo = 'cut'\nworker = 'w0'\n[[event]]\nat = 2\ndo = 'cut'\nworker = 'w0'",
            r"has no effect: it is in that state already",
        ),
        (
            TWO + "[[event]]\nat = 1\ndo = 'start'\nworker = 'w0'\n[[event]]\nat = 2\ndo = 'start'\nworker = 'w0'",
            r"starts a worker that runs already",
        ),
        (
            "[[site]]\nname = 'x'\nrate = '1mbit'\n[[event]]\nat = 1\ndo = 'freeze'\nsite = 'x'\n" + TWO + "site = 'x'",
            r"cannot happen to a site: only its link can be set, cut and restored",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        read(tmp_path, text)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"there is no cluster file 'quick', and no example .* are disturbed, even,"):
        find_cluster("quick")
