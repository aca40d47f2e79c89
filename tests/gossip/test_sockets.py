"""Real sockets: who is heard, and who is not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import zmq

from paceline.errors import SettingError
from paceline.gossip import sockets
from paceline.gossip.keys import Keys, make_secret
from paceline.gossip.sockets import WAITING, Sockets, check_bind, knock

HOST = "127.0.0.1"


def keys() -> Keys:
    found = make_secret(plain=False).keys
    assert found is not None
    return found


def hear(ears: Sockets, seconds: float) -> list[list[bytes]]:
    """All that comes within so many seconds, or the first if it comes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ears.wait(0.02)
        if (frames := ears.receive()) is not None:
            return [frames]
    return []


def test_an_attempt_to_connect_that_nobody_answers_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a link that was cut: left to the kernel it would be minutes until the next after a long cut."""
    monkeypatch.setattr(sockets, "CONNECTED", 200)
    with socket.socket() as deaf, ExitStack() as crowd, closing(Sockets(HOST, keys(), 10_000)) as ears:
        deaf.bind((HOST, 0))
        deaf.listen(0)
        for _ in range(4):  # whoever comes when the queue is full is not answered
            one = crowd.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
        address = f"tcp://{HOST}:{deaf.getsockname()[1]}"
        ears.send(address, [b"header"])
        monitor = ears._mouths[address].get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        assert monitor.poll(20_000)
        monitor.close()


def notice(ears: Sockets) -> None:
    """That somebody without the key was there is counted."""
    end = time.monotonic() + 10.0
    while not ears.strangers:
        assert time.monotonic() < end
        ears.wait(0.02)


@pytest.fixture
def ours() -> Iterator[tuple[Sockets, Keys]]:
    own = keys()
    with closing(Sockets(HOST, own, 10_000)) as ears:
        yield ears, own


@pytest.mark.parametrize("plain", [False, True])
def test_partners_hear_each_other(plain: bool) -> None:
    own = None if plain else keys()
    with closing(Sockets(HOST, own, 10_000)) as one, closing(Sockets(HOST, own, 10_000)) as other:
        assert one.send(other.address, [b"header", b"payload"])
        assert hear(other, 5.0) == [[b"header", b"payload"]]
        assert other.send(one.address, [b"alone"])
        assert hear(one, 5.0) == [[b"alone"]]
        assert one.strangers == 0


def test_who_has_another_key_is_not_heard(ours: tuple[Sockets, Keys]) -> None:
    ears, own = ours
    with closing(Sockets(HOST, keys(), 10_000)) as stranger:
        stranger.send(ears.address, [b"let me in"])
        assert hear(ears, 0.5) == []
        notice(ears)
    with closing(Sockets(HOST, own, 10_000)) as partner:  # the ears still work
        partner.send(ears.address, [b"hello"])
        assert hear(ears, 5.0) == [[b"hello"]]


def test_who_only_knows_the_public_key_is_not_heard(ours: tuple[Sockets, Keys]) -> None:
    """It is a key of its own that it proves to have, not the run's."""
    ears, own = ours
    context = zmq.Context()
    mouth = context.socket(zmq.DEALER)
    mouth.linger = 0
    public, secret = zmq.curve_keypair()
    mouth.curve_serverkey, mouth.curve_publickey, mouth.curve_secretkey = own.public.encode(), public, secret
    mouth.connect(ears.address)
    mouth.send(b"let me in")
    assert hear(ears, 0.5) == []
    notice(ears)
    context.destroy()


def test_who_has_no_key_is_not_heard(ours: tuple[Sockets, Keys]) -> None:
    ears, _ = ours
    with closing(Sockets(HOST, None, 10_000)) as stranger:
        stranger.send(ears.address, [b"let me in"])
        assert hear(ears, 0.5) == []
    host, _, port = ears.address.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        assert hear(ears, 0.3) == []


def test_what_is_too_long_is_not_taken(ours: tuple[Sockets, Keys]) -> None:
    ears, own = ours
    with closing(Sockets(HOST, own, 10_000)) as partner:
        partner.send(ears.address, [b"header", bytes(20_000)])
        assert hear(ears, 0.5) == []
    with closing(Sockets(HOST, own, 10_000)) as partner:
        partner.send(ears.address, [b"header", bytes(9_000)])
        assert [len(frames[1]) for frames in hear(ears, 5.0)] == [9_000]


@contextmanager
def listening(ears: Sockets) -> Iterator[None]:
    """Somebody has to answer who knocks."""
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            ears.wait(0.02)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("plain", [False, True])
def test_who_knocks_with_the_key_is_no_stranger(plain: bool) -> None:
    own = None if plain else keys()
    with closing(Sockets(HOST, own, 10_000)) as ears:
        with listening(ears):
            assert all(knock(ears.address, own, 10.0) for _ in range(3))
        assert hear(ears, 0.3) == []
        assert ears.strangers == 0


def test_who_knocks_with_another_key_is_refused(ours: tuple[Sockets, Keys]) -> None:
    ears, _ = ours
    with listening(ears):
        assert not knock(ears.address, keys(), 10.0)
    notice(ears)


def test_whether_it_is_worth_to_wait_where_one_has_knocked() -> None:
    assert not knock("tcp://127.0.0.1:9", None, 10.0)
    assert not knock("nonsense", None, 10.0)
    with socket.socket() as ear:
        ear.bind((HOST, 0))
        ear.listen()
        there = f"tcp://{HOST}:{ear.getsockname()[1]}"
        assert knock(there, keys(), 0.2)  # frozen: its connections wait

        def hang_up() -> None:
            for _ in range(2):
                ear.accept()[0].close()

        closes = threading.Thread(target=hang_up)
        closes.start()
        assert not knock(there, keys(), 10.0)  # something else listens there now
        closes.join()


def test_letters_for_nobody_do_not_pile_up() -> None:
    with closing(Sockets(HOST, None, 10_000)) as mouth:
        sent = [mouth.send("tcp://127.0.0.1:9", [b"anybody?"]) for _ in range(WAITING + 5)]
        assert sent == [True] * WAITING + [False] * 5
        assert not mouth.send("tcp://no port", [b"?"])


def test_a_port_that_is_in_use() -> None:
    with closing(Sockets(HOST, None, 100)) as first:
        port = first.address.rpartition(":")[2]
        with pytest.raises(SettingError, match=rf"cannot listen at 127.0.0.1:{port} .*a port that is free"):
            Sockets(f"{HOST}:{port}", None, 100)
    with pytest.raises(SettingError, match=r"cannot listen at 203.0.113.7:\(any port\).*an address of this machine"):
        Sockets("203.0.113.7", None, 100)  # an address for documents, which nobody has


@pytest.mark.parametrize("bind", ["", "*", "tcp://127.0.0.1", "host:99999", "host:port", 5])
def test_addresses_that_cannot_be(bind: str) -> None:
    with pytest.raises(SettingError, match="must be HOST or HOST:PORT"):
        check_bind(bind)


def test_everywhere_is_no_address() -> None:
    with pytest.raises(SettingError, match="no address that others could reach"):
        check_bind("0.0.0.0:29600")
    assert check_bind("10.0.0.7:29600") == ("10.0.0.7", 29600)
    assert check_bind("worker-3.cluster") == ("worker-3.cluster", 0)


def test_keys_stay_out_of_logs() -> None:
    own = keys()
    assert own.secret not in repr(own)
    assert own.public not in repr(make_secret(plain=False))


def test_what_waits_for_an_old_address_is_dropped(ours: tuple[Sockets, Keys]) -> None:
    ears, own = ours
    nobody = f"tcp://{HOST}:9"
    with closing(Sockets(HOST, own, 10_000)) as mouth:
        for address in (nobody, ears.address):
            assert mouth.send(address, [b"first"])
        mouth.keep({ears.address})
        assert list(mouth._mouths) == [ears.address]
        assert hear(ears, 10.0) == [[b"first"]]  # the others are not touched
        for _ in range(WAITING):
            assert mouth.send(nobody, [b"again"])  # nothing waits there any more
