"""Publishers and the collector of garbage keep out of each other's way: of two, at least one sees the other and stops.

gc/publishing/<uuid>.json   somebody is publishing; written before looking at which blobs exist, removed at the end
gc/tombstones.json          what nothing reaches, since when; and, while somebody deletes, `deleting`: since when

A publisher writes its lease, then looks for `deleting`.  A collector sets `deleting`, then looks for leases.  Whichever
of the two writes came first, the other side's look comes after it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import msgspec

from kartifacts.errors import KartifactsError, SourceError, VerificationError
from kartifacts.model.digest import canonical_json, strict_json
from kartifacts.publish.buckets import Bucket, Unlisted, update

log = logging.getLogger(__name__)

LEASES = "gc/publishing"
TOMBSTONES = "gc/tombstones.json"

LEASE = timedelta(hours=24)  # after which a publisher is taken for dead
DELETING = timedelta(hours=1)  # after which a collector is taken for dead
AHEAD = timedelta(hours=1)  # that clocks may differ; a mark that is further in the future never grows old


class Busy(SourceError):
    """Somebody else is at work in the bucket who must not be interfered with; a later try succeeds."""


class Tombstones(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of gc/tombstones.json.  Times are ISO 8601 in UTC."""

    version: int = 1
    deleting: str = ""
    since: dict[str, str] = {}  # path → when it was first found that nothing reaches it


class Lease:
    """A publisher's word that it is at work."""

    def __init__(self, path: str, since: datetime) -> None:
        self.path = path
        self.since = since

    def check(self) -> None:
        """Raise `Busy` if this took so long that a collector may count the publisher among the dead."""
        if datetime.now(timezone.utc) - self.since > LEASE / 2:
            raise Busy(f"publishing took longer than {LEASE / 2}; nothing was made public", hint="run it again")


@contextmanager
def publishing(bucket: Bucket) -> Iterator[Lease]:
    """Publish while no collector deletes.

    Raises:
        Busy: one does.
    """
    now = datetime.now(timezone.utc)
    lease = Lease(f"{LEASES}/{uuid.uuid4().hex}.json", now)
    if not _can_be_collected(bucket):
        yield lease
        return
    bucket.put_if_absent(lease.path, canonical_json({"since": now.isoformat(timespec="seconds")}))
    try:
        since = tombstones(bucket).deleting
        if since and _is_live(bucket, TOMBSTONES, parse_time(since), _latest(bucket, lease.path, now), DELETING):
            raise Busy(
                f"objects that nothing reaches are being deleted in {bucket.name} since {since}; nothing was sent",
                retry_after=60.0,
                hint=f"run it again when that has ended; after {DELETING} it counts as killed",
            )
        yield lease
    finally:
        try:
            bucket.delete(lease.path)
        except KartifactsError as error:
            log.warning("the lease %s stays, and holds off `kartifacts retain` for %s: %s", lease.path, LEASE, error)


def _can_be_collected(bucket: Bucket) -> bool:
    """Whether anybody could find out which blobs there are, to delete some."""
    try:
        bucket.list("blobs/none")
    except Unlisted:
        return False
    return True


def tombstones(bucket: Bucket) -> Tombstones:
    found = bucket.read(TOMBSTONES)
    return _decode(found.content if found is not None else None, bucket.name)


@contextmanager
def deleting(bucket: Bucket, now: datetime) -> Iterator[dict[str, str]]:
    """Delete while nobody publishes; what is then in the list that is given becomes the list of the bucket.

    Raises:
        Busy: somebody publishes, or deletes too.
    """
    mine = now.isoformat()
    since: dict[str, str] = {}

    def begun(current: bytes | None) -> bytes:
        found = _decode(current, bucket.name)
        if found.deleting and _is_live(bucket, TOMBSTONES, parse_time(found.deleting), now, DELETING):
            raise Busy(f"another collector is at work in {bucket.name} since {found.deleting}", retry_after=60.0)
        since.clear()
        since.update(found.since)
        return _encode(since, mine)

    def ended(current: bytes | None) -> bytes:
        if _decode(current, bucket.name).deleting != mine:
            raise Busy(f"another collector took over in {bucket.name}, since this one was slow")
        return _encode(since, "")

    update(bucket, TOMBSTONES, begun)
    try:
        _check_nobody_publishes(bucket, now)
        yield since
    finally:
        update(bucket, TOMBSTONES, ended)


def _check_nobody_publishes(bucket: Bucket, now: datetime) -> None:
    now = _latest(bucket, TOMBSTONES, now)
    for path, _, modified in bucket.list(LEASES):
        if _is_live(bucket, path, datetime.fromtimestamp(modified, timezone.utc), now, LEASE):
            raise Busy(
                f"somebody publishes to {bucket.name}: {path} is there; nothing was deleted",
                retry_after=60.0,
                hint=f"run it again later; a publisher that was killed holds it off for {LEASE}",
            )
        bucket.delete(path)


def _encode(since: dict[str, str], deleting: str) -> bytes:
    return canonical_json(msgspec.to_builtins(Tombstones(deleting=deleting, since=since)))


def _decode(content: bytes | None, where: str) -> Tombstones:
    if content is None:
        return Tombstones()
    what = f"{TOMBSTONES} of {where}"
    try:
        found = msgspec.convert(strict_json(content, what=what), type=Tombstones)
        for text in (*found.since.values(), *filter(None, [found.deleting])):
            parse_time(text)
    except (msgspec.ValidationError, ValueError) as error:
        raise VerificationError(f"{what} is malformed: {error}", hint="remove it; all graces begin anew") from error
    return found


def _is_live(bucket: Bucket, path: str, since: datetime, now: datetime, limit: timedelta) -> bool:
    """Whether who left a mark is to be counted as alive; clocks that run ahead a little are believed."""
    if since - now > AHEAD:
        log.warning("%s in %s is of %s, which is to come: nobody wrote it just now", path, bucket.name, since)
        return False
    return now - since < limit


def _latest(bucket: Bucket, mine: str, now: datetime) -> datetime:
    """The time now, also if this clock is slow: what was written just now says what the bucket takes it for."""
    written = [entry.modified for entry in bucket.list("gc") if entry.path == mine]
    return max([now, *(datetime.fromtimestamp(each, timezone.utc) for each in written)])


def parse_time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)
