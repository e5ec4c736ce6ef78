"""What a reader believes: asks a repository for its signed metadata, and gives the releases that the root allows.

Nothing here imports tuf before it is called, and nothing that loads kernels calls it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple, TypeVar

from kartifacts.errors import ConfigError, SourceError
from kartifacts.model.digest import sha256, strict_json
from kartifacts.model.layout import View
from kartifacts.model.manifest import Synced
from kartifacts.trust.released import Library, Released

__all__ = [
    "Library",
    "Read",
    "Released",
    "Trusted",
    "check_exemption",
    "look",
    "refresh",
    "refresh_expired",
    "repository_id",
    "view_of",
]

log = logging.getLogger(__name__)

Read = Callable[[str, int], bytes]
"""Path in a repository and limit → content; a `SourceError` that is `missing` if there is none."""

_LONGEST_EXEMPTION = timedelta(days=400)  # as long as an air gap's own metadata lives
_T = TypeVar("_T")


class Trusted(NamedTuple):
    """One state of a repository, verified from the root of trust down to the names of releases."""

    view: View
    seen: Synced  # `at` and `source` are left to who asked
    libraries: Mapping[str, Library]
    files: Mapping[str, bytes]  # all metadata that was used, by path in the repository


def repository_id(root: bytes) -> str:
    """Two roots that trust begins with share no state, whatever they are roots of."""
    return sha256(root)


def view_of(root: bytes) -> View:
    """The view that a root is of; a `VerificationError` if the file is not a root, or of no view."""
    from kartifacts.trust.signed import view_in

    strict_json(root, what="the root of trust")
    return view_in(root)


def refresh(
    root: bytes,
    state: Path | None,
    read: Read,
    *,
    libraries: Sequence[str] | None = None,
    floor: Synced | None = None,
    now: datetime | None = None,
) -> Trusted:
    """The newest state of the repository behind `read`, as TUF's client workflow finds it.

    Args:
        root: the root of trust.
        state: the directory that remembers what was seen, so that nothing older is believed; None forgets.
        libraries: whose releases are wanted; default: all that have released anything.
        floor: the lowest versions that will do, for a machine whose `state` is new.
        now: a time at which nothing may be expired either, besides the present.

    Raises:
        VerificationError, ExpiredMetadata: what there is must not be believed.
        SourceError: it could not be read.
        ConfigError: there is no library of that name.
        StoreError: `state` cannot be kept.
    """
    from kartifacts.trust import client_reading as reading
    from kartifacts.trust import client_session as session

    view = view_of(root)

    def once(directory: Path) -> Trusted:
        with session.updating(root, directory, session.by_path(read), session.base(view)) as updater:
            updater.refresh()
            verified = reading.of_state(directory, root)
            for name in reading.chosen(verified, libraries, floor):
                updater.get_targetinfo(reading.below(name))
                verified.roles[name] = session.kept(directory, name)
            trusted = reading.trusted(verified, root, floor)
            reading.check_fresh(verified, now)
            return trusted

    with _kept(state) as directory:
        return _twice(lambda: once(directory))


def refresh_expired(
    root: bytes,
    state: Path | None,
    read: Read,
    *,
    until: date,
    reason: str,
    libraries: Sequence[str] | None = None,
    floor: Synced | None = None,
    now: datetime | None = None,
) -> Trusted:
    """As `refresh`, but metadata past its expiry will do: an operator's exception, which `seen` records.

    All else is checked as ever: signatures, thresholds, hashes, and that nothing is older than what was seen before.

    Args:
        until: the last day of the exception.
        reason: why it is made.

    Raises:
        ConfigError: the exception has no reason, is over, or would last for more than 400 days.
    """
    from kartifacts.trust import expired

    now = now or datetime.now(timezone.utc)
    check_exemption(until, reason, now)
    granted = expired.Exemption(until, reason.strip(), now)
    with _kept(state) as directory:
        return _twice(lambda: expired.refresh(root, directory, read, libraries, floor, granted))


def look(root: bytes, read: Read) -> Trusted:
    """As `refresh`, whatever is expired: for who holds the keys and is about to sign anew, and for nobody else."""
    from kartifacts.trust import expired

    with _kept(None) as directory:
        return _twice(lambda: expired.look(root, directory, read, None, None)[0])


def check_exemption(until: date, reason: str, now: datetime | None = None) -> None:
    """Refuse, with a `ConfigError`, to accept expired metadata without a reason, for ever, or when that is over."""
    today = (now or datetime.now(timezone.utc)).astimezone(timezone.utc).date()
    if not reason.strip():
        raise ConfigError(
            "expired metadata is accepted for a reason only", hint="--reason says it, and the lock keeps it"
        )
    if until < today:
        raise ConfigError(f"expired metadata was to be accepted until {until}, and today is {today}")
    if until - today > _LONGEST_EXEMPTION:
        raise ConfigError(f"expired metadata can be accepted for {_LONGEST_EXEMPTION.days} days, not until {until}")


@contextmanager
def _kept(state: Path | None) -> Iterator[Path]:
    if state is not None:
        yield state
        return
    with tempfile.TemporaryDirectory(prefix="kartifacts-") as directory:
        yield Path(directory)


def _twice(ask: Callable[[], _T]) -> _T:
    """Ask again from the start where a file is gone: it may have been retired after the one that names it was read."""
    try:
        return ask()
    except SourceError as error:
        if not error.missing:
            raise
        log.debug("asking again, since a file is missing: %s", error.message)
    return ask()
