"""Deletes from a bucket what nothing public reaches any more, once it has been so for long enough.

1. keep publishers and other collectors away                                   `publish.leases`
2. mark: what the public metadata of both views reaches, and what index.json does
3. all else that has a name of ours gets a tombstone, if it has none; what is reached again loses its
4. delete what has had its tombstone for the whole grace
5. let publishers in again
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.model.digest import parse_digest, sha256, strict_json
from kartifacts.model.layout import OCI_INDEX, VIEWS, View, blob_path, target_path
from kartifacts.model.manifest import MAX_INDEX, MEDIA_INDEX, MEDIA_MANIFEST
from kartifacts.publish.buckets import Bucket, Listed
from kartifacts.publish.leases import DELETING, deleting, parse_time, tombstones
from kartifacts.publish.oci_index import entries_in
from kartifacts.publish.public import read_public
from kartifacts.trust.released import Released

if TYPE_CHECKING:
    from kartifacts.trust.keyring import Keyring

log = logging.getLogger(__name__)

GRACE = timedelta(days=30)
KEEP_METADATA = timedelta(days=90)

_PLACES = ("targets", "metadata", "airgap", "blobs")  # whatever names another is deleted before it
_OURS = re.compile(
    r"blobs/sha256/[0-9a-f]{64}|targets/[^/]+/[^/]+/[0-9a-f]{64}\.(index|provenance)\.json"
    r"|(?P<metadata>metadata|airgap)/[0-9]+\.(?!root\.)[^/]+\.json"
)


class Retained(NamedTuple):
    """What was done, or with a dry run what would have been."""

    reached: int  # objects that stay
    waiting: int  # that nothing reaches, in their grace
    deleted: tuple[Listed, ...]
    left: int  # that were to be deleted, had there been time


def retain(
    bucket: Bucket,
    keyring: Keyring,
    *,
    grace: timedelta = GRACE,
    keep_metadata: timedelta = KEEP_METADATA,
    dry_run: bool = False,
    now: datetime | None = None,
) -> Retained:
    """Delete what nothing public reaches since `grace`.  Roots, timestamps and index.json stay for ever.

    Args:
        keyring: tells what is public; nothing is signed.
        keep_metadata: versions that are younger stay, for readers who are about to ask for them.

    Raises:
        Busy: somebody publishes, or deletes too; nothing was deleted.
        Unlisted: the bucket cannot tell what it holds.
        ConfigError: nothing is signed there.
        VerificationError: what is public does not hold or is not complete; nothing was deleted.
        SourceError: the bucket cannot be read or written.
    """
    now = now or datetime.now(timezone.utc)
    bucket.list("blobs/none")  # a bucket that cannot be listed says so before it is written to
    if dry_run:
        since = dict(tombstones(bucket).since)
        doomed, report = _marked(bucket, keyring, since, grace, keep_metadata, now)
        return report._replace(deleted=tuple(doomed), left=0)
    with deleting(bucket, now) as since:
        doomed, report = _marked(bucket, keyring, since, grace, keep_metadata, now)
        begun, done = datetime.now(timezone.utc), list[Listed]()
        for entry in doomed:
            if datetime.now(timezone.utc) - begun > DELETING / 2:  # soon publishers will take this one for dead
                log.warning("%d objects are left for the next run", len(doomed) - len(done))
                break
            bucket.delete(entry.path)
            del since[entry.path]
            done.append(entry)
    return report._replace(deleted=tuple(done), left=len(doomed) - len(done))


def _marked(
    bucket: Bucket,
    keyring: Keyring,
    since: dict[str, str],
    grace: timedelta,
    keep_metadata: timedelta,
    now: datetime,
) -> tuple[list[Listed], Retained]:
    """Bring the tombstones up to date; then what is to be deleted."""
    reached = _reached(bucket, keyring, now)
    listed = [entry for place in _PLACES for entry in bucket.list(place)]
    loose = {entry.path: entry for entry in listed if _is_loose(entry, reached, now - keep_metadata)}
    for path in set(since) - set(loose):
        del since[path]
    doomed = []
    for path, entry in loose.items():
        first = since.get(path)
        if first is None or parse_time(first).timestamp() < entry.modified:
            since[path] = now.isoformat()  # new here, or written again since: its grace begins now
        elif now - parse_time(first) >= grace:
            doomed.append(entry)
    return doomed, Retained(len(listed) - len(loose), len(loose) - len(doomed), (), 0)


def _is_loose(entry: Listed, reached: set[str], young: datetime) -> bool:
    """Whether an object is one of those that we write and nothing reaches it."""
    matched = _OURS.fullmatch(entry.path)
    if matched is None or entry.path in reached:
        return False
    return matched["metadata"] is None or entry.modified < young.timestamp()


# -- marking -----------------------------------------------------------------------------------------------------------


def _reached(bucket: Bucket, keyring: Keyring, now: datetime) -> set[str]:
    """The paths of all that somebody who reads now may ask for."""
    reached: set[str] = set()
    views: tuple[View, ...] = VIEWS
    shown = [read_public(bucket, keyring, view, now).trusted for view in views]
    if not any(shown):
        raise ConfigError(
            f"{bucket.name} has no signed metadata, so nobody can tell what is public: nothing is signed there"
        )
    for trusted in shown:
        if trusted is not None:
            reached |= set(trusted.files)
            for library in trusted.libraries.values():
                for release in library.releases:
                    _reach_release(bucket, release, reached)
    index = bucket.read(OCI_INDEX)
    _reach(bucket, entries_in(index.content if index is not None else None, bucket.name), OCI_INDEX, reached)
    return reached


def _reach_release(bucket: Bucket, release: Released, reached: set[str]) -> None:
    pin = release.pin
    index = parse_digest(pin.sha256)
    reached.add(target_path(pin.library, pin.version, index))
    if bucket.size(blob_path(index)) is None:
        raise VerificationError(f"{bucket.name} lacks the index of {pin.library} {pin.version}; nothing was deleted")
    _reach(bucket, [{"digest": index, "mediaType": MEDIA_INDEX}], "the metadata", reached)
    if release.provenance is not None:
        statement, _ = release.provenance
        reached.add(target_path(pin.library, pin.version, statement, "provenance"))
        _reach(bucket, [{"digest": statement, "mediaType": MEDIA_INDEX}], "the metadata", reached)


def _reach(bucket: Bucket, descriptors: Sequence[Mapping[str, Any]], where: str, reached: set[str]) -> None:
    """Reach what OCI descriptors point at, and all that is named there; what is not there is nobody's to delete."""
    ahead = [(each, where) for each in descriptors]
    while ahead:
        descriptor, where = ahead.pop()
        digest = parse_digest(str(descriptor.get("digest")), what=where)
        path = blob_path(digest)
        if path in reached:
            continue
        reached.add(path)
        if descriptor.get("mediaType") in (MEDIA_INDEX, MEDIA_MANIFEST):
            try:
                content = bucket.get(path, MAX_INDEX)
            except SourceError as error:
                if not error.missing:
                    raise
                continue
            if sha256(content) != digest:
                raise VerificationError(f"{path} in {bucket.name} is damaged; nothing was deleted", source=path)
            ahead += [(each, path) for each in _named(content, path)]


def _named(content: bytes, what: str) -> Iterator[Mapping[str, Any]]:
    """The descriptors in an OCI index or manifest."""
    read = strict_json(content, what=what)
    if isinstance(read, dict):
        for each in (*read.get("manifests", ()), *read.get("layers", ()), read.get("config")):
            if isinstance(each, dict):
                yield each
