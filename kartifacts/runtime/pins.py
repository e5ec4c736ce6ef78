"""kartifacts.lock as run time reads it: the pins in force."""

from __future__ import annotations

from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.model.manifest import Lock, decode_lock

MAX_LOCK = 1 << 20


def read_lock(settings: Settings) -> Lock:
    """The lock that the settings name; an empty one if they name none.

    Raises:
        ConfigError: it cannot be read.
        VerificationError: it is malformed.
    """
    if settings.lock is None:
        return Lock(version=1, releases=[])
    try:
        with open(settings.lock, "rb") as file:
            data = file.read(MAX_LOCK + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the lock {str(settings.lock)!r}: {error.strerror}",
            hint="KARTIFACTS_LOCK names it; kartifacts lock REPOSITORY --out FILE writes one",
        ) from error
    if len(data) > MAX_LOCK:
        raise ConfigError(f"the lock {str(settings.lock)!r} is larger than {MAX_LOCK} bytes")
    return decode_lock(data, what=str(settings.lock))
