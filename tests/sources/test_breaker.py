"""The breaker, with a clock of its own."""

from __future__ import annotations

import pytest

from kartifacts.errors import SourceError
from kartifacts.sources.breaker import COOL_DOWN, FAILURES, Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("the mirror", clock=clock, sleep=clock.sleep)


def test_it_opens_after_failures_in_a_row_only(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.failed("refused")
        breaker.enter()
        breaker.succeeded()
    for _ in range(FAILURES):
        breaker.failed("refused")
    with pytest.raises(SourceError, match="the mirror is not asked for another 30 s: refused") as caught:
        breaker.enter()
    assert caught.value.permanent


def test_one_request_at_a_time_tries_whether_the_mirror_is_back(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAILURES):
        breaker.failed("refused")
    clock.now += COOL_DOWN
    breaker.enter()
    with pytest.raises(SourceError):
        breaker.enter()
    breaker.failed("still refused")
    with pytest.raises(SourceError, match="still refused"):
        breaker.enter()
    clock.now += COOL_DOWN
    breaker.enter()
    breaker.succeeded()
    breaker.enter()
    breaker.enter()


def test_a_pause_holds_for_every_request_until_it_is_over(breaker: Breaker, clock: Clock) -> None:
    breaker.pause(5)
    breaker.pause(2)
    breaker.enter()
    assert clock.slept == [5]
    breaker.enter()
    assert clock.slept == [5]
