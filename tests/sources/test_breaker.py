"""The breaker, with a clock of its own."""

from __future__ import annotations

import pytest

from kartifacts.errors import SourceError
from kartifacts.sources.breaker import COOL_DOWN, FAILURES, GRACE, PATIENCE, Breaker

TRIES = 3


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("the mirror", tries=TRIES, clock=clock)


def fail(breaker: Breaker, clock: Clock, *, seconds: float = 1.0, unanswered: bool = False) -> None:
    started = breaker.enter()
    clock.now += seconds
    breaker.failed(started, "it failed", unanswered=unanswered)


def test_faults_in_a_row_make_a_source_doubtful_and_use_makes_it_good_again(breaker: Breaker, clock: Clock) -> None:
    for _ in range(5):
        fail(breaker, clock)
        assert not breaker.doubtful
        breaker.proved(breaker.faults)
    for _ in range(FAILURES):
        fail(breaker, clock)
    assert breaker.doubtful
    breaker.enter()  # asked last, but asked
    breaker.proved(breaker.faults)
    assert not breaker.doubtful


def test_use_that_came_with_a_fault_does_not_make_it_good_again(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAILURES):
        before = breaker.faults
        fail(breaker, clock)
        breaker.proved(before)
    assert breaker.doubtful


def test_headers_or_bytes_alone_do_not_make_a_source_good_again(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAILURES):
        breaker.answered(breaker.enter())
        breaker.gave()
        breaker.disappointed("wrong bytes")
    assert breaker.doubtful


def test_two_connect_timeouts_close_it_and_other_faults_take_two_reads(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAILURES):
        fail(breaker, clock, seconds=5, unanswered=True)
    with pytest.raises(SourceError, match="the mirror is not asked for another 30 s: it failed") as caught:
        breaker.enter()
    assert caught.value.permanent
    other = Breaker("another", tries=TRIES, clock=clock)
    for _ in range(FAILURES * TRIES):
        fail(other, clock)
    with pytest.raises(SourceError):
        other.enter()


def test_what_several_threads_see_at_once_is_one_fault(breaker: Breaker, clock: Clock) -> None:
    started = [breaker.enter() for _ in range(50)]
    clock.now += 5
    for each in started:
        breaker.failed(each, "it failed", unanswered=True)
    breaker.enter()
    assert not breaker.doubtful


def test_an_outage_shorter_than_its_grace_leaves_it_open(breaker: Breaker, clock: Clock) -> None:
    for _ in range(50):
        fail(breaker, clock, seconds=GRACE / 51, unanswered=True)
    breaker.enter()


def test_bytes_that_come_in_between_keep_it_open(breaker: Breaker, clock: Clock) -> None:
    for _ in range(50):
        fail(breaker, clock)
        breaker.gave()
    breaker.enter()


def test_one_request_at_a_time_tries_whether_it_is_back_and_ever_more_rarely(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAILURES):
        fail(breaker, clock, seconds=5, unanswered=True)
    shut = COOL_DOWN
    for _ in range(3):
        clock.now += shut
        assert not breaker.doubtful
        started = breaker.enter()
        assert breaker.doubtful
        with pytest.raises(SourceError):
            breaker.enter()
        breaker.failed(started, "still nothing", unanswered=True)
        shut *= 2
        with pytest.raises(SourceError, match=f"another {shut:.0f} s: still nothing"):
            breaker.enter()
    clock.now += shut
    breaker.enter()
    breaker.proved(breaker.faults)
    for _ in range(3):
        breaker.enter()
    assert not breaker.doubtful


def test_a_pause_holds_for_every_request_until_it_is_over(breaker: Breaker, clock: Clock) -> None:
    breaker.pause(5)
    breaker.pause(2)
    assert breaker.doubtful
    clock.now += 4
    with pytest.raises(SourceError) as caught:
        breaker.enter()
    assert caught.value.retry_after == pytest.approx(1)
    assert not caught.value.permanent
    clock.now += 1
    started = breaker.enter()
    with pytest.raises(SourceError):  # one asks whether it is really over
        breaker.enter()
    breaker.answered(started)
    breaker.enter()
    assert not breaker.doubtful


def test_an_answer_to_an_older_request_does_not_end_a_pause(breaker: Breaker, clock: Clock) -> None:
    started = breaker.enter()
    clock.now += 1
    breaker.pause(5)
    breaker.answered(started)
    with pytest.raises(SourceError):
        breaker.enter()


def test_pauses_without_end_are_not_waited_for(breaker: Breaker, clock: Clock) -> None:
    ended = clock.now + PATIENCE
    while clock.now <= ended:
        breaker.enter()
        breaker.pause(10)
        with pytest.raises(SourceError) as caught:
            breaker.enter()
        assert not caught.value.permanent
        clock.now += 10
    breaker.enter()
    breaker.pause(10)
    with pytest.raises(SourceError) as caught:
        breaker.enter()
    assert caught.value.permanent


def test_a_pause_is_no_fault(breaker: Breaker, clock: Clock) -> None:
    for _ in range(10):
        breaker.pause(1)
        clock.now += 2
        breaker.answered(breaker.enter())
    assert not breaker.doubtful
