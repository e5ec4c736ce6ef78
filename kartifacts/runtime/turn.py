"""One thread of a process loads at a time, so that those that want the same kernel get the same one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other thread of this process loads."""
    with _lock:  # this one is given back, also in a child that is forked meanwhile
        yield


def _unlock_in_child() -> None:
    # The thread that was loading when its process forked is not there to give the lock back.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock_in_child)
