"""The read side: places that hold blobs by digest, behind one protocol."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from kartifacts.config import Settings
from kartifacts.files.directories import directory_in
from kartifacts.files.installed import declares, places
from kartifacts.model.digest import Digest
from kartifacts.model.layout import BUNDLE_GROUP
from kartifacts.sources.breaker import Breaker

log = logging.getLogger(__name__)


class Pieces:
    """The bytes of one read, as an iterator, and where they really come from."""

    def __init__(self, pieces: Iterator[bytes], place: str) -> None:
        self._pieces = pieces
        self.place = place  # a path, or the URL after all redirects, without credentials

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def __next__(self) -> bytes:
        return next(self._pieces)


class Source(Protocol):
    """A place to read from.  It is never trusted: whoever reads checks size and digest."""

    name: str  # for messages: a path or a URL without credentials
    local: bool  # True if reading opens no socket
    mirror: bool  # True if it may be gone tomorrow, so that what it gives is kept in the store
    breaker: Breaker  # what is known of its faults; see `kartifacts.sources.turns` for who asks which source when
    installed: bool  # True if it lies beside this process's code, so that whoever can change it can change that too

    def read(
        self, digest: Digest, size: int, *, start: int = 0, length: int | None = None
    ) -> AbstractContextManager[Pieces]:
        """Open `length` bytes (all, if None) from `start` of the blob `digest`, which is `size` bytes long.

        The iterator gives at most `length` bytes, in pieces of at most 1 MiB, and raises if the source ends early.

        Raises:
            SourceError: `missing` if the source does not hold the blob; `retry_after` if it is not to be asked before;
                otherwise the fault, with the effective URL, HTTP status and what to do.  Raised inside the iterator
                too.  Nothing is waited for and nothing asked twice before the first bytes have come.
            VerificationError: the source answers with something that cannot be the blob (wrong length, HTML).
        """
        ...

    def document(self, path: str, limit: int) -> bytes:
        """A small file of the repository by its path (`model.layout`), as it is now; for signed metadata.

        Raises:
            SourceError: `missing` if it is not there; or it is larger than `limit`, or slow, or any other fault.
        """
        ...

    def blob(self, digest: Digest, size: int) -> Path | None:
        """The path of a blob, unread, if this source is local and holds one of that size."""
        ...

    def loose(self, digest: Digest, suffix: str) -> Path | None:
        """The path of a raw, unpacked kernel that can be used in place, if this source holds one, damaged or not."""
        ...


def from_settings(settings: Settings) -> list[Source]:
    """The sources in the order in which they are asked: directories, installed bundle wheels, mirrors.

    Offline, mirrors that need a socket are left out; a ``file://`` mirror is not one of them.
    """
    from kartifacts.sources.directory import DirectorySource

    sources: list[Source] = [DirectorySource(path) for path in settings.path]
    sources.extend(
        DirectorySource(path, name=f"{path} ({wheel})", installed=True) for wheel, path in installed_bundles()
    )
    sources.extend(
        open_mirror(url, settings) for url in settings.mirrors if not settings.offline or url.startswith("file://")
    )
    return sources


def open_mirror(url: str, settings: Settings) -> Source:
    """The mirror at a URL of a kind that KARTIFACTS_MIRRORS takes; nothing is asked of it yet.

    Raises:
        ConfigError: it is malformed, or cannot be asked offline.
    """
    if url.startswith("file://"):
        from kartifacts.sources.directory import DirectorySource

        path = directory_in(url)
        assert path is not None, "a file URL"
        return DirectorySource(path, name=url, mirror=True)
    if url.startswith(("oci://", "oci+http://")):
        from kartifacts.sources.oci import OciSource

        return OciSource(url, settings)
    if url.startswith("s3://"):
        from kartifacts.sources.s3 import S3Source

        return S3Source(url, settings)
    from kartifacts.sources.http import HttpSource

    return HttpSource(url, settings)


def installed_bundles() -> tuple[tuple[str, Path], ...]:
    """Name and directory of every bundle wheel in this environment; none of their code is run."""
    if not declares(BUNDLE_GROUP):
        return ()
    return _bundles_of(places())


@lru_cache(maxsize=1)  # it reads a file of every installed distribution: milliseconds, and more the more there are
def _bundles_of(_places: tuple[tuple[str, int], ...]) -> tuple[tuple[str, Path], ...]:
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    found = []
    for point in sorted(entry_points(group=BUNDLE_GROUP), key=lambda point: point.name):
        try:
            # Only a top-level package is found without importing anything; a dotted one would run its parents' code.
            package, _, inside = point.module.partition(".")
            spec = find_spec(package)
        except (AttributeError, ImportError, ValueError) as error:
            log.warning("the bundle %s names no package: %r: %s", point.name, point.value, error)
            continue
        locations = list(spec.submodule_search_locations or ()) if spec is not None else []
        if locations:
            found.append((point.name, Path(locations[0], *inside.split(".") if inside else ())))
        else:
            log.warning("the bundle %s names the package %s, which is not installed", point.name, package)
    return tuple(found)
