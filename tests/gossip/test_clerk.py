"""Clerks with steered timing: who averages with whom, and what becomes of silence, joining and the end."""

from __future__ import annotations

import pytest
import torch

from paceline.codec import Identity, Lattice
from paceline.gossip.clerk import Clerk, Outgoing
from paceline.gossip.members import State
from paceline.gossip.messages import Agreed, Commit, Fetch, Model, Propose, Refuse
from tests.gossip.clerks import MORE, NUMBERS, Town, address, models, show, shown


def town_of(count: int, **how: object) -> tuple[Town, list[Clerk]]:
    town = Town()
    clerks = [town.settle(n, model, others=count, **how) for n, model in enumerate(models(count))]  # type: ignore[arg-type]
    town.run(0.01)
    return town, clerks


@pytest.mark.parametrize("codec", [Identity(), Lattice(8, block=64)])
def test_an_offer_becomes_one_exchange_that_keeps_the_sum(codec: Lattice | Identity) -> None:
    town, clerks = town_of(4, codec=codec)
    total = sum(shown(clerk).double() for clerk in clerks)
    for at in range(20):
        clerks[at % 4].offer(at)
        assert town.run(1.0, lambda at=at: not clerks[at % 4].wishes and all(clerk.idle for clerk in clerks))  # type: ignore[misc]
        assert sum(clerk.counts.exchanges for clerk in clerks) == 2 * (at + 1)
    torch.testing.assert_close(sum(shown(clerk).double() for clerk in clerks), total, rtol=0, atol=1e-5)
    taken = [clerk.board.take() for clerk in clerks]
    for clerk, change, model in zip(clerks, taken, models(4), strict=True):
        assert change is not None
        torch.testing.assert_close(shown(clerk)[:NUMBERS], model[:NUMBERS] + change, rtol=0, atol=1e-5)
    spread = torch.stack([shown(clerk)[:NUMBERS] for clerk in clerks]).std(0).max()
    assert spread < 0.002  # it began at 0.01
    buffers = torch.stack([shown(clerk)[NUMBERS:] for clerk in clerks])
    torch.testing.assert_close(buffers, torch.stack(models(4))[:, NUMBERS:], rtol=0, atol=0)  # not averaged in pairs
    assert buffers.shape[1] == MORE


def test_who_is_busy_refuses_and_another_is_found() -> None:
    town, clerks = town_of(3)
    slow = address(1)
    town.delay = lambda to, letter: 0.5 if to == slow and isinstance(letter.message, Propose | Commit) else 0.001
    clerks[2].members._chance.seed(0)
    clerks[2].offer(0)
    while not any(isinstance(letter.message, Propose) for _, letter in town.sent):
        town.run(0.001)
    first = next(letter.address for _, letter in town.sent if isinstance(letter.message, Propose))
    other = clerks[0] if first == address(1) else clerks[1]
    other.offer(0)
    assert town.run(3.0, lambda: not other.wishes and not clerks[2].wishes)
    assert all(clerk.idle for clerk in clerks) or town.run(3.0, lambda: all(clerk.idle for clerk in clerks))
    assert sum(clerk.counts.exchanges for clerk in clerks) == 4


def test_a_busy_partner_says_so_at_once() -> None:
    town, clerks = town_of(2)
    clerks[1].rest()  # its trainer has left the loop: nothing to show
    clerks[0].offer(5)
    assert town.run(0.1, lambda: not clerks[0].wishes)
    assert clerks[0].counts.refusals == 1
    assert any(isinstance(letter.message, Refuse) for _, letter in town.sent)
    assert clerks[0].idle


def test_a_dead_partner_is_left_alone_after_a_while() -> None:
    town, clerks = town_of(3)
    town.kill(2)
    for at in range(12):
        clerks[at % 2].offer(at)
        assert town.run(40.0, lambda: not any(clerk.wishes for clerk in clerks[:2]) and clerks[0].idle)
    assert clerks[0].members.silent() == [2] or clerks[1].members.silent() == [2]
    assert sum(clerk.counts.exchanges for clerk in clerks[:2]) == 2 * 12  # for each offer one, whoever was tried before
    assert sum(clerk.counts.timeouts for clerk in clerks[:2]) >= 2


def test_blocking_waits_for_the_partner_and_meets_it_once() -> None:
    town, clerks = town_of(2, blocking=True)
    clerks[0].offer(0)
    assert not town.run(0.5, lambda: not clerks[0].wishes)  # the other trains: it is asked now and then, in vain
    assert clerks[0].counts.refusals < 10
    clerks[1].offer(0)
    assert town.run(0.1, lambda: not clerks[0].wishes and not clerks[1].wishes)
    town.run(0.5)
    assert [clerk.counts.exchanges for clerk in clerks] == [1, 1]
    clerks[0].offer(0)  # the other goes on with its steps: its model is not to be had
    assert not town.run(0.5, lambda: not clerks[0].wishes)
    assert [clerk.counts.exchanges for clerk in clerks] == [1, 1]
    torch.testing.assert_close(shown(clerks[0])[:NUMBERS], shown(clerks[1])[:NUMBERS], rtol=0, atol=1e-6)


def test_counters_go_round() -> None:
    town, clerks = town_of(4)
    for at in range(24):
        clerks[at % 4].offer(100 * (at + 1))
        town.run(0.05)
    assert all(6000 <= clerk.members.examples <= 9000 for clerk in clerks)  # the truth is 2100 + 2200 + 2300 + 2400


def agreed(clerk: Clerk) -> torch.Tensor | None:
    return None if clerk.finale is None or not clerk.finale.finished else clerk.finale.agreed


def end(town: Town, clerks: list[Clerk], weights: list[int]) -> None:
    """Each ends when it hears that another has, as a trainer does."""
    clerks[0].end()
    for clerk, weight in zip(clerks, weights, strict=True):
        town.run(0.01)
        clerk.tell(weight)
        clerk.end()
        clerk.freeze(shown(clerk))


def test_the_end_is_one_weighted_average() -> None:
    town, clerks = town_of(4)
    weights = [1, 2, 3, 10]
    end(town, clerks, weights)
    assert town.run(5.0, lambda: all(agreed(clerk) is not None for clerk in clerks))
    found = [agreed(clerk) for clerk in clerks]
    assert all(torch.equal(each, found[0]) for each in found if each is not None and found[0] is not None)
    expected = sum(w * model.double() for w, model in zip(weights, models(4), strict=True)) / sum(weights)
    assert found[0] is not None
    torch.testing.assert_close(found[0].view(torch.float32).double(), expected, rtol=0, atol=1e-6)
    assert clerks[3].finale is not None
    assert clerks[3].finale.of == [0, 1, 2, 3]


@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("when", ["before", "while it gives the average away"])
def test_the_end_without_one_that_dies(dead: int, when: str) -> None:
    """Also the one that puts the average together, before it does, or when only one has got it."""
    town, clerks = town_of(4)
    if when != "before":
        given: list[str] = []

        def once(to: str, letter: Outgoing) -> float | None:
            if isinstance(letter.message, Agreed) and to not in given:
                given.append(to)
                if len(given) > 1:
                    town.kill(dead)
                    return None
            return 0.001

        town.delay = once
    else:
        town.kill(dead)
    end(town, clerks, [1, 1, 1, 1])
    rest = [clerk for clerk in clerks if clerk.members.own.number != dead]
    assert town.run(120.0, lambda: all(agreed(clerk) is not None for clerk in rest))
    found = [agreed(clerk) for clerk in rest]
    assert all(found[0] is not None and each is not None and torch.equal(each, found[0]) for each in found)
    finale = rest[0].finale
    assert finale is not None
    assert finale.of == ([n for n in range(4) if n != dead] if when == "before" else [0, 1, 2, 3])


def test_everybody_hears_that_one_has_come_to_the_end() -> None:
    town, clerks = town_of(3)
    assert not any(clerk.over for clerk in clerks)
    clerks[1].end()
    town.run(0.01)
    assert clerks[0].over
    assert clerks[2].over


def test_the_average_of_all_while_they_go_on() -> None:
    town, clerks = town_of(3)
    for clerk, weight in zip(clerks, [1, 2, 5], strict=True):
        clerk.tell(weight)
    clerks[1].gather()
    gathering = clerks[1].gathering
    assert gathering is not None
    assert town.run(2.0, lambda: gathering.done)
    one, two, three = models(3)
    expected = (one + 2 * two + 5 * three) / 8
    torch.testing.assert_close(gathering.mean(), expected, rtol=0, atol=1e-6)
    squares = sum(w * (m - expected).square().sum() for w, m in zip([1, 2, 5], [one, two, three], strict=True))
    assert gathering.distance() == pytest.approx(float(squares / 8) ** 0.5, rel=1e-4)
    assert all(clerk.members.own.state is State.HERE for clerk in clerks)


def test_who_joins_takes_the_newest_sound_model_in_full_precision() -> None:
    town, clerks = town_of(3, codec=Lattice(4, block=64))
    for clerk, examples in zip(clerks, [10, 30, 20], strict=True):
        clerk.tell(examples)
        clerk.offer(examples)
        town.run(0.1)
    spoilt = shown(clerks[1]).clone()
    spoilt[3] = float("nan")
    show(clerks[1], spoilt)
    newcomer = town.settle(3, None, codec=Lattice(4, block=64), contacts=(address(0), address(9)))
    joining = newcomer.joining
    assert joining is not None
    assert town.run(10.0, lambda: joining.model is not None)
    asked = [letter.address for sender, letter in town.sent if sender == 3 and isinstance(letter.message, Fetch)]
    assert asked == [address(1), address(2)]  # the most advanced has no sound model
    assert joining.model is not None
    assert torch.equal(joining.model[0], shown(clerks[2]))


@pytest.mark.parametrize("lost", [1, 1000])
def test_a_model_that_is_lost_on_the_way_is_asked_for_again_in_time(lost: int) -> None:
    """Before the deadline of who waits for the average: it has come then, or its member is left out."""
    town, clerks = town_of(2)
    clerks[0].hurry(20.0)
    sent = 0

    def delay(to: str, letter: Outgoing) -> float | None:
        nonlocal sent
        sent += isinstance(letter.message, Model)
        return None if isinstance(letter.message, Model) and sent <= lost else 0.001

    town.delay = delay
    clerks[0].gather()
    gathering = clerks[0].gathering
    assert gathering is not None
    assert town.run(20.0, lambda: gathering.done)
    assert gathering.members == ([0, 1] if lost == 1 else [0])


def all_end(town: Town, clerks: list[Clerk], seconds: float) -> bool:
    """These have come to the end; whether they agree in so many seconds."""
    for clerk in clerks:
        clerk.hurry(20.0)
        clerk.end()
        clerk.freeze(shown(clerk))
    return town.run(seconds, lambda: all(clerk.finale is not None and clerk.finale.finished for clerk in clerks))


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_a_final_model_that_is_lost_is_asked_for_again_however_long_it_was_waited_for(late: float) -> None:
    town, clerks = town_of(2)
    lost = 0

    def delay(to: str, letter: Outgoing) -> float | None:
        nonlocal lost
        if isinstance(letter.message, Model) and not lost:
            lost += 1
            return None
        return 0.001

    town.delay = delay
    all_end(town, clerks[:1], late)
    assert all_end(town, clerks[1:], 20.0)
    assert clerks[0].finale is not None
    assert clerks[0].finale.of == [0, 1]
    assert lost == 1


@pytest.mark.parametrize("number", [0, 2])
def test_who_dies_after_others_have_waited_for_its_final_model_is_left_out(number: int) -> None:
    """The leader, whose average the others wait for, or another, whose model the leader waits for."""
    town, clerks = town_of(3)
    rest = [clerk for at, clerk in enumerate(clerks) if at != number]
    all_end(town, rest, 1.0)
    town.kill(number)
    assert town.run(20.0, lambda: all(clerk.finale is not None and clerk.finale.finished for clerk in rest))
    assert all(clerk.finale is not None and number not in clerk.finale.of for clerk in rest)


def test_who_joins_is_neither_averaged_with_nor_asked() -> None:
    town, clerks = town_of(2)
    stranger = town.settle(2, None, contacts=(address(0),))
    town.delay = lambda to, letter: None if isinstance(letter.message, Model) else 0.001
    town.run(1.0)
    assert stranger.members.own.state is State.JOINING
    for at in range(10):
        clerks[0].offer(at)
        town.run(0.1)
    assert not any(letter.address == address(2) and isinstance(letter.message, Propose) for _, letter in town.sent)
    clerks[0].gather()
    gathering = clerks[0].gathering
    assert gathering is not None
    town.delay = lambda to, letter: 0.001
    assert town.run(3.0, lambda: gathering.done)
    assert gathering.members == [0, 1]


def test_one_that_comes_back_takes_part_again() -> None:
    town, clerks = town_of(3)
    town.kill(2)
    for at in range(8):
        clerks[at % 2].offer(at)
        town.run(12.0, lambda: not any(clerk.wishes for clerk in clerks[:2]))
    again = town.settle(2, None, life=1, contacts=(address(0), address(1)))
    joining = again.joining
    assert joining is not None
    assert town.run(10.0, lambda: joining.model is not None)
    assert joining.model is not None
    show(again, joining.model[0])
    again.begin()
    for at in range(12):
        clerks[at % 2].offer(at)
        town.run(12.0, lambda: not any(clerk.wishes for clerk in clerks[:2]))
    assert again.counts.exchanges > 0


def test_those_that_were_cut_off_from_each_other_come_together_again() -> None:
    """Nobody has died, and nobody has anything to tell to one that is silent: they greet each other."""
    town, clerks = town_of(3)
    town.delay = lambda to, letter: None
    while any(len(clerk.members.participants()) > 1 for clerk in clerks):
        for clerk in clerks:
            clerk.offer(0)
        assert town.run(60.0, lambda: not any(clerk.wishes for clerk in clerks) and all(clerk.idle for clerk in clerks))
    town.delay = lambda to, letter: 0.001
    assert town.run(31.0, lambda: all(clerk.members.participants() == [0, 1, 2] for clerk in clerks))
    clerks[0].offer(1)
    assert town.run(1.0, lambda: not clerks[0].wishes)
    assert clerks[0].counts.exchanges == 1


def test_counters_go_round_without_exchanges() -> None:
    town, clerks = town_of(4)
    for clerk in clerks:
        clerk.tell(100)
    town.run(3.0)
    assert [clerk.members.examples for clerk in clerks] == [400] * 4


def test_letters_of_an_earlier_life_are_not_heard() -> None:
    town, clerks = town_of(2)
    old = town.settle(1, models(2)[1], others=2, life=0)
    clerks[0].members.hear([old.members.own.__class__(1, address(1, 3), 3, State.HERE, 0)])
    old.offer(0)
    town.run(0.3)
    assert clerks[0].counts.exchanges == 0
    assert clerks[0].idle
