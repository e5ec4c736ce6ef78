"""kartifacts.lock: the releases, pinned by digest, that a machine may use.  At most one version of a library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kartifacts.errors import ConfigError
from kartifacts.files.reading import read_regular
from kartifacts.model.manifest import Lock, Pin, decode_lock
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

    def merged(current: bytes | None) -> bytes:
        before = decode_lock(current, what=str(path)).releases if current is not None else []
        return _encode(Lock(version=1, releases=[*(one_version_each(before) | added).values()]))

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
    ordered = Lock(version=lock.version, releases=sorted(lock.releases, key=lambda pin: pin.library))
    return (json.dumps(msgspec.to_builtins(ordered), indent=2, sort_keys=True) + "\n").encode()
