"""Objects in the workspace: kept by what they were made of and what they are, and found again while that still holds.

objects/<name[:2]>/<name>/<sha256>.o         `name` is the digest of what it was made of
                         /<sha256>.json      the files outside of the library that its compiler read
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kartifacts.build.closure import Asked
from kartifacts.build.outside import Seen, seen, unchanged
from kartifacts.build.workspace import replace_file, share_file, storage_errors
from kartifacts.errors import KartifactsError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import unfit
from kartifacts.model.digest import canonical_json, sha256, strict_json

log = logging.getLogger(__name__)

MAX_OBJECT = 2 << 30  # bytes
_MAX_RECORD = 16 << 20  # bytes
_RECORD = ".json"


def find(workspace: Path, name: str) -> Path | None:
    """The object of this name that may be linked: whole, our own, and made of headers that have not changed since.

    None if there is none; writes nothing.
    """
    with suppress(OSError):
        for path in sorted(_home(workspace, name).iterdir()):
            if path.suffix != _RECORD and not path.name.startswith(".") and _is_usable(path):
                return path
    return None


def keep(
    workspace: Path,
    name: str,
    output: Path,
    read: Iterable[str],
    suffix: str,
    *,
    search: Sequence[str] = (),
    asked: Iterable[Asked] = (),
    since: int | None = None,
) -> Path:
    """Keep what a compiler made.

    Args:
        name: the digest of all that it was made of, but for `read`.
        read: full paths of the files outside of the library that the compiler read.
        search, asked: as of `outside.seen`.
        since: when the compiler started, in nanoseconds.

    Raises:
        BuildError: as of `outside.seen`.
        StoreError: it cannot be written.
    """
    outside = seen(read, search, asked=asked, since=since)
    with storage_errors(output, "read in"):
        digest = sha256(read_regular(output, MAX_OBJECT))
    place = _home(workspace, name) / f"{digest}{suffix}"
    replace_file(place.with_suffix(_RECORD), canonical_json(outside))
    share_file(output, place)
    return place


def outside_of(path: Path) -> list[Seen]:
    """The files outside of the library that went into an object that was kept.

    Raises:
        VerificationError: its record is missing or damaged.
    """
    record = path.with_suffix(_RECORD)
    what = str(record)
    try:
        return msgspec.convert(strict_json(read_regular(record, _MAX_RECORD), what=what), list[Seen], strict=True)
    except OSError as error:
        raise VerificationError(f"{what} cannot be read: {error.strerror or error}") from error
    except (msgspec.ValidationError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error


def _home(workspace: Path, name: str) -> Path:
    return workspace / "objects" / name[:2] / name


def _is_usable(path: Path) -> bool:
    try:
        found = os.lstat(path)
        if reason := unfit(found, found.st_size):
            raise VerificationError(reason)
        if sha256(read_regular(path, MAX_OBJECT)) != path.stem:
            raise VerificationError("it has changed since it was made")
        return unchanged(outside_of(path))
    except (OSError, KartifactsError) as error:
        log.warning("the object %s is damaged or somebody else's, and is not used: %s", path, error)
        return False
