"""Refuses to go on where a bucket or a clock has gone back; a keyring remembers how far each bucket was."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tuf.api.metadata import Timestamp

from kartifacts.errors import ConfigError, StoreError, VerificationError
from kartifacts.model.layout import TIMESTAMP, View, metadata_path
from kartifacts.model.manifest import Synced
from kartifacts.publish.buckets import Bucket
from kartifacts.trust.keyfiles import note_bucket
from kartifacts.trust.signed import lifetime, parse

if TYPE_CHECKING:
    from kartifacts.publish.staged import Warn
    from kartifacts.trust.keyring import Keyring

_SKEW = timedelta(hours=1)  # between the clocks of machines that publish


def check_begun(bucket: Bucket) -> None:
    """Refuse to go on where nobody has begun, as with a name that was mistyped."""
    if bucket.read(metadata_path("online", TIMESTAMP)) is None:
        _check_not_lost(bucket)
        raise ConfigError(
            f"nothing is signed in {bucket.name} yet; nothing was written",
            hint="look at the name again; `kartifacts keys publish`, or `publish --keys`, begins a repository",
        )


def check_goes_on(
    bucket: Bucket, keyring: Keyring, views: Iterable[View], now: datetime, *, clock_is_right: bool = False
) -> None:
    """Refuse a state that is older than one that was public, since readers who saw that believe nothing that follows;
    and a clock that is behind the one of who signed last, since what it signs expires at once.
    """
    before = keyring.buckets().get(_name(bucket), {})  # read first: others who have the keyring go on meanwhile
    for view in views:
        path = metadata_path(view, TIMESTAMP)
        found = bucket.read(path)
        if found is None and view == "online":
            _check_not_lost(bucket)
        signed = parse(found.content, Timestamp, path).signed if found is not None else None
        version, least = signed.version if signed is not None else 0, before.get(view, 0)
        if version < least:
            raise VerificationError(
                f"{bucket.name} holds {path} of version {version or 'none'}, and {str(keyring.path)!r} has published "
                f"version {least} there; nothing was changed",
                hint="put the newest one back, from a backup or a mirror: readers who saw it refuse what is older.  "
                f"To begin another history on purpose, take the bucket out of {keyring.path / 'buckets.json'}",
            )
        if signed is not None and not clock_is_right:
            _check_clock(bucket, view, signed.expires - lifetime("timestamp", view), now)


def _check_not_lost(bucket: Bucket) -> None:
    lost, there = metadata_path("online", TIMESTAMP), metadata_path("airgap", TIMESTAMP)
    if bucket.read(there) is not None:  # it comes after the other
        raise VerificationError(
            f"{bucket.name} holds {there}, and has lost {lost}; nothing was changed",
            hint=f"put {lost} back, from a backup or a mirror: readers who saw it refuse all that is older",
        )


def _check_clock(bucket: Bucket, view: View, signed: datetime, now: datetime) -> None:
    if signed > now + _SKEW:
        raise ConfigError(
            f"the clock of this machine says {now:%Y-%m-%dT%H:%M:%SZ}, and the timestamp of the view {view} in "
            f"{bucket.name} was signed at {signed:%Y-%m-%dT%H:%M:%SZ}; nothing was changed",
            hint="set the clock; if it is right, that of who signed last was wrong: `kartifacts timestamp refresh "
            "--clock-is-right` goes on by this one",
        )


def remember(keyring: Keyring, bucket: Bucket, seen: Mapping[View, Synced], warn: Warn) -> None:
    """Note what a keyring has made public; a second bucket is warned of, once."""
    before, name = keyring.buckets(), _name(bucket)
    if before and name not in before:
        warn(
            f"the keyring {str(keyring.path)!r} has published to {', '.join(before)} before, and now to {name}: each "
            "gets versions of its own, and who reads one and then the other is refused; fill other buckets by "
            "`kartifacts mirror pull` (no matter if this is the same one by another name, or takes its place)"
        )
    versions = {view: max(each.timestamp, before.get(name, {}).get(view, 0)) for view, each in seen.items()}
    with suppress(StoreError):  # a keyring that cannot be written to publishes all the same
        note_bucket(keyring, name, {**before.get(name, {}), **versions})


def _name(bucket: Bucket) -> str:
    scheme, colon, path = bucket.name.partition("dir:")
    return f"dir:{os.path.abspath(path)}" if colon and not scheme else bucket.name
