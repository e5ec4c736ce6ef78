"""The pins in force: the lock that the settings name, or none."""

from __future__ import annotations

from kartifacts.config import Settings
from kartifacts.model.manifest import Lock


def read_lock(settings: Settings) -> Lock:
    """The lock that the settings name, an empty one if they name none; raises as `publish.lockfile.read_lock`."""
    if settings.lock is None:
        return Lock(version=1, releases=[])
    from kartifacts.publish import lockfile

    return lockfile.read_lock(settings.lock)
