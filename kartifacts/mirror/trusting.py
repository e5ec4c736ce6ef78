"""Whom a mirror believes: signed metadata under roots that were given, or the pins of a lock; never the other side."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

from kartifacts.errors import ConfigError, ExpiredMetadata, SourceError, VerificationError
from kartifacts.mirror.original import check_original
from kartifacts.mirror.reading import BucketSource
from kartifacts.model.layout import TIMESTAMP, View, metadata_path
from kartifacts.model.manifest import Lock, Synced
from kartifacts.publish.buckets import Bucket, Stamped
from kartifacts.trust.released import Released

log = logging.getLogger(__name__)

Read = Callable[[str, int], bytes]

MAX_ROOT = 512_000  # bytes, as TUF clients have it
_LOOKED_AT = "it is only looked at, and nothing is put to use because of it"
_FILE = re.compile(r"([1-9][0-9]{0,17})\.([a-z0-9._+-]+)\.json")
_RANKS = {"root": 0, "targets": 1, "snapshot": 3}  # libraries: 2


@dataclass(frozen=True)
class Signature:
    """The state of one view, as a client of its root has verified it."""

    view: View
    seen: Synced
    timestamp: bytes
    before: Stamped | None = None  # what the mirror's timestamp was when this began


@dataclass(frozen=True)
class Basis:
    """What is to be mirrored at most, and all that a client needs to believe it."""

    releases: tuple[Released, ...]
    metadata: dict[str, bytes] = field(default_factory=dict)  # path → content; what never changes, in publish order
    signatures: tuple[Signature, ...] = ()


def pinned(lock: Lock) -> Basis:
    """The pins are the trust; there is no metadata to copy."""
    if not lock.releases:
        raise ConfigError("the lock pins no release, so there is nothing to mirror")
    return Basis(tuple(Released(pin) for pin in lock.releases))


def signed(
    roots: Sequence[bytes], read: Read, *, states: Path | None, mirror: Bucket | None = None, expired: bool = False
) -> Basis:
    """Verify what `read` gives as a client of each root would.

    Args:
        states: directory that remembers what was seen, so that nothing older passes; None: nothing is remembered.
        mirror: what is verified must not be older than what this bucket holds, either.
        expired: take metadata that is past its expiry; all else is checked.

    Raises:
        ConfigError: two roots of one view.
        VerificationError, SourceError: what a client would say.
    """
    from kartifacts.trust.client import view_of

    views = [view_of(root) for root in roots]
    if len(set(views)) != len(views):
        raise ConfigError(f"two of the roots are of the {views[0]} view; give one of each view at most")
    releases: dict[tuple[str, str, str], Released] = {}
    metadata: dict[str, bytes] = {}
    signatures = []
    for root in roots:
        signature, files, found = _verified(root, read, states, mirror, expired)
        signatures.append(signature)
        metadata |= files
        releases.update({(each.pin.library, each.pin.version, each.pin.sha256): each for each in found})
    return Basis(tuple(releases[key] for key in sorted(releases)), metadata, tuple(signatures))


def _verified(
    root: bytes, read: Read, states: Path | None, mirror: Bucket | None, expired: bool
) -> tuple[Signature, dict[str, bytes], list[Released]]:
    from kartifacts.trust.client import refresh, refresh_expired, repository_id, view_of

    view = view_of(root)
    before = mirror.read(metadata_path(view, TIMESTAMP)) if mirror is not None else None
    floor = _held(root, mirror) if mirror is not None and before is not None else None
    state = states / repository_id(root) if states is not None else None
    try:
        trusted = refresh(root, state, read, floor=floor)
    except ExpiredMetadata:
        if not expired:
            raise
        trusted = refresh_expired(root, state, read, floor=floor, until=_soon(), reason=_LOOKED_AT)
    files = dict(trusted.files)
    timestamp = files.pop(metadata_path(view, TIMESTAMP))
    roots = _roots(view, trusted.seen.root, lambda path, limit: files.get(path) or read(path, limit))
    check_original(view, roots, timestamp)
    files |= roots
    ordered = {path: files[path] for path in sorted(files, key=_rank)}
    releases = [release for library in trusted.libraries.values() for release in library.releases]
    return Signature(view, trusted.seen, timestamp, before), ordered, releases


def _soon() -> date:
    return datetime.now(timezone.utc).date() + timedelta(days=2)


def _held(root: bytes, mirror: Bucket) -> Synced | None:
    """The versions that a mirror holds, if a client would believe them: nothing older may take their place."""
    from kartifacts.trust.client import refresh, refresh_expired

    read = BucketSource(mirror).document
    try:
        try:
            return refresh(root, None, read).seen
        except ExpiredMetadata:
            return refresh_expired(root, None, read, until=_soon(), reason=_LOOKED_AT).seen
    except SourceError as error:
        if not error.missing:
            raise
        log.warning("%s lacks a part of its metadata, which is copied anew: %s", mirror.name, error.message)
        return None
    except VerificationError as error:
        error.message = f"what {mirror.name} holds already is not what the root signs: {error.message}"
        raise


def _roots(view: View, last: int, read: Read) -> dict[str, bytes]:
    """Every version of the root from the first, each signed by who comes before it: clients begin with any of them."""
    from kartifacts.trust.signing import check_signed

    found: dict[str, bytes] = {}
    earlier: bytes | None = None
    for version in range(1, last + 1):
        path = metadata_path(view, f"{version}.root.json")
        content = read(path, MAX_ROOT)
        if earlier is not None:
            check_signed(earlier, "root", content, path)
        found[path] = earlier = content
    return found


def _rank(path: str) -> tuple[int, int, str]:
    """Where a metadata file comes when it is published: after all that it names."""
    matched = _FILE.fullmatch(path.rpartition("/")[2])
    if matched is None:
        raise VerificationError(f"{path!r} is no name of a metadata file")
    return _RANKS.get(matched[2], 2), int(matched[1]), path
