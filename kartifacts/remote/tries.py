"""Does something again after a transient fault of a store, with pauses that grow or that the store asks for."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from kartifacts.errors import SourceError

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds of one pause that a store may ask for
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

T = TypeVar("T")


def persist(act: Callable[[], T], *, retries: int, sleep: Callable[[float], object] = time.sleep) -> T:
    """What `act` gives, called again after a `SourceError` that is not permanent, at most `retries` times."""
    for attempt in range(1, retries + 1):
        try:
            return act()
        except SourceError as error:
            longest = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
            pause = random.uniform(longest / 2, longest)  # noqa: S311  spreads clients, hides nothing
            if error.retry_after is not None:
                pause += error.retry_after
            if error.permanent or pause > PATIENCE:
                raise
            log.info("%s; trying again in %.1f s", error.message, pause)
        sleep(pause)
    return act()
