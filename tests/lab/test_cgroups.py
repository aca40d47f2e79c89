"""Version 2 of the hierarchy, on files that look like it: what is written where, and what is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import LabError
from paceline.lab.cgroups import FOLDER, CpuGroup, Hierarchy, Use, find_hierarchy, groups, wait_until


def test_finding_the_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    old = "cgroup /a/cpu cgroup rw,relatime,cpu 0 0\ncgroup /a/acct cgroup rw,cpuacct 0 0\n"
    both = "cgroup /a/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n"
    new = f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\n"
    assert find_hierarchy(old + new) == Hierarchy(1, Path("/a/cpu"), Path("/a/acct"))
    assert find_hierarchy(both).roots == (Path("/a/cpu,cpuacct"),)
    assert find_hierarchy(new) == Hierarchy(2, tmp_path, tmp_path)
    (tmp_path / "cgroup.controllers").write_text("memory\n")  # the processor is controlled elsewhere
    with pytest.raises(LabError, match=r"no cgroup hierarchy with the controller 'cpu' is mounted"):
        find_hierarchy(new)


def test_version_2(tmp_path: Path) -> None:
    hierarchy = Hierarchy(2, tmp_path, tmp_path)
    group = CpuGroup(hierarchy, "w0")
    group.create(0.25)
    folder = tmp_path / FOLDER / "w0"
    assert (folder / "cpu.max").read_text() == "5000 20000"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / FOLDER / "cgroup.subtree_control").read_text() == "+cpu"
    assert not (folder / "cgroup.subtree_control").exists()  # the group with the processes has none below
    assert (tmp_path / FOLDER / "cpu.weight").read_text() == "10000"
    group.set_cpu(1.5)
    assert (folder / "cpu.max").read_text() == "30000 20000"
    group.set_cpu(0.02)  # the kernel takes no quota below a millisecond
    assert (folder / "cpu.max").read_text() == "1000 50000"
    group.set_cpu(0.25)
    (folder / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\nnr_throttled 90\nthrottled_usec 1500000\n")
    assert group.use() == Use(2.5, 1.5)
    (folder / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\nnr_throttled 50\nthrottled_usec 1500000\n")
    assert group.use() == Use(2.5, 1.0)  # 50 periods of 20 ms: two processors were counted
    assert group.joins == [str(folder / "cgroup.procs")]
    assert groups(hierarchy) == ["w0"]


def test_a_group_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("not a folder")
    with pytest.raises(LabError, match=r"cannot make the control group .*w0"):
        CpuGroup(Hierarchy(2, tmp_path, tmp_path), "w0").create(1.0)


def test_waits_end_and_say_what_for() -> None:
    with pytest.raises(LabError, match=r"waited 0.05 s for the moon, in vain"):
        wait_until(lambda: False, "the moon", 0.05)
