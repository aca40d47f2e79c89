"""What is bounded: memories of decisions, waits, weights, and what is still answered at the end."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from paceline.codec import Identity
from paceline.gossip.clerk import LONGEST
from paceline.gossip.members import News, State
from paceline.gossip.messages import Abort, Answer, Ask, Commit, Model, Propose, Send, Wider
from paceline.gossip.peer import REMEMBERED, Peer
from paceline.gossip.points import Points
from paceline.gossip.wire import Card, decode, encode
from paceline.sync.own_rounds import Geometric
from tests.gossip.clerks import Town, models, shown

CARD = Card("run", "model")


def exchange(peer: Peer, model: torch.Tensor) -> int:
    """One exchange with member 1, as far as the initiator is concerned; gives its number."""
    (proposal,) = peer.propose(1, model, patience=10.0, now=0.0)
    assert isinstance(proposal, Send)
    assert isinstance(proposal.message, Propose)
    number = proposal.message.exchange
    actions = peer.receive(1, Answer(number, 32, 32, 0), model.view(torch.uint8), None, 10.0, 0.0)
    assert Commit(number, 32) in [action.message for action in actions if isinstance(action, Send)]
    return number


def test_the_latest_decisions_are_remembered_and_no_more() -> None:
    """A partner that asks for an older one is told that nothing was decided, as it would be by a new life."""
    peer, model = Peer(0, Points(Identity(), 4)), torch.ones(4)
    numbers = [exchange(peer, model) for _ in range(REMEMBERED + 10)]

    def asked(number: int) -> Commit | Abort:
        (answer,) = peer.receive(1, Ask(number, 0), None, None, 10.0, 0.0)
        assert isinstance(answer, Send)
        assert isinstance(answer.message, Commit | Abort)
        return answer.message

    assert [asked(number) for number in numbers[:10]] == [Abort(number) for number in numbers[:10]]
    assert asked(numbers[10]) == Commit(numbers[10], 32)
    assert asked(numbers[-1]) == Commit(numbers[-1], 32)
    assert len(peer._decided[1]) == REMEMBERED


def test_after_the_final_model_is_shown_exchanges_are_not_answered() -> None:
    """A partner that had not said by then how an exchange ended may say so now: the model is not changed any more."""
    town = Town()
    first, second = (town.settle(n, model, others=2) for n, model in enumerate(models(2)))
    town.run(0.01)
    first.offer(1)
    town.run(0.0015)  # the proposal has arrived, and the answer is on its way
    assert not second.idle
    second.end()
    second.freeze(shown(second))
    before = shown(second).clone()
    second.outbox.clear()
    town.sent.clear()
    first.offer(2)
    town.run(0.02)
    assert first.counts.exchanges == 1  # it had the answer, and has moved
    assert torch.equal(shown(second), before)
    assert second.board.take() is None
    about = (Propose, Answer, Wider, Commit, Abort)
    assert not [letter for sender, letter in town.sent if sender == 1 and isinstance(letter.message, about)]


def test_a_whole_model_is_waited_for_half_a_minute_at_most() -> None:
    town = Town()
    clerk = town.settle(0, models(1)[0], others=4)
    assert clerk._patience_for_whole() < LONGEST
    for _ in range(10):
        clerk.members.answered(1, 59.0)
    assert clerk.members.usual_patience == 60.0
    assert clerk._patience_for_whole() == LONGEST == 30.0


def test_rounds_of_any_mean_can_be_drawn() -> None:
    """1 - 1 / mean is 1 in double precision for means from 2^53 on."""
    chance = random.Random(1)
    drawn = [Geometric(1e17).draw(chance) for _ in range(200)]
    assert min(drawn) > 0
    assert 0.7e17 < sum(drawn) / 200 < 1.4e17  # the mean of 200 has a deviation of 7 %
    assert {Geometric(1 + 1e-12).draw(chance) for _ in range(100)} == {1}


@pytest.mark.parametrize(("weight", "heard"), [(0, True), ((1 << 56) - 1, True), (1 << 56, False), (-1, False)])
def test_weights_of_models_are_bounded(weight: int, heard: bool) -> None:
    """So that sums of them, and products with numbers, are exact enough and never negative."""
    own = News(3, "tcp://10.0.0.3:29600", 2, State.HERE, 640)
    letter = decode(CARD, [encode(CARD, own, 0, [own], Model(1, weight))])
    assert (letter is not None) == heard


@pytest.mark.parametrize(("examples", "heard"), [((1 << 56) - 1, True), (1 << 56, False), (-1, False)])
def test_examples_of_members_are_bounded(examples: int, heard: bool) -> None:
    own = News(3, "tcp://10.0.0.3:29600", 2, State.HERE, 640)
    told = msgspec.structs.replace(own, examples=examples)
    assert (decode(CARD, [encode(CARD, own, 0, [told], Model(1, 5))]) is not None) == heard
