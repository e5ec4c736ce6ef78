"""Copies releases from a directory into a bucket so that a reader sees the old state or the new, never a mix.

1. everything that a release needs is there, and every byte is right         else nothing is sent
2. the version does not exist in the bucket with another content             else nothing is sent
3. packs, kernel tables, bundle manifests, release index                     immutable, named by digest
4. what was sent is read back and hashed
5. signed metadata (`publish.commit`), in a bucket that has or gets some     now it is public
   else its entry in index.json, then its name
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kartifacts.errors import ConfigError
from kartifacts.model.digest import Digest, parse_digest, sha256
from kartifacts.model.layout import View, blob_path, target_name, target_path
from kartifacts.model.manifest import MAX_PACK, Pin, Synced
from kartifacts.publish.buckets import Bucket, read_back
from kartifacts.publish.gate import Judge, check_plan
from kartifacts.publish.leases import publishing
from kartifacts.publish.lockfile import add_pins, one_version_each
from kartifacts.publish.plan import Plan
from kartifacts.publish.promises import Promises
from kartifacts.publish.release import name_release, refuse_other_content, refuse_signed
from kartifacts.publish.repository import Blob, Repository
from kartifacts.publish.verify import Progress, verify_repository

if TYPE_CHECKING:
    from kartifacts.publish.provenance import Attested
    from kartifacts.publish.verify import Report
    from kartifacts.trust.keyring import Keyring

log = logging.getLogger(__name__)

Content = tuple[Blob, "bytes | Path"]
"""A blob to send, and what it holds or where that lies."""


class Published(NamedTuple):
    """What was published, and what a reader who trusts only the first root saw right afterwards, by view."""

    pins: list[Pin]
    seen: Mapping[View, Synced]  # empty where nothing is signed


def publish(
    source_dir: Path,
    bucket: Bucket,
    *,
    library: str | None = None,
    version: str | None = None,
    plan: Plan | None = None,
    sources: Callable[[], Promises | None] | None = None,
    judge: Judge | None = None,
    lock: Path | None = None,
    keyring: Keyring | None = None,
    channels: Sequence[str] = (),
    extra_targets: Mapping[str, bytes] | None = None,
    builder_id: str | None = None,
    max_blob: int = MAX_PACK,
    progress: Progress | None = None,
) -> Published:
    """Publish the releases of a repository directory.  Running it again sends only what is missing.

    Args:
        library, version: publish these only.
        plan: what the releases must hold.
        sources: gives what the sources that are here promise, where nothing beside a release says what was promised.
        judge: looks into each kernel of a release that is held against a plan.
        lock: kartifacts.lock that pins what was published.
        keyring: signs for the releases; without it they can be had only by who pins them.
        channels: lead to these releases from now on, and to no other of their libraries.
        extra_targets: what is signed for besides, by target name (``demo/1.0/provenance.json``).
        builder_id: who built the bundles, to be signed for with what they were made of; nothing is said if None.
        max_blob: largest object that the bucket's servers take.

    Raises:
        ConfigError: there is no such release, a blob is larger than `max_blob`, keys are missing, or the bucket keeps
            no conditional writes.
        VerificationError: the source is incomplete or damaged, lacks what `plan` promises, or the bucket gives back
            other bytes than were sent.
        PublishConflict: the bucket holds other bytes under a name that never changes.
        SourceError: the bucket cannot be written or read; `leases.Busy`, if objects are being deleted there just now.
    """
    report = verify_repository(source_dir, library=library, version=version)
    report.check(str(source_dir))
    _check_sizes(report.blobs, max_blob)
    if lock is not None:
        one_version_each(report.pins)
    repository = Repository(source_dir)
    if plan is not None:
        check_plan(plan, repository, report.pins, sources=sources, judge=judge)
    bucket.preflight()
    bucket.tidy()
    if keyring is None:
        seen = _publish_unsigned(repository, report, bucket, channels or extra_targets or builder_id, progress)
    else:
        said = {} if builder_id is None else _attested(repository, report.pins, keyring, builder_id)
        extras = {**{name: attested.index for name, attested in said.items()}, **(extra_targets or {})}
        blobs = _said(said)
        seen = _publish_signed(repository, report, bucket, keyring, channels, extras, blobs, progress)
    for pin in report.pins:
        log.info("published %s %s as sha256:%s in %s", pin.library, pin.version, pin.sha256, bucket.name)
    if lock is not None:
        add_pins(lock, report.pins)
    return Published(list(report.pins), seen)


def _publish_unsigned(
    repository: Repository, report: Report, bucket: Bucket, signed_only: object, progress: Progress | None
) -> Mapping[View, Synced]:
    if signed_only:
        raise ConfigError("channels and provenance stand in signed metadata", hint="pass --keys")
    refuse_signed(bucket)
    for pin in report.pins:
        refuse_other_content(bucket, pin)
    _send(_contents(repository, report.blobs), bucket, progress)
    for pin in report.pins:
        name_release(bucket, pin)
    return {}


def _publish_signed(
    repository: Repository,
    report: Report,
    bucket: Bucket,
    keyring: Keyring,
    channels: Sequence[str],
    extra_targets: Mapping[str, bytes],
    said: Sequence[Content],
    progress: Progress | None,
) -> Mapping[View, Synced]:
    from kartifacts.publish import editing
    from kartifacts.publish.commit import check_change, commit

    extras = _extras(extra_targets, report.pins)
    changes = editing.releasing(report.pins, channels, {pin: _of(content) for pin, (_, content) in extras.items()})
    check_change(bucket, keyring, changes)
    with publishing(bucket) as lease:
        contents = [*_contents(repository, report.blobs), *said]
        _send(contents, bucket, progress)
        needs = {blob_path(blob.digest): blob.size for blob, _ in contents}
        for pin in report.pins:
            digest = parse_digest(pin.sha256)
            path = target_path(pin.library, pin.version, digest)
            if bucket.copy_if_absent(blob_path(digest), path) == "created":
                _check_sent(bucket, path, digest, pin.size, f"release index of {pin.library} {pin.version}")
            needs[path] = pin.size
        for name, (path, content) in extras.items():
            blob = blob_path(sha256(content))
            put = bucket.copy_if_absent(blob, path) if blob in needs else bucket.put_if_absent(path, content)
            if put == "created":
                _check_sent(bucket, path, *_of(content), f"provenance of {name}")
            needs[path] = len(content)
        return commit(bucket, keyring, changes, needs=needs, ready=lease.check)


def _attested(repository: Repository, pins: Sequence[Pin], keyring: Keyring, builder_id: str) -> dict[str, Attested]:
    """What is signed about each release, by target name, before anything is sent."""
    from kartifacts.publish.provenance import attest, attestable

    found = {}
    for pin in pins:
        if attestable(repository, pin):
            name = target_name(pin.library, pin.version, "provenance")
            found[name] = attest(repository, pin, keyring.signers(pin.library), builder_id=builder_id)
        else:
            log.warning(
                "%s %s does not say what it was made of: nothing is signed about that", pin.library, pin.version
            )
    return found


def _said(attested: Mapping[str, Attested]) -> list[Content]:
    """The blobs of what is signed, whatever names another after it."""
    blobs = {digest: (name, content) for name, each in attested.items() for digest, content in each.blobs}
    return [(Blob(digest, len(content), f"part of {name}"), content) for digest, (name, content) in blobs.items()]


def _extras(targets: Mapping[str, bytes], pins: Sequence[Pin]) -> dict[tuple[str, str], tuple[str, bytes]]:
    """Library and version → path and content of what is signed for besides its index."""
    known = {target_name(pin.library, pin.version, "provenance"): pin for pin in pins}
    found = {}
    for name, content in targets.items():
        if name not in known:
            raise ConfigError(f"{name!r} belongs to no release that is published here: {', '.join(known)}")
        pin = known[name]
        path = target_path(pin.library, pin.version, sha256(content), "provenance")
        found[pin.library, pin.version] = (path, content)
    return found


def _of(content: bytes) -> tuple[Digest, int]:
    return sha256(content), len(content)


def _check_sizes(blobs: Sequence[Blob], limit: int) -> None:
    largest = sorted(blobs, key=lambda blob: -blob.size)[:10]
    if largest[0].size > limit:
        shown = "".join(f"\n  {blob.size:>13,} bytes: {blob.what}" for blob in largest)
        raise ConfigError(
            f"a blob is larger than {limit:,} bytes; nothing was sent.  The largest are:{shown}",
            hint="build with smaller packs, or raise the limit if every server in between takes such objects",
        )


def _contents(repository: Repository, blobs: Sequence[Blob]) -> list[Content]:
    return [(blob, repository.blob(blob.digest)) for blob in blobs]


def _send(contents: Sequence[Content], bucket: Bucket, progress: Progress | None) -> None:
    """Send every blob, in order, and read back what is new there."""
    done, total = 0, sum(blob.size for blob, _ in contents)
    sent = []
    for blob, content in contents:
        if bucket.put_if_absent(blob_path(blob.digest), content) == "created":
            sent.append(blob)
        done += blob.size
        if progress is not None:
            progress(done, total)
    for blob in sent:
        _check_sent(bucket, blob_path(blob.digest), blob.digest, blob.size, blob.what)
    log.info("%d of %d blobs were not there yet", len(sent), len(contents))


def _check_sent(bucket: Bucket, path: str, digest: Digest, size: int, what: str) -> None:
    read_back(bucket, path, what, (digest, size), so_far="nothing was made public", then="publish again")
