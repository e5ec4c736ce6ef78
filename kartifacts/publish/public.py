"""What a view of a bucket shows now: signed metadata that was verified as a reader does, and the mark to replace it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

from kartifacts.errors import ExpiredMetadata
from kartifacts.model.layout import TIMESTAMP, View, metadata_path
from kartifacts.publish.buckets import Bucket, Stamped
from kartifacts.trust.client import Trusted, look, refresh
from kartifacts.trust.released import TOP_LEVEL, Released
from kartifacts.trust.signed import parse_any

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

    def expired(self, now: datetime) -> list[str]:
        """The roles whose metadata a reader of today, or of `now`, refuses."""
        late = max(now, datetime.now(timezone.utc))
        libraries = self.trusted.libraries if self.trusted is not None else ()
        contents = {role: self.file(role) for role in (*TOP_LEVEL, *libraries)}
        return [
            role for role, content in contents.items() if content and parse_any(content, role).signed.is_expired(late)
        ]

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
        log.info("%s: %s", bucket.name, error.message)
        trusted = look(root, bucket.get)
    return Public(view, before, trusted)


def read_as_reader(
    bucket: Bucket, keyring: Keyring, view: View, now: datetime, *, timestamp: bytes | None = None
) -> Trusted:
    """What a reader who knows only the first root makes of a view, and of those of its libraries that are not expired.

    Args:
        timestamp: see the view as if this were its timestamp already.

    Raises:
        ExpiredMetadata: a role is that all libraries need.
    """
    path = metadata_path(view, TIMESTAMP)
    read: Callable[[str, int], bytes] = bucket.get
    if timestamp is not None:
        read = lambda asked, limit: timestamp if asked == path else bucket.get(asked, limit)  # noqa: E731
    root = keyring.root(view)
    try:
        return refresh(root, None, read, now=now)
    except ExpiredMetadata as error:
        found = look(root, read)
        late = Public(view, None, found).expired(now)
        if top := [role for role in TOP_LEVEL if role in late]:
            raise ExpiredMetadata(
                f"{error.message}; so what is in {bucket.name} is of no use to readers of the view {view}",
                expired=error.expired,
                hint="; ".join(_renewal(role, keyring) for role in top),
            ) from None
        return refresh(root, None, read, libraries=[name for name in found.libraries if name not in late], now=now)


def _renewal(role: str, keyring: Keyring) -> str:
    if role in ("root", "targets"):
        return f"`kartifacts keys renew {keyring.path} {role}`, then `kartifacts keys publish`"
    return f"`kartifacts timestamp refresh` signs the {role} anew, if the clock of this machine is right"
