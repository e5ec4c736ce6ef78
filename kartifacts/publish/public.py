"""What a view of a bucket shows now: signed metadata that was verified as a reader does, and the mark to replace it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from kartifacts.errors import ExpiredMetadata
from kartifacts.model.layout import TIMESTAMP, View, metadata_path
from kartifacts.publish.buckets import Bucket, Stamped
from kartifacts.trust.client import Trusted, refresh, refresh_expired
from kartifacts.trust.released import Released

if TYPE_CHECKING:
    from kartifacts.trust.keyring import Keyring

log = logging.getLogger(__name__)


class Public(NamedTuple):
    """One view as it was read; nothing of it is there before its first timestamp."""

    view: View
    before: Stamped | None  # its timestamp, read before all else, for `swap`
    trusted: Trusted | None

    def version(self, role: str) -> int:
        """The version of a role's metadata; 0 if there is none yet."""
        if self.trusted is None:
            return 0
        seen = self.trusted.seen
        top = {"root": seen.root, "timestamp": seen.timestamp, "snapshot": seen.snapshot, "targets": seen.targets}
        return top.get(role, seen.libraries.get(role, 0))

    def file(self, role: str) -> bytes | None:
        """A role's metadata; None if there is none yet."""
        if self.trusted is None or self.version(role) == 0:
            return None
        name = TIMESTAMP if role == "timestamp" else f"{self.version(role)}.{role}.json"
        return self.trusted.files[metadata_path(self.view, name)]

    def releases(self, library: str) -> Sequence[Released]:
        found = self.trusted.libraries.get(library) if self.trusted is not None else None
        return found.releases if found is not None else ()


def read_public(bucket: Bucket, keyring: Keyring, view: View, now: datetime) -> Public:
    """Read and verify a view as somebody who trusts nothing but its first root.

    Metadata that expired is no fault here: who holds the keys is about to sign anew.

    Raises:
        VerificationError: what is public does not hold.
        SourceError: it cannot be read.
    """
    before = bucket.read(metadata_path(view, TIMESTAMP))
    if before is None:
        return Public(view, None, None)
    root = keyring.root(view)
    try:
        trusted = refresh(root, None, bucket.get, now=now)
    except ExpiredMetadata as error:
        log.warning("%s: %s", bucket.name, error.message)
        reason = "its publisher is about to sign it anew"
        trusted = refresh_expired(root, None, bucket.get, until=now.date(), reason=reason, now=now)
    return Public(view, before, trusted)


def read_as_reader(
    bucket: Bucket, keyring: Keyring, view: View, now: datetime, *, timestamp: bytes | None = None
) -> Trusted:
    """What a reader who knows only the first root makes of a view.

    Args:
        timestamp: see the view as if this were its timestamp already.
    """
    path = metadata_path(view, TIMESTAMP)
    read: Callable[[str, int], bytes] = bucket.get
    if timestamp is not None:
        read = lambda asked, limit: timestamp if asked == path else bucket.get(asked, limit)  # noqa: E731
    return refresh(keyring.root(view), None, read, now=now)
