"""The pins in force: those of the lock that the settings name, then those that installed bundle wheels bring."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from kartifacts.config import Settings
from kartifacts.errors import VerificationError
from kartifacts.model.digest import parse_digest
from kartifacts.model.layout import BUNDLE_LOCK, blob_path
from kartifacts.model.manifest import Lock, Pin

log = logging.getLogger(__name__)


def read_lock(settings: Settings) -> Lock:
    """Every pin in force; none if there is no lock.

    A bundle wheel is as trusted as the code that was installed beside it, so its pin needs no lock of the user's.
    Of a library that the user's lock pins, wheels' pins do not count.

    Raises:
        ConfigError, VerificationError: as `publish.lockfile.read_lock`.
        VerificationError: a wheel's pin is not that of what the wheel holds.
    """
    from kartifacts.publish import lockfile

    pins = lockfile.read_lock(settings.lock).releases if settings.lock is not None else []
    own = {pin.library for pin in pins}
    seen = {(pin.library, pin.version, pin.sha256) for pin in pins}
    for wheel, pin in wheel_pins():
        if pin.library in own:
            log.debug("%s: %s is pinned by %s", wheel, pin.library, settings.lock)
        elif (pin.library, pin.version, pin.sha256) not in seen:
            seen.add((pin.library, pin.version, pin.sha256))
            pins.append(pin)
    return Lock(version=1, releases=pins)


def to_pin(settings: Settings) -> str | None:
    """What to do where nothing is pinned, if a publisher is trusted here."""
    if settings.root is None:
        return None
    also = "" if settings.mirrors else ", with KARTIFACTS_MIRRORS set"
    return f"run kartifacts sync{also}: {settings.root} says whose releases are to be pinned"


def wheel_pins() -> Iterator[tuple[str, Pin]]:
    """The pins that installed bundle wheels bring, each with the wheel's name."""
    from kartifacts.publish import lockfile
    from kartifacts.sources import installed_bundles

    for name, directory in installed_bundles():
        path = directory / BUNDLE_LOCK
        if os.path.lexists(path):
            for pin in lockfile.read_lock(path).releases:
                _check_held(pin, directory, name)
                yield name, pin


def _check_held(pin: Pin, directory: Path, wheel: str) -> None:
    # Its digest stands nowhere else: were it damaged, the release would seem to be lacking, and the JIT be asked.
    path = directory / blob_path(parse_digest(pin.sha256))
    try:
        size = os.stat(path).st_size
    except OSError:
        size = -1
    if size != pin.size:
        raise VerificationError(
            f"the bundle {wheel} is damaged: its {BUNDLE_LOCK} pins {pin.library} {pin.version}, whose index of "
            f"{pin.size} bytes is not at {str(path)!r}",
            source=str(directory / BUNDLE_LOCK),
            expected=pin.sha256,
            hint=f"install it again: pip install --force-reinstall --no-deps {wheel}",
        )
