"""Which source is asked when: each in its order, the doubtful ones last, and again once there is reason to."""

from __future__ import annotations

import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kartifacts.errors import SourceError, VerificationError
from kartifacts.sources import Source
from kartifacts.sources.breaker import PATIENCE

log = logging.getLogger(__name__)

CLEAN_RETRIES = 2  # further tries of a source whose bytes were wrong
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_SHORTEST = 0.5  # seconds of a pause that was asked for, which may be 0
_AGAIN = 600.0  # seconds after which the same complaint is news again

_T = TypeVar("_T")
_complaints: dict[tuple[str, str], float] = {}


def first_good(
    sources: Sequence[Source],
    attempt: Callable[[Source], _T],
    *,
    label: str,
    retries: int,
    patience: float = PATIENCE,
    refused: Callable[[Source, SourceError | VerificationError], object],
    final: tuple[type[Exception], ...] = (),
    sleep: Callable[[float], object] = time.sleep,
) -> _T | None:
    """What the first source that can do it gives; None if none can.

    A source that fails, asks for a pause or gives wrong bytes gets its next turn after the others have had theirs.  So
    the time that a mirror wants is only waited for where nothing else is left, and at most `PATIENCE` of it.

    Args:
        attempt: reads from a source; may be called several times.
        label: what is read, for the log.
        retries: further tries of one source after a fault; pauses that it asks for are not counted.
        patience: seconds that are waited for in all because sources asked for it.
        refused: is told of each error.
        final: errors that no other source would answer differently.
    """
    turns = {id(source): _Turns(source, retries, patience) for source in sources}
    waited = 0.0
    left = list(sources)
    while left:
        ready = [source for source in left if turns[id(source)].due <= waited]
        for source in sorted(ready, key=lambda source: source.breaker.doubtful):
            faults = source.breaker.faults
            try:
                result = attempt(source)
            except final:
                raise
            except (SourceError, VerificationError) as error:
                refused(source, error)
                _complain(source, error, label)
                if not turns[id(source)].again(error, waited):
                    left = [other for other in left if other is not source]
            else:
                source.breaker.proved(faults)
                return result
        if left:
            pause = min(turns[id(source)].due for source in left) - waited
            if pause > 0:
                sleep(pause)
                waited += pause
    return None


class _Turns:
    """What one source has left of its tries, and when its next turn is, in seconds of waiting."""

    def __init__(self, source: Source, retries: int, patience: float) -> None:
        self._source = source
        self._patience = patience
        self._retries = retries
        self._failed: Counter[str] = Counter()
        self.due = 0.0

    def again(self, error: SourceError | VerificationError, waited: float) -> bool:
        """Whether there is a next turn after `error`."""
        if isinstance(error, VerificationError):
            self._source.breaker.disappointed(error.message)
            self._failed["wrong"] += 1
            return self._failed["wrong"] <= min(CLEAN_RETRIES, self._retries)
        if error.permanent:
            return False
        if error.retry_after is not None:
            # A little later than asked, and not all clients at once.
            self.due = waited + max(error.retry_after, _SHORTEST) + random.uniform(0.01, 0.3)  # noqa: S311  no secret
            return self.due <= self._patience
        self._failed["fault"] += 1
        longest = min(_FIRST_PAUSE * 2 ** self._failed["fault"], _LONGEST_PAUSE)
        self.due = waited + random.uniform(longest / 2, longest)  # noqa: S311  the same
        return self._failed["fault"] <= self._retries


def _complain(source: Source, error: SourceError | VerificationError, label: str) -> None:
    """Log an error: as a warning the first time that a source has it, whatever the file."""
    level = logging.DEBUG
    if not (isinstance(error, SourceError) and error.missing):
        reason = re.sub(r"[0-9a-f]{16,}|\b[\d.]+(?=( more)? (bytes|s)\b)|\b\d+-\d+\b", "#", error.message)
        now = time.monotonic()
        if now - _complaints.get((source.name, reason), float("-inf")) > _AGAIN:
            if len(_complaints) > 1000:
                _complaints.clear()
            _complaints[source.name, reason] = now
            level = logging.WARNING
    named = "" if source.name in error.message else f"{source.name}: "
    log.log(level, "%s: %s%s", label, named, error.message)
