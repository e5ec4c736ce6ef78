"""What all threads know about one source: whether it is worth asking now, and from when on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kartifacts.errors import SourceError

FAILURES = 2
GRACE = 2.0  # seconds; an outage that is shorter costs tries, not the source
COOL_DOWN = 30.0
PATIENCE = 60.0  # seconds that are waited in all because a source asks for a pause
_SHORT = 1.0  # between two requests to a source whose pause is over, until one is answered


class Breaker:
    """Counts faults in a row, the same one seen by several threads once, and keeps the pauses that a source asks for.

    After two faults a source is `doubtful`: whoever has another one asks that first.  After faults that are worth two
    reads with all their tries, a connect timeout being worth all tries of one, it is not asked at all.  In both cases
    one request is let through when a cool-down has passed.  Only bytes that were of use make it a good source again:
    a mirror that answers every request with headers and then stalls is no better than one that is switched off.

    Args:
        name: of the source, for messages.
        tries: of one read.
        grace: seconds of faults before it is not asked at all.
    """

    def __init__(
        self, name: str, *, tries: int = 1, grace: float = GRACE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._tries = tries
        self._grace = grace
        self._clock = clock
        self._guard = threading.Lock()
        self.faults = 0  # ever
        self._disappointments = 0  # since it was last of use
        self._weight = 0  # of the faults since bytes last came
        self._since = 0.0  # when the first of them was asked for
        self._last = float("-inf")  # when the last one was seen
        self._reason = ""
        self._probes = 0
        self._shut_until = 0.0  # when the next request may try
        self._hold_until = 0.0  # the source asked for a pause
        self._paused_at = float("-inf")
        self._throttled_since: float | None = None

    @property
    def doubtful(self) -> bool:
        """Whether other sources should be asked first."""
        with self._guard:
            now = self._clock()
            return now < self._hold_until or (self._disappointments >= FAILURES and now < self._shut_until)

    def enter(self) -> float:
        """Begin a request; gives the time, for `failed` and `answered`.

        Raises:
            SourceError: the source is not asked now.  With `retry_after` if it asked for a pause.
        """
        with self._guard:
            now = self._clock()
            if now < self._hold_until:
                asked_in_vain = self._throttled_since is not None and now - self._throttled_since > PATIENCE
                raise SourceError(
                    f"{self._name} asked for a pause that is not over yet",
                    permanent=asked_in_vain,
                    retry_after=self._hold_until - now,
                )
            if self._disappointments >= FAILURES and now >= self._shut_until:
                self._shut_until = now + self._cool_down()  # this request tries; the others go on not asking
                self._probes += 1
            elif now < self._shut_until and self._is_open():
                left = self._shut_until - now
                raise SourceError(f"{self._name} is not asked for another {left:.0f} s: {self._reason}", permanent=True)
            if self._throttled_since is not None:
                self._hold_until = now + _SHORT
            return now

    def answered(self, started: float) -> None:
        """A request was answered in earnest, so that a pause from before it is over."""
        with self._guard:
            if started >= self._paused_at:
                self._throttled_since, self._hold_until = None, 0.0

    def gave(self) -> None:
        """Bytes came; whether they are right is not known yet."""
        with self._guard:
            self._weight = 0

    def proved(self, faults: int) -> None:
        """What it gave was of use; if there was no fault since there were `faults`, it is as good as new."""
        with self._guard:
            self._weight = 0
            if self.faults == faults:
                self._disappointments = self._probes = 0

    def failed(self, started: float, reason: str, *, unanswered: bool = False) -> None:
        """A request that began at `started` came to nothing."""
        with self._guard:
            if started < self._last:  # what another thread has just seen as well
                return
            if self._weight == 0:
                self._since = started
            self._weight += self._tries if unanswered else 1
            self._disappointed(reason)

    def disappointed(self, reason: str) -> None:
        """It answered, with something that is of no use."""
        with self._guard:
            self._disappointed(reason)

    def pause(self, seconds: float) -> None:
        """The source asked not to be asked for some seconds."""
        with self._guard:
            now = self._clock()
            self._paused_at = now
            if self._throttled_since is None:
                self._throttled_since = now
            self._hold_until = max(self._hold_until, now + seconds)

    def _disappointed(self, reason: str) -> None:
        self.faults += 1
        self._disappointments += 1
        self._reason = reason
        self._last = self._clock()
        self._shut_until = self._last + self._cool_down()

    def _cool_down(self) -> float:
        return float(COOL_DOWN * 2 ** min(self._probes, 4))

    def _is_open(self) -> bool:
        return self._weight >= FAILURES * self._tries and self._last - self._since >= self._grace
