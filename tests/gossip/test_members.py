"""Who is taken for present, and who is chosen."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SettingError
from paceline.gossip.graph import Complete, Edges, Ring
from paceline.gossip.members import ANSWERS, FAILURES, LONGEST_RETRY, Members, News, Patience, State


def news(number: int, life: int = 1, state: State = State.HERE, examples: int = 0) -> News:
    return News(number, f"tcp://host-{number}", life, state, examples)


def five() -> Members:
    members = Members(news(0), Complete())
    members.hear([news(number) for number in range(1, 5)])
    return members


any_news = st.builds(news, st.integers(1, 3), st.integers(0, 3), st.sampled_from(State), st.integers(0, 5))


@settings(max_examples=200, deadline=None)
@given(st.lists(any_news, max_size=12), st.randoms(use_true_random=False))
def test_what_is_known_does_not_depend_on_the_order_of_news(said: list[News], chance: object) -> None:
    one, other = Members(news(0), Complete()), Members(news(0), Complete())
    one.hear(said)
    for each in [*reversed(said), *said]:  # in another order, and twice
        other.hear([each])
    assert one.participants() == other.participants()
    assert one.examples == other.examples


def test_a_partner_is_any_neighbour() -> None:
    members = five()
    chosen = Counter(members.partner() for _ in range(2000))
    assert set(chosen) == {1, 2, 3, 4}
    assert min(chosen.values()) > 400  # of 500; the standard deviation is 19
    assert members.partner(but=[1, 2, 4]) == 3
    assert members.partner(but=[1, 2, 3, 4]) is None
    ring = Members(news(0), Ring())
    ring.hear([news(number) for number in range(1, 5)])
    assert {ring.partner() for _ in range(100)} == {1, 4}


def test_who_has_no_model_is_neither_partner_nor_donor() -> None:
    members = Members(news(0), Complete())
    members.hear([news(1, state=State.JOINING), news(2, examples=10), news(3, examples=30), news(4, state=State.LEFT)])
    assert members.participants() == [0, 2, 3]
    assert members.donors() == [3, 2]
    members.hear([news(1)])
    assert members.participants() == [0, 1, 2, 3]
    joining = Members(news(0, state=State.JOINING), Complete())
    joining.hear([news(1)])
    assert joining.partner() is None


def test_who_does_not_answer_is_left_alone_and_greeted_now_and_then() -> None:
    members = five()
    now = 100.0
    for _ in range(FAILURES):
        assert 3 in members.participants()
        members.failed(3, now)
    assert members.silent() == [3]
    assert 3 not in members.participants()
    waits = []
    for _ in range(8):
        wait = next(wait for wait in range(1, 100) if members.to_greet(now + wait) == [3])
        waits.append(wait)
        now += wait
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert LONGEST_RETRY == 30
    for _ in range(5000):  # for as long as a run may take
        members.failed(3, now)
    members.answered(3)
    assert 3 in members.participants()
    assert members.silent() == members.to_greet(now + 1000) == []


def test_who_was_greeted_in_vain_for_long_is_not_waited_for_longer() -> None:
    """Else one that was away for minutes, and dies again, would keep its next partner waiting for a minute."""
    members = five()
    for _ in range(ANSWERS):
        members.answered(3, 1.0)
    for _ in range(FAILURES):
        members.failed(3, 100.0)
    before, greeted = members.patience(3), 0
    for now in range(100, 400):
        greeted += len(members.to_greet(now))
    assert greeted > 10
    members.answered(3)
    assert members.patience(3) == before == 3.0 * 2**FAILURES


def test_who_is_not_known_yet_is_waited_for_as_long_as_the_others_take() -> None:
    members = five()
    assert members.patience(3) == Patience().first
    for _ in range(ANSWERS):
        members.answered(1, 1.0)
    assert members.patience(3) == members.patience(1) == 3.0
    members.failed(3, 0.0)
    assert members.patience(3) == 6.0
    assert members.patience(1) == 3.0


def test_a_new_life_is_a_new_chance() -> None:
    members = five()
    for _ in range(5):
        members.failed(3, 0.0)
    members.hear([news(3, life=2, state=State.JOINING)])
    assert members.silent() == []
    assert members.life(3) == 2
    members.hear([news(3, life=1, examples=70)])  # late news of the first life
    assert members.life(3) == 2
    assert 3 not in members.participants()
    assert members.examples == 70  # what was used was used


def test_a_worker_that_comes_back_goes_on_counting() -> None:
    members = Members(news(0, life=2, state=State.JOINING), Complete())
    members.tell(examples=10)
    assert members.own.examples == 10
    members.hear([news(0, life=1, examples=500)])  # others remember what it did before
    assert members.own.examples == 510
    members.tell(examples=30)
    assert members.own.examples == members.examples == 530
    members.hear([news(0, life=1, examples=480)])
    assert members.own.examples == 530


def test_a_member_that_is_not_in_the_graph() -> None:
    members = Members(news(0), Edges(((0, 1), (1, 2))))
    members.hear([news(1), news(7)])
    assert members.partner() == 1  # the stranger is left out
    stranger = Members(news(7), Edges(((0, 1), (1, 2))))
    stranger.hear([news(1), news(0)])
    with pytest.raises(SettingError, match="member 7 is not in Edges"):
        stranger.partner()
    alone = Members(news(0), Edges(((0, 1), (1, 2))))
    alone.hear([news(7)])
    assert alone.partner() is None


def test_of_two_with_the_same_number_the_earlier_stops() -> None:
    members = five()
    members.hear([news(0)])
    with pytest.raises(SettingError, match="another worker has begun as member 0, at tcp://host-0"):
        members.hear([news(0, life=2)])
    with pytest.raises(SettingError, match="another worker has begun as member 0, at tcp://elsewhere"):
        members.hear([News(0, "tcp://elsewhere", 1, State.HERE, 0)])


def test_what_others_know_of_all_counts() -> None:
    members = five()
    members.tell(examples=12)
    members.hear_of_all(500)
    members.hear_of_all(40)  # late
    assert members.examples == 500
    members.hear([news(1, examples=600)])
    assert members.examples == 612


def test_what_nobody_counts_as_its_own_still_counts() -> None:
    """Of four workers that had used 2500 each, two begin again; a third comes back alone later."""
    members = Members(news(0), Complete())
    members.resume(2500, 10_000, lost=5000)
    assert (members.examples, members.elsewhere) == (10_000, 10_000)
    members.hear([news(1, examples=2500)])
    assert members.examples == 10_000
    members.tell(examples=30)
    members.hear([news(1, examples=2512)])
    assert (members.examples, members.elsewhere) == (10_042, 10_012)
    assert members.own.examples == 2530  # its weight at the end
    late = Members(news(2, life=5, state=State.JOINING), Complete())
    late.resume(0, 9000)
    late.hear(members.news())
    late.hear_of_all(members.examples, members.lost)
    late.tell(State.HERE, examples=8)
    assert (late.examples, late.elsewhere) == (10_050, 10_042)


def test_news_spread() -> None:
    members = five()
    members.tell(examples=12)
    told = members.news()
    assert told[0] == news(0, examples=12)
    assert sorted(each.number for each in told) == [0, 1, 2, 3, 4]
    assert members.examples == 12
    members.tell(state=State.LEFT)
    assert members.participants() == [1, 2, 3, 4]
    assert members.address(2) == "tcp://host-2"
    assert members.life(77) == -1


def test_patience_is_learnt() -> None:
    patience = Patience()
    assert patience.seconds == 5.0
    for seconds in (0.1, 0.11, 0.09, 0.1, 0.12, 0.1):
        patience.took(seconds)
    assert 0.3 <= patience.seconds <= 0.5
    for _ in range(64):
        patience.took(2.0)
    assert patience.seconds == pytest.approx(6.0)
    for _ in range(64):
        patience.took(0.001)
    assert patience.seconds == patience.least
    for _ in range(3):
        patience.failed()
    assert patience.seconds == 8 * patience.least  # what takes longer than ever must not fail for ever
    for _ in range(5000):
        patience.failed()
    assert patience.seconds == patience.most
    patience.took(0.001)
    assert patience.seconds == patience.least


def test_what_was_used_in_an_earlier_life_is_not_forgotten() -> None:
    """The trainer counts what it uses in this life; all the rest must come from here."""
    members = Members(news(0, life=2, state=State.JOINING), Complete())
    members.hear([news(1, examples=6000), news(0, life=1, examples=5000)])
    members.tell(State.HERE, examples=10)
    assert members.examples == 11_010
    assert members.elsewhere == 11_000


def test_where_members_listen_that_have_not_left() -> None:
    members = five()
    members.hear([news(3, state=State.LEFT)])
    assert members.addresses == {f"tcp://host-{number}" for number in (0, 1, 2, 4)}
