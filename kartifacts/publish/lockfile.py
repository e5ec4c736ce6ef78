"""kartifacts.lock: the releases, pinned by digest, that a machine may use, and the signed state they were taken from.

It holds at most one version of a library, and one state of a repository, which never becomes an older one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.manifest import Lock, Pin, Synced, decode_lock
from kartifacts.publish import files

MAX_LOCK = 1 << 20  # bytes


def read_lock(path: Path) -> Lock:
    """Read a lock.

    Raises:
        ConfigError: there is none, it cannot be read, or it is too large to be one.
        VerificationError: it is malformed.
    """
    try:
        data = read_regular(path, MAX_LOCK)
    except OSError as error:
        raise ConfigError(
            f"cannot read the lock {str(path)!r}: {error.strerror or error}",
            hint="KARTIFACTS_LOCK names it; kartifacts lock REPOSITORY --out FILE writes one",
        ) from error
    return decode_lock(data, what=str(path))


def add_pins(path: Path, pins: Iterable[Pin]) -> Lock:
    """Pin releases in the lock at `path`, which is made if need be; another version of a library is replaced.

    Raises:
        VerificationError: the lock that is there is malformed; it is left as it is.
        ConfigError: it cannot be written, or two of the pins are versions of one library.
    """
    added = one_version_each(pins)
    return _updated(path, lambda lock: Lock(version=1, releases=_with(lock, added), synced=lock.synced))


class Overtaken(VerificationError):
    """Somebody else has written a newer state of the same repository meanwhile; it stays."""


def record(path: Path, pins: Iterable[Pin], synced: Synced) -> Lock:
    """Pin releases as `add_pins` does, and put down the signed state of the repository that they were taken from.

    Raises:
        Overtaken: the lock holds a newer state.
        VerificationError, ConfigError: as `add_pins`.
    """
    added = one_version_each(pins)

    def changed(lock: Lock) -> Lock:
        others = [each for each in lock.synced if each.repository != synced.repository]
        for before in lock.synced:
            if before.repository == synced.repository:
                _check_newer(synced, before)
        return Lock(version=1, releases=_with(lock, added), synced=[*others, synced])

    return _updated(path, changed)


def _check_newer(synced: Synced, before: Synced) -> None:
    # With another root lower versions may be right: keys were changed, so that one recovers from stolen ones.
    numbers = ("timestamp", "snapshot", "targets") if synced.root == before.root else ()
    for role in ("root", *numbers):
        if getattr(synced, role) < getattr(before, role):
            raise Overtaken(
                f"the lock was made from version {getattr(before, role)} of {role}.json, which is newer than "
                f"{getattr(synced, role)}; it was left as it is",
                expected=f"version {getattr(before, role)} or newer",
                actual=f"version {getattr(synced, role)}",
            )


def _with(lock: Lock, added: dict[str, Pin]) -> list[Pin]:
    return list((one_version_each(lock.releases) | added).values())


def _updated(path: Path, change: Callable[[Lock], Lock]) -> Lock:
    def merged(current: bytes | None) -> bytes:
        lock = decode_lock(current, what=str(path)) if current is not None else Lock(version=1, releases=[])
        return _encode(change(lock))

    try:
        files.update(path.resolve(), merged)  # resolved, so that a link stays a link
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        raise ConfigError(
            f"cannot write the lock {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return read_lock(path)


def one_version_each(pins: Iterable[Pin]) -> dict[str, Pin]:
    """Library → pin; a `ConfigError` if a library has two."""
    chosen: dict[str, Pin] = {}
    for pin in pins:
        if chosen.setdefault(pin.library, pin) != pin:
            raise ConfigError(
                f"a lock holds one version of a library, got {chosen[pin.library].version} and {pin.version} "
                f"of {pin.library}",
                hint="choose one with --release-version",
            )
    return chosen


def _encode(lock: Lock) -> bytes:
    """One field a line, sorted: made to be read and compared by people."""
    ordered = Lock(
        version=lock.version,
        releases=sorted(lock.releases, key=lambda pin: pin.library),
        synced=sorted(lock.synced, key=lambda each: each.repository),
    )
    return (json.dumps(msgspec.to_builtins(ordered), indent=2, sort_keys=True) + "\n").encode()
