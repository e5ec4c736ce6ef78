"""TUF's client workflow for metadata past its expiry: an operator's exception, in which all else is checked as ever.

The updater has no such mode, and its clock cannot be set; this uses the public parts that it is made of.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from tuf.api.exceptions import BadVersionNumberError, DownloadHTTPError, RepositoryError
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, T, Targets, Timestamp
from tuf.ngclient import UpdaterConfig

from kartifacts.errors import VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import make_directory
from kartifacts.model.digest import strict_json
from kartifacts.model.manifest import Synced
from kartifacts.trust import client_reading as reading
from kartifacts.trust import client_session as session
from kartifacts.trust.client import Read, Trusted, view_of
from kartifacts.trust.signed import parse

log = logging.getLogger(__name__)

_LIMITS = UpdaterConfig()


class Exemption(NamedTuple):
    """Who is in charge accepts expired metadata up to and including the day `until`."""

    until: date
    reason: str
    now: datetime


def refresh(
    root: bytes,
    state: Path,
    read: Read,
    libraries: Sequence[str] | None,
    floor: Synced | None,
    granted: Exemption,
) -> Trusted:
    """One run; see `client.refresh_expired`."""
    trusted, verified = look(root, state, read, libraries, floor)
    late = [name for name, signed in verified.signed().items() if signed.is_expired(granted.now)]
    if not late:
        return trusted
    log.warning("expired metadata (%s) is accepted until %s, since: %s", ", ".join(late), granted.until, granted.reason)
    seen = msgspec.structs.replace(
        trusted.seen, accepted_expired_until=granted.until.isoformat(), reason=granted.reason
    )
    return trusted._replace(seen=seen)


def look(
    root: bytes, state: Path, read: Read, libraries: Sequence[str] | None, floor: Synced | None
) -> tuple[Trusted, reading.Verified]:
    """One run that does not look at any expiry."""
    strict_json(root, what="the root of trust")
    fetcher = session.Fetcher(session.by_path(read))
    with session.alone(state), session.translated(state, fetcher):
        walk = _Walk(state, fetcher, session.base(view_of(root)))
        verified = walk.verified(root, libraries, floor)
        trusted = reading.trusted(verified, root, floor)
        walk.keep(verified)
    return trusted, verified


class _Walk:
    """The steps of the workflow, from the root of trust to libraries."""

    def __init__(self, state: Path, fetcher: session.Fetcher, base: str) -> None:
        self._state = state
        self._fetcher = fetcher
        self._base = base

    def verified(self, root: bytes, libraries: Sequence[str] | None, floor: Synced | None) -> reading.Verified:
        roots = self._roots(root)
        last = parse(roots[max(roots)], Root, "root.json").signed
        timestamp = self._timestamp(last)
        listed = parse(timestamp, Timestamp, "timestamp.json").signed.snapshot_meta
        snapshot = self._listed("snapshot", listed, last, Snapshot, _LIMITS.snapshot_max_length)
        self._check_snapshot(snapshot, last)
        meta = parse(snapshot, Snapshot, "snapshot.json").signed.meta
        targets = self._listed("targets", _listing(meta, "targets"), last, Targets, _LIMITS.targets_max_length)
        verified = reading.Verified(roots, timestamp, snapshot, targets, {})
        delegator = parse(targets, Targets, "targets.json").signed
        for name in reading.chosen(verified, libraries, floor):
            verified.roles[name] = self._listed(
                name, _listing(meta, name), delegator, Targets, _LIMITS.targets_max_length
            )
        return verified

    def keep(self, verified: reading.Verified) -> None:
        """Remember what was seen, as the updater does, so that nothing older is believed later."""
        history = self._state / "root_history"
        make_directory(history, 0o700)
        for number, data in verified.roots.items():
            _put(history / f"{number}.root.json", data)
        kept = {"targets": verified.targets, "snapshot": verified.snapshot, "timestamp": verified.timestamp}
        for name, data in {**verified.roles, **kept}.items():
            _put(self._state / f"{quote(name, '')}.json", data)

    def _roots(self, root: bytes) -> dict[int, bytes]:
        trusted = parse(root, Root, "the root of trust")
        _verify(trusted.signed, "root", trusted)
        roots = {trusted.signed.version: root}
        for number in range(trusted.signed.version + 1, trusted.signed.version + _LIMITS.max_root_rotations):
            following = self._next_root(number, trusted.signed)
            if following is None:
                break
            roots[number] = following
            trusted = parse(following, Root, f"{number}.root.json")
        return roots

    def _next_root(self, number: int, before: Root) -> bytes | None:
        """The root of that version; None if there is none yet."""
        with suppress(OSError, RepositoryError, VerificationError):  # there is none here, or it is of no use
            data = read_regular(self._state / "root_history" / f"{number}.root.json", session.MAX_METADATA)
            return _checked_root(data, number, before)
        try:
            data = self._fetcher.download_bytes(f"{self._base}/{number}.root.json", _LIMITS.root_max_length)
        except DownloadHTTPError:
            return None
        return _checked_root(data, number, before)

    def _timestamp(self, root: Root) -> bytes:
        data = self._fetcher.download_bytes(f"{self._base}/timestamp.json", _LIMITS.timestamp_max_length)
        new = parse(data, Timestamp, "timestamp.json")
        _verify(root, "timestamp", new)
        old = self._before("timestamp", Timestamp, root)
        if old is None:
            return data
        _not_lower("timestamp", new.signed.version, old.signed.version)
        _not_lower("snapshot", new.signed.snapshot_meta.version, old.signed.snapshot_meta.version)
        same = new.signed.version == old.signed.version
        return session.kept(self._state, "timestamp") if same else data

    def _listed(self, role: str, meta: MetaFile, delegator: Root | Targets, kind: type[T], limit: int) -> bytes:
        """A role's file as other metadata lists it."""
        url = f"{self._base}/{meta.version}.{quote(role, '')}.json"
        data = self._fetcher.download_bytes(url, meta.length or limit)
        meta.verify_length_and_hashes(data)
        found = parse(data, kind, f"{role}.json")
        _verify(delegator, role, found)
        if found.signed.version != meta.version:
            raise BadVersionNumberError(f"{role}.json says version {found.signed.version}, listed is {meta.version}")
        return data

    def _check_snapshot(self, data: bytes, root: Root) -> None:
        """What was listed before still is, and in no lower version."""
        old = self._before("snapshot", Snapshot, root)
        if old is not None:
            new = parse(data, Snapshot, "snapshot.json").signed.meta
            for name, listed in old.signed.meta.items():
                _not_lower(
                    name.removesuffix(".json"), _listing(new, name.removesuffix(".json")).version, listed.version
                )

    def _before(self, role: str, kind: type[T], root: Root) -> Metadata[T] | None:
        """What was seen last of a role, unless its keys have been changed since: so one recovers from stolen ones."""
        if not os.path.lexists(self._state / f"{role}.json"):
            return None
        try:
            old = parse(session.kept(self._state, role), kind, f"{role}.json")
            _verify(root, role, old)
        except (RepositoryError, VerificationError) as error:
            log.debug("what was seen of %s says nothing any more: %s", role, error)
            return None
        return old


def _listing(meta: dict[str, MetaFile], role: str) -> MetaFile:
    if f"{role}.json" not in meta:
        raise RepositoryError(f"the snapshot does not list {role}.json")
    return meta[f"{role}.json"]


def _verify(delegator: Root | Targets, role: str, metadata: Metadata[T]) -> None:
    delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)


def _checked_root(data: bytes, number: int, before: Root) -> bytes:
    found = parse(data, Root, f"{number}.root.json")
    _verify(before, "root", found)
    _verify(found.signed, "root", found)
    if found.signed.version != number:
        raise BadVersionNumberError(f"{number}.root.json says version {found.signed.version}")
    return data


def _not_lower(role: str, version: int, lowest: int) -> None:
    if version < lowest:
        raise BadVersionNumberError(f"{role}.json of version {version} must be >= {lowest}, which was seen before")


def _put(path: Path, data: bytes) -> None:
    partial = path.with_name(f"tmp{os.getpid()}")
    partial.write_bytes(data)
    os.replace(partial, path)
