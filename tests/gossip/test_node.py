"""Clerks in threads, on real sockets, in one process: strangers, noise, joining, and what is left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from torch import Tensor

from paceline.codec import Lattice
from paceline.errors import FleetError, SettingError
from paceline.gossip import Complete
from paceline.gossip.clerk import Clerk
from paceline.gossip.keys import Secret, make_secret
from paceline.gossip.layout import Layout
from paceline.gossip.members import News, State
from paceline.gossip.messages import Agreed, Answer, Commit, Errand, Fetch, Hello, Message, Model, Propose
from paceline.gossip.node import Node
from paceline.gossip.sockets import Sockets
from paceline.gossip.start import Shape, open_node
from paceline.gossip.swarm import Swarm
from paceline.gossip.wire import encode
from paceline.replica import Replica
from tests.gossip.clerks import NO_COUNTERS, show, shown
from tests.problems import mlp

NUMBERS = 3000
SHAPE = Shape(NUMBERS, 10, 0, "tensors", Lattice(8))


def nothing(clerk: Clerk) -> None:
    pass


def first(secret: Secret, model: Tensor) -> Node:
    """A swarm of one, which has its model from the beginning."""
    node = open_node(0, 0, secret, SHAPE, NO_COUNTERS, Complete(), contacts=())
    show(node.clerk, model)
    node.do(Clerk.begin)
    return node


def has_model(clerk: Clerk) -> bool:
    return clerk.joining is not None and clerk.joining.model is not None


def join(node: Node, secret: Secret, number: int, life: int = 0) -> Node:
    contacts = [node.clerk.members.own.address]
    newcomer = open_node(number, life, secret, SHAPE, NO_COUNTERS, Complete(), contacts=contacts)
    newcomer.wait(has_model, 20.0, lambda _: "a model")
    joining = newcomer.clerk.joining
    assert joining is not None
    assert joining.model is not None
    show(newcomer.clerk, joining.model[0])
    newcomer.do(Clerk.begin)
    return newcomer


@contextmanager
def swarm(size: int, secret: Secret, model: Tensor) -> Iterator[list[Node]]:
    nodes = [first(secret, model)]
    try:
        for number in range(1, size):
            nodes.append(join(nodes[0], secret, number))
        yield nodes
    finally:
        for node in nodes:
            node.close()


def model(seed: int = 0) -> Tensor:
    return torch.randn(NUMBERS + 10, generator=torch.Generator().manual_seed(seed))


def test_who_joins_has_the_model_to_the_bit_and_takes_part() -> None:
    with swarm(3, make_secret(plain=False), model()) as nodes:
        assert all(torch.equal(shown(node.clerk), model()) for node in nodes)
        changed = model()
        changed[:NUMBERS] += 0.01 * model(1)[:NUMBERS]
        show(nodes[2].clerk, changed)
        nodes[2].do(lambda clerk: clerk.offer(5))
        nodes[2].wait(lambda clerk: clerk.counts.exchanges == 1, 20.0, lambda _: "an exchange")
        partner = max(nodes[:2], key=lambda node: not node.clerk.idle or node.clerk.counts.exchanges)
        partner.wait(lambda clerk: clerk.counts.exchanges == 1, 20.0, lambda _: "the partner to move")
        mean = torch.stack([shown(node.clerk) for node in nodes]).double().mean(0)
        torch.testing.assert_close(mean, (2 * model() + changed).double() / 3, rtol=0, atol=1e-6)


def test_who_sees_that_an_exchange_has_ended_sees_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm(2, make_secret(plain=False), model()) as (one, other):
        begun, go_on = threading.Event(), threading.Event()
        correct = one.clerk.board.correct

        def slow(change: Tensor) -> None:
            begun.set()
            assert go_on.wait(20.0)
            correct(change)

        monkeypatch.setattr(one.clerk.board, "correct", slow)
        changed = model()
        changed[:NUMBERS] += 0.01 * model(1)[:NUMBERS]
        show(other.clerk, changed)
        other.do(lambda clerk: clerk.offer(5))
        assert begun.wait(20.0)
        threading.Timer(0.2, go_on.set).start()
        assert one.wait_for(lambda clerk: clerk.idle, 20.0)
        assert not torch.equal(shown(one.clerk), model())


def noise(node: Node, secret: Secret, count: int) -> None:
    """Letters with the run's key that are nonsense: broken, of another model, or with payloads that do not fit."""
    generator = torch.Generator().manual_seed(1)
    card, own = node._card, News(9, "tcp://127.0.0.1:9", 0, State.HERE, 0)
    messages: list[Message | Errand] = [
        Propose(1, 8),
        Answer(1, 8, 8, 0),
        Commit(1, 8),
        Fetch(1, True),
        Model(1, 5),
        Agreed([9]),
    ]
    with closing(Sockets("127.0.0.1", secret.keys, 100_000)) as mouth:
        for at in range(count):
            size = int(torch.randint(1, 400, (1,), generator=generator))
            raw = torch.randint(256, (size,), generator=generator).byte().numpy().tobytes()
            header = encode(card, own, 0, [own], messages[at % len(messages)])
            broken = bytearray(header)
            broken[size % len(header)] ^= 1 + at % 255
            while not mouth.send(node.clerk.members.own.address, [(raw, header, bytes(broken))[at % 3], raw]):
                time.sleep(0.001)
        later = News(9, "tcp://127.0.0.1:9", 1, State.LEFT, 0)
        last = encode(card, later, 0, [later], Hello(reply=False))
        while not mouth.send(node.clerk.members.own.address, [last]):
            time.sleep(0.001)
        node.wait(lambda clerk: clerk.members.life(9) == 1, 30.0, lambda _: "the last letter")


@pytest.mark.parametrize("plain", [False, True])
def test_noise_has_no_effect(plain: bool) -> None:
    secret = make_secret(plain)
    with swarm(2, secret, model()) as nodes:
        noise(nodes[0], secret, 1200)
        assert nodes[0].clerk.counts.unheard >= 400
        assert torch.equal(shown(nodes[0].clerk), model())
        assert nodes[0].clerk.board.take() is None
        assert nodes[0].clerk.idle
        nodes[1].do(lambda clerk: clerk.offer(1))
        nodes[1].wait(lambda clerk: clerk.counts.exchanges == 1, 20.0, lambda _: "an exchange")


@pytest.mark.parametrize("key", ["no key", "another key", "another run", "another model"])
def test_strangers_are_not_heard(key: str) -> None:
    """They know the address, and everything but one thing."""
    secret = make_secret(plain=False)
    other = {
        "no key": Secret(secret.run, None),
        "another key": Secret(secret.run, make_secret(plain=False).keys),
        "another run": Secret("another", secret.keys),
    }.get(key, secret)
    shape = Shape(NUMBERS, 10, 0, "other tensors", Lattice(8)) if key == "another model" else SHAPE
    with swarm(1, secret, model()) as nodes:
        contacts = [nodes[0].clerk.members.own.address]
        with (
            closing(open_node(1, 0, other, shape, NO_COUNTERS, Complete(), contacts=contacts)) as stranger,
            pytest.raises(FleetError, match="member 1 waited 2 s for a model, in vain"),
        ):
            stranger.wait(has_model, 2.0, lambda _: "a model")
        assert nodes[0].clerk.members.life(1) == -1
        # Without the key it does not even come to send a letter.
        assert (nodes[0].clerk.counts.unheard > 0) == (key in ("another run", "another model"))


def test_an_error_in_the_thread_is_the_trainers() -> None:
    def fail(clerk: Clerk) -> None:
        raise SettingError("something is wrong")

    with swarm(1, make_secret(plain=False), model()) as nodes:
        nodes[0].do(fail)
        with pytest.raises(SettingError, match="something is wrong"):
            nodes[0].wait(lambda clerk: False, 5.0, lambda _: "nothing")
        with pytest.raises(SettingError, match="something is wrong"):
            nodes[0].do(nothing)


def test_nothing_is_left_behind() -> None:
    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with swarm(2, make_secret(plain=False), model()):
        pass
    before = count()
    for _ in range(3):
        with swarm(2, make_secret(plain=False), model()):
            pass
    assert count() == before


def test_a_step_that_the_optimizer_has_skipped_is_no_stride() -> None:
    trained = mlp()
    layout = Layout(Replica(trained, torch.optim.SGD(trained.parameters(), lr=0.1)))
    shape = Shape(layout.numel, layout.more, 0, "tensors", Lattice(8))
    with closing(open_node(0, 0, make_secret(plain=True), shape, NO_COUNTERS, Complete(), contacts=())) as node:
        one = Swarm(node, layout, 10.0, strides=True)
        one.begin()
        one.step_done(4, offers=False)
        assert one.stride == 0.0
        with torch.no_grad():
            next(trained.parameters()).view(-1)[0] += 0.5
        for _ in range(2):
            one.step_done(4, offers=False)
            assert one.stride == pytest.approx(0.5)


def test_goodbye_is_heard() -> None:
    with swarm(2, make_secret(plain=False), model()) as nodes:
        nodes[1].close()
        nodes[0].wait(lambda clerk: clerk.members.others(State.LEFT) == [1], 5.0, lambda _: "goodbye")
        assert nodes[0].clerk.members.participants() == [0]


def test_who_comes_back_when_the_end_has_come_is_told_so() -> None:
    """Instead of waiting for somebody who trains."""
    secret = make_secret(plain=False)
    net = mlp()
    layout = Layout(Replica(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    with swarm(1, secret, model()) as nodes:
        nodes[0].do(Clerk.end)
        contacts = [nodes[0].clerk.members.own.address]
        with (
            closing(open_node(1, 5, secret, SHAPE, NO_COUNTERS, Complete(), contacts=contacts)) as late,
            pytest.raises(FleetError, match="the run has come to its end while this worker was away"),
        ):
            Swarm(late, layout, 60.0).join()
