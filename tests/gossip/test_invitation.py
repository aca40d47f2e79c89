"""The file that lets a worker come back: for whom it is, and what if it is not one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from paceline.errors import SettingError
from paceline.gossip.entrance import VARIABLE, Entrance
from paceline.gossip.invitation import Invitation, accept, answers, invite, withdraw
from paceline.gossip.keys import make_secret
from paceline.sync import Gossip


def test_it_comes_back_as_it_was_and_is_for_its_user_alone(tmp_path: Path) -> None:
    invitation = Invitation(make_secret(plain=False), 3, ["tcp://127.0.0.1:1234"])
    assert accept(tmp_path / "file") is None
    for _ in range(2):  # of two runs, the later counts
        invite(tmp_path / "file", invitation)
    assert accept(tmp_path / "file") == invitation
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    withdraw(tmp_path / "file")
    withdraw(tmp_path / "file")
    assert accept(tmp_path / "file") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"secret": 5}'])
def test_what_is_no_invitation(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SettingError, match=r"file is not an invitation to a swarm \(.*remove it"):
        accept(tmp_path / "file")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"cannot be written .*give a file in a folder where you may write"):
        invite(tmp_path / "no" / "file", Invitation(make_secret(plain=True), 2, []))


def test_the_key_goes_to_no_file_that_was_there_before(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    invitation = Invitation(make_secret(plain=False), 2, [])
    elsewhere.write_bytes(b"of somebody else")
    path.symlink_to(elsewhere)
    invite(path, invitation)
    assert elsewhere.read_bytes() == b"of somebody else"
    assert not path.is_symlink()
    assert accept(path) == invitation
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["elsewhere", "file"]


def test_workers_of_two_machines_may_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a folder, and may have the same process id."""
    path, usual = tmp_path / "file", os.replace
    first, second = (Invitation(make_secret(plain=False), size, []) for size in (2, 3))

    def meanwhile(draft: str, to: Path) -> None:
        monkeypatch.setattr(os, "replace", usual)
        invite(path, second)
        assert accept(path) == second
        usual(draft, to)

    monkeypatch.setattr(os, "replace", meanwhile)
    invite(path, first)
    assert accept(path) == first
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_no_draft_is_left_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(SettingError, match="cannot be written"):
        invite(tmp_path / "file", Invitation(make_secret(plain=False), 2, []))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_whether_anybody_listens() -> None:
    with socket.socket() as ear:
        ear.bind(("127.0.0.1", 0))
        ear.listen()
        there = f"tcp://127.0.0.1:{ear.getsockname()[1]}"
        assert answers(Invitation(make_secret(plain=True), 2, ["tcp://127.0.0.1:9", there]))
    assert not answers(Invitation(make_secret(plain=True), 2, [there, "nonsense"]))


def test_as_another_worker_than_there_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with socket.socket() as ear:
        ear.bind(("127.0.0.1", 0))
        ear.listen()
        there = f"tcp://127.0.0.1:{ear.getsockname()[1]}"
        invite(tmp_path / "file", Invitation(make_secret(plain=True), 2, [there]))
        with pytest.raises(SettingError, match=r"has 2 workers, but this one was started as rank 3 of 4; start it as"):
            Gossip(2, invitation=tmp_path / "file").join(1.0)


def test_what_was_left_by_a_run_that_has_died_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    invite(tmp_path / "file", Invitation(make_secret(plain=True), 2, ["tcp://127.0.0.1:9"]))
    fleet = Gossip(2, invitation=tmp_path / "file").join(1.0)
    assert fleet.size == 1  # it begins as if there were no file
    fleet.close()


def test_it_says_where_members_listen_now(tmp_path: Path) -> None:
    entrance = Entrance(tmp_path / "file")
    entrance.keep({"tcp://127.0.0.1:1"})  # before the run has begun there is nothing to keep
    assert accept(tmp_path / "file") is None
    entrance._invitation = Invitation(make_secret(plain=False), 2, ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"])
    entrance.keep({"tcp://127.0.0.1:2", "tcp://127.0.0.1:1"})  # nothing new
    assert accept(tmp_path / "file") is None
    entrance.keep({"tcp://127.0.0.1:2", "tcp://127.0.0.1:3"})
    found = accept(tmp_path / "file")
    assert found is not None
    assert found.addresses == ["tcp://127.0.0.1:2", "tcp://127.0.0.1:3"]
    assert found.secret == entrance._invitation.secret
    entrance.close()
    assert accept(tmp_path / "file") is None


def test_an_invitation_that_cannot_be_written_any_more_does_not_end_the_training(tmp_path: Path) -> None:
    entrance = Entrance(tmp_path / "gone" / "file")
    entrance._invitation = Invitation(make_secret(plain=False), 2, [])
    with pytest.warns(UserWarning, match="cannot be written .* who is started again may not find the run"):
        entrance.keep({"tcp://127.0.0.1:3"})


def test_a_launcher_may_say_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Entrance(None).path is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    assert Entrance(None).path == tmp_path / "file"
    assert Entrance(tmp_path / "own").path == tmp_path / "own"
