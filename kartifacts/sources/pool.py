"""Open connections that wait for their next request, shared by all threads of one process."""

from __future__ import annotations

import os
import threading

from kartifacts.sources.wire import Connection

Origin = tuple[str, str, int]
_MOST = 64  # kept at a time; there are never more threads


class Pool:
    """Connections by origin, the one used last given out first."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._process = os.getpid()
        self._idle: list[tuple[Origin, Connection]] = []

    def take(self, origin: Origin) -> Connection | None:
        """A connection that is still open, if there is one."""
        while (found := self._pop(origin)) is not None:
            if not found.is_stale():
                return found
            found.close()
        return None

    def put(self, origin: Origin, connection: Connection) -> None:
        with self._guard:
            if len(self._idle) < _MOST:
                self._idle.append((origin, connection))
                return
        connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def _pop(self, origin: Origin) -> Connection | None:
        with self._guard:
            if self._process != os.getpid():  # a forked child must not go on speaking on its parent's connections
                self._process = os.getpid()
                self.close()
            for number in range(len(self._idle) - 1, -1, -1):
                if self._idle[number][0] == origin:
                    return self._idle.pop(number)[1]
            return None
