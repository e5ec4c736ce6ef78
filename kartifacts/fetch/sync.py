"""Takes a verified state of a repository from the first mirror that has one, and pins its releases in the lock."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kartifacts.config import Settings
from kartifacts.errors import (
    ArtifactUnavailable,
    ConfigError,
    ExpiredMetadata,
    KartifactsError,
    Refusal,
    SourceError,
    VerificationError,
)
from kartifacts.model.manifest import Lock, Pin, Synced
from kartifacts.trust.client import check_exemption
from kartifacts.trust.roots import read_root

if TYPE_CHECKING:
    from kartifacts.sources import Source
    from kartifacts.trust.client import Library, Released, Trusted

log = logging.getLogger(__name__)

_OVERTAKEN = 5  # times in a row that other processes may be faster
_DAY = timedelta(days=1)
_SOON = 3 * _DAY  # before metadata expires, one is told

Ask = Callable[["Source"], "Trusted"]


class Wanted(NamedTuple):
    """Which releases to pin."""

    libraries: tuple[str, ...] = ()  # none: all
    version: str | None = None  # None: the newest
    channel: str | None = None  # None: of any


class Exemption(NamedTuple):
    """Expired metadata will do, up to and including the day `until`, for a reason."""

    until: date
    reason: str


class Outcome(NamedTuple):
    """What a lock was made from."""

    lock: Lock
    path: Path
    pins: tuple[Pin, ...]
    synced: Synced


def sync(
    settings: Settings,
    *,
    root: Path | None = None,
    lock: Path | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008  it is a value
    exemption: Exemption | None = None,
) -> Outcome:
    """Verify what the mirrors have, as of now, and write what was wanted of it into the lock.

    Args:
        root: the root of trust; default: that of the settings.
        lock: default: that of the settings, or kartifacts.lock beside the configuration.

    Raises:
        VerificationError, ExpiredMetadata, SourceError: no mirror had a state that may be believed; `refusals` has
            the fault of each.  The lock is left as it is.
        ArtifactUnavailable: what is wanted was not released.
        ConfigError: there is no root, mirror or library, or no lock can be written.
        StoreError: what was seen cannot be kept.
    """
    if exemption is not None:
        check_exemption(*exemption)
    trust = _root(settings, root)
    path = _lock_path(settings, lock)
    sources = _mirrors(settings)
    for attempt in range(_OVERTAKEN):
        try:
            return _once(settings, trust, path, sources, wanted, exemption)
        except _overtaken() as error:
            if attempt + 1 == _OVERTAKEN:
                raise
            log.info("%s", error.message)
    raise AssertionError("the loop returns or raises")


def _once(
    settings: Settings,
    root: bytes,
    path: Path,
    sources: Sequence[Source],
    wanted: Wanted,
    exemption: Exemption | None,
) -> Outcome:
    from kartifacts.publish.lockfile import read_lock, record
    from kartifacts.trust.client import repository_id

    name = repository_id(root)
    before = read_lock(path) if os.path.lexists(path) else Lock(version=1, releases=[])
    floor = next((each for each in before.synced if each.repository == name), None)
    now = datetime.now(timezone.utc)
    if floor is not None and (at := _time(floor.at)) is not None and at > now + _DAY:
        log.warning("the lock was made at %s, which is later than what this machine's clock says: check it", floor.at)
    source, trusted = _ask(settings, root, sources, wanted, exemption, floor)
    pins = _pins(trusted, wanted)
    synced = msgspec.structs.replace(
        trusted.seen,
        libraries=_floors(trusted.seen, floor, partial=bool(wanted.libraries)),
        at=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        source=source.name,
    )
    _tell_of_changes(before, floor, pins, synced)
    return Outcome(record(path, pins, synced), path, pins, synced)


def _overtaken() -> type[KartifactsError]:
    from kartifacts.publish.lockfile import Overtaken

    return Overtaken


# -- what to ask -------------------------------------------------------------------------------------------------------


def _root(settings: Settings, given: Path | None) -> bytes:
    path = given or settings.root
    hint = "get root.json from the publisher, by a way that you trust, and name it with --root FILE"
    if settings.home is not None:
        hint += f", or put it at {settings.home / 'root.json'}"
    if path is None:
        raise ConfigError("no root of trust says whose signatures count", hint=hint)
    return read_root(path, hint=hint)


def _lock_path(settings: Settings, given: Path | None) -> Path:
    if given is not None or settings.lock is not None:
        return given or settings.lock  # type: ignore[return-value]  # one of them is there
    if settings.home is None:
        raise ConfigError("no lock can be written: this user has no home directory", hint="name one with --lock FILE")
    return settings.home / "kartifacts.lock"


def _mirrors(settings: Settings) -> list[Source]:
    from kartifacts.sources import from_settings

    if not settings.mirrors:
        raise ConfigError("there is no mirror to ask", hint="set KARTIFACTS_MIRRORS")
    found = [source for source in from_settings(settings) if source.mirror]
    if not found:
        raise ConfigError(
            "KARTIFACTS_OFFLINE is set, and every mirror needs a connection", hint="a file:// mirror needs none"
        )
    return found


# -- asking ------------------------------------------------------------------------------------------------------------


def _ask(
    settings: Settings,
    root: bytes,
    sources: Sequence[Source],
    wanted: Wanted,
    exemption: Exemption | None,
    floor: Synced | None,
) -> tuple[Source, Trusted]:
    """The first mirror that has a state to believe; an exemption counts only where none is within its expiry."""
    from kartifacts.trust.client import refresh, refresh_expired, repository_id

    state = settings.store / "v1" / "meta" / repository_id(root)
    libraries = wanted.libraries or None

    def usual(source: Source) -> Trusted:
        return refresh(root, state, source.document, libraries=libraries, floor=floor)

    def excepted(source: Source) -> Trusted:
        assert exemption is not None
        until, reason = exemption
        return refresh_expired(
            root, state, source.document, until=until, reason=reason, libraries=libraries, floor=floor
        )

    errors: list[tuple[Source, KartifactsError]] = []
    found = _first(settings, sources, usual, errors)
    expired = [source for source in sources if any(_is_expired(error, source) for error in errors)]
    if found is None and exemption is not None and expired:
        found = _first(settings, expired, excepted, errors)
    if found is None:
        raise _worst(errors)
    for name, message in {source.name: error.message for source, error in errors if _is_quiet(error)}.items():
        log.warning("the mirror %s was passed over: %s", name, message)
    return found


def _is_quiet(error: KartifactsError) -> bool:
    """Whether nobody has complained yet: that one of several mirrors lacks something is no fault elsewhere."""
    return isinstance(error, ConfigError) or (isinstance(error, SourceError) and error.missing)


def _is_expired(error: tuple[Source, KartifactsError], source: Source) -> bool:
    return error[0] is source and isinstance(error[1], ExpiredMetadata)


def _first(
    settings: Settings, sources: Sequence[Source], ask: Ask, errors: list[tuple[Source, KartifactsError]]
) -> tuple[Source, Trusted] | None:
    from kartifacts.sources.turns import first_good

    def attempt(source: Source) -> tuple[Source, Trusted]:
        try:
            return source, ask(source)
        except ConfigError as error:  # a library is lacking here, which another mirror may have
            errors.append((source, error))
            raise SourceError(error.message, missing=True, hint=error.hint) from error
        except (SourceError, VerificationError) as error:
            if isinstance(error, VerificationError):
                error.source = error.source or source.name
            errors.append((source, error))
            raise

    return first_good(
        sources, attempt, label="signed metadata", retries=settings.retries, refused=lambda _source, _error: None
    )


def _worst(errors: list[tuple[Source, KartifactsError]]) -> KartifactsError:
    """What to raise for all of them: what must not be believed before what was not there."""

    def badness(error: KartifactsError) -> int:
        kinds = (SourceError, ConfigError, ExpiredMetadata)
        return kinds.index(type(error)) if type(error) in kinds else 3 * isinstance(error, VerificationError)

    worst = max((error for _, error in errors), key=badness)  # the first of its kind
    refusals = {(source.name, type(error)): Refusal(source.name, error.message) for source, error in errors}
    worst.refusals = tuple(refusals.values())  # each once, also where a message tells the time
    return worst


# -- what was released -------------------------------------------------------------------------------------------------


def _pins(trusted: Trusted, wanted: Wanted) -> tuple[Pin, ...]:
    """The release of each library that is wanted."""
    chosen, without = [], []
    for library in trusted.libraries.values():
        fitting = [
            release
            for release in library.releases
            if wanted.version in (None, release.pin.version)
            and (wanted.channel is None or wanted.channel in release.channels)
        ]
        if fitting:
            chosen.append(max(fitting, key=_newness).pin)
        else:
            without.append(library)
    if without and (wanted.libraries or not chosen):
        asked = [f"version {wanted.version!r}"] if wanted.version else []
        asked += [f"anything in the channel {wanted.channel!r}"] if wanted.channel else []
        raise ArtifactUnavailable(
            f"{' and '.join(library.name for library in without)} did not release {' or '.join(asked) or 'anything'}",
            refusals=tuple(Refusal(library.name, _released(library)) for library in without),
        )
    if not chosen:
        raise ArtifactUnavailable("no library has released anything here yet")
    return tuple(chosen)


def _released(library: Library) -> str:
    shown = [
        release.pin.version + (f" ({', '.join(release.channels)})" if release.channels else "")
        for release in sorted(library.releases, key=_newness, reverse=True)
    ]
    return f"released are {', '.join(shown[:20])}{' and older ones' if len(shown) > 20 else ''}" if shown else "nothing"


def _newness(release: Released) -> tuple[object, ...]:
    """Sorts as pip does, so that a pre-release comes last; what is no version to pip goes by when it was published."""
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(release.pin.version)
    except InvalidVersion:
        return (0, release.published, release.pin.version)
    return (1 if version.is_prerelease else 2, version, release.pin.version)


# -- what is put down --------------------------------------------------------------------------------------------------


def _floors(seen: Synced, before: Synced | None, *, partial: bool) -> dict[str, int]:
    """The versions of libraries; those that were not asked for keep theirs, unless keys may have been changed."""
    if before is None or not partial or before.root != seen.root:
        return seen.libraries
    return before.libraries | seen.libraries


def _tell_of_changes(before: Lock, floor: Synced | None, pins: Sequence[Pin], synced: Synced) -> None:
    if floor is None and before.synced:
        log.warning(
            "the lock was made with another root of trust before (%s view, from %s); now %s is as this one says",
            before.synced[-1].view,
            before.synced[-1].source or "an unknown place",
            ", ".join(pin.library for pin in pins),
        )
    held = {pin.library: pin for pin in before.releases}
    for pin in pins:
        was = held.get(pin.library, pin)
        if was.version == pin.version and was.sha256 != pin.sha256:
            log.warning("%s %s is another release than the lock had: %s", pin.library, pin.version, pin.sha256)
    for name in sorted((floor.libraries.keys() if floor else set()) - synced.libraries.keys()):
        log.warning("%s may not be released here any more; the lock still pins what it did", name)


# -- how old it is -----------------------------------------------------------------------------------------------------


class Age(NamedTuple):
    """How old the state is that a lock was made from."""

    text: str
    sound: bool  # False if it is time to sync, or to ask why that is not possible


def age(synced: Synced, now: datetime | None = None) -> Age:
    """What to tell of a state that was synced: nothing that loads kernels looks at this."""
    now = now or datetime.now(timezone.utc)
    at, expires = _time(synced.at), _time(synced.expires)
    start = f"{synced.view} view" + (f" of {synced.source}" if synced.source else "")
    start += f", synced {_span(now - at)} ago" if at is not None and at <= now else f", synced at {synced.at!r}"
    if synced.accepted_expired_until:
        over = synced.accepted_expired_until < now.date().isoformat()
        kind = "was accepted" if over else "is accepted"
        reason = f"because {synced.reason!r}"
        return Age(f"{start}; expired metadata {kind} until {synced.accepted_expired_until} {reason}", not over)
    if expires is None:
        return Age(f"{start}; it expires at {synced.expires!r}", False)
    if expires <= now:
        return Age(f"{start}; its metadata is expired since {_span(now - expires)}", False)
    return Age(f"{start}; its metadata expires in {_span(expires - now)}", expires - now > _SOON)


def _span(length: timedelta) -> str:
    seconds = int(length.total_seconds())
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            number = seconds // size
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return "a minute" if seconds else "a moment"


def _time(text: str) -> datetime | None:
    """A time of ISO 8601; None if it is none, since a lock is also written by people."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)
