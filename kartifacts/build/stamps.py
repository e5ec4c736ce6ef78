"""Says whether a file was touched, from what the file system notes of it; no file is opened here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

_COARSE = 1_000_000_000  # nanoseconds: some file systems count in seconds
_TICK, _COARSE_TICK = 50_000_000, 2_500_000_000  # nanoseconds by which a clock of files may lag behind ours

Stamp = tuple[int, ...]
"""What is different as soon as a file or a directory has been changed or replaced; empty if there is none."""


def stamp_of(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ()
    # A change that keeps size and time of change, as `touch -d` makes them, still shows in the last.
    return found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(stamp: Stamp, before: int | None = None) -> bool:
    """Whether a change after `before` (in nanoseconds; default: now) gives another stamp.

    A file that was changed a moment ago may be changed again within one tick of the file system's clock.
    """
    if not stamp:
        return False
    tick = _TICK if stamp[-1] % _COARSE else _COARSE_TICK
    return stamp[-1] < (time.time_ns() if before is None else before) - tick


def is_file(path: str) -> bool:
    """Whether a compiler would take what is there; it passes over directories."""
    return os.path.lexists(path) and not os.path.isdir(path)


def plain(path: str) -> str:
    """A path to the same file without ``..``, which behind a link to a directory is not where the text has it."""
    short = os.path.abspath(path)
    if ".." in path.split("/"):
        try:
            return short if os.path.samefile(path, short) else os.path.realpath(path)
        except OSError:
            return os.path.realpath(path)
    return short


def homes(paths: Iterable[str]) -> set[str]:
    """The directories of which one changes as soon as there is a file at one of `paths`, where there is none now."""
    found: set[str] = set()
    for place in {os.path.dirname(path) for path in paths}:
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        found.add(place)
    return found
