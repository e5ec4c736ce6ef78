"""What all threads know about one mirror: whether it is worth asking now, and from when on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kartifacts.errors import SourceError

FAILURES = 2
COOL_DOWN = 30.0


class Breaker:
    """Opens after `FAILURES` connections in a row failed; then one request is let through each `COOL_DOWN` seconds.

    So a dead mirror costs two connect timeouts, however many artifacts there are.
    """

    def __init__(
        self, name: str, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._name = name
        self._clock = clock
        self._sleep = sleep
        self._guard = threading.Lock()
        self._failures = 0
        self._reason = ""
        self._closed_until = 0.0  # while open: when the next request may try
        self._hold_until = 0.0  # the mirror asked for a pause

    def enter(self) -> None:
        """Wait for a pause that the mirror asked for to end.

        Raises:
            SourceError: the mirror is not asked now.
        """
        with self._guard:
            now = self._clock()
            pause = self._hold_until - now
            if self._failures >= FAILURES:
                left = self._closed_until - now
                if left > 0:
                    raise SourceError(
                        f"{self._name} is not asked for another {left:.0f} s: {self._reason}",
                        permanent=True,
                        retry_after=left,
                    )
                self._closed_until = now + COOL_DOWN  # this request tries; the others go on not asking
        if pause > 0:
            self._sleep(pause)

    def succeeded(self) -> None:
        with self._guard:
            self._failures = 0

    def failed(self, reason: str) -> None:
        with self._guard:
            self._failures += 1
            self._reason = reason
            self._closed_until = self._clock() + COOL_DOWN

    def pause(self, seconds: float) -> None:
        """The mirror asked not to be asked for some seconds."""
        with self._guard:
            self._hold_until = max(self._hold_until, self._clock() + seconds)
