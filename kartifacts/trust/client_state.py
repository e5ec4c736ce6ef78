"""Looks at the files that remember what a reader has seen of a repository, before the updater opens them."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from kartifacts.errors import StoreError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import check_own_directory, unfit
from kartifacts.trust.signed import parse_any

log = logging.getLogger(__name__)

HISTORY = "root_history"
_NEWEST = re.compile(rf"{HISTORY}/[0-9]+\.root\.json")  # where the updater's link root.json leads
_HINT = "remove it: what was seen before is then known from the lock alone"


def check_state(state: Path, limit: int) -> None:
    """Refuse what nobody but this user may have put there, and say what of it is damaged.

    The updater itself waits for pipes, follows links, and takes what is damaged for what was never seen.

    Raises:
        StoreError: a file is no regular one, another user's, or writable by others; or it cannot be read.
    """
    history = state / HISTORY
    if os.path.lexists(history):
        check_own_directory(str(history))
    for path in _files(state, history):
        found = os.lstat(path)
        if path == state / "root.json" and stat.S_ISLNK(found.st_mode) and _NEWEST.fullmatch(os.readlink(path)):
            continue
        if problem := unfit(found, found.st_size):
            raise StoreError(f"{str(path)!r} says what was seen of a repository, and {problem}", hint=_HINT)
        try:
            parse_any(read_regular(path, limit), str(path))
        except OSError as error:
            raise StoreError(f"cannot read {str(path)!r}: {error.strerror or error}", hint=_HINT) from error
        except VerificationError as error:
            log.warning("what was seen of a repository before is damaged and says nothing any more: %s", error.message)


def _files(state: Path, history: Path) -> Iterator[Path]:
    for directory in (state, history):
        for name in sorted(os.listdir(directory) if os.path.isdir(directory) else ()):
            if name.endswith(".json"):
                yield directory / name
