"""Copies releases from a directory into a bucket so that a reader sees the old state or the new, never a mix.

1. everything that a release needs is there, and every byte is right         else nothing is sent
2. the version does not exist in the bucket with another content             else nothing is sent
3. packs, kernel tables, bundle manifests, release index                     immutable, named by digest
4. what was sent is read back and hashed
5. its entry in index.json, then its name                                    now it is public
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.layout import blob_path
from kartifacts.model.manifest import MAX_PACK, Pin
from kartifacts.publish.buckets import Bucket
from kartifacts.publish.lockfile import add_pins, one_version_each
from kartifacts.publish.plan import Plan, check_plan
from kartifacts.publish.release import name_release, refuse_other_content
from kartifacts.publish.repository import Blob, Repository
from kartifacts.publish.verify import Progress, verify_repository

log = logging.getLogger(__name__)


def publish(
    source_dir: Path,
    bucket: Bucket,
    *,
    library: str | None = None,
    version: str | None = None,
    plan: Plan | None = None,
    lock: Path | None = None,
    max_blob: int = MAX_PACK,
    progress: Progress | None = None,
) -> list[Pin]:
    """Publish the releases of a repository directory.  Running it again sends only what is missing.

    Args:
        library, version: publish these only.
        plan: what the releases must hold.
        lock: kartifacts.lock that pins what was published.
        max_blob: largest object that the bucket's servers take.

    Raises:
        ConfigError: there is no such release, or a blob is larger than `max_blob`.
        VerificationError: the source is incomplete or damaged, lacks what `plan` promises, or the bucket gives back
            other bytes than were sent.
        PublishConflict: the bucket holds other bytes under a name that never changes.
        SourceError: the bucket cannot be written or read.
    """
    report = verify_repository(source_dir, library=library, version=version)
    report.check(str(source_dir))
    _check_sizes(report.blobs, max_blob)
    if lock is not None:
        one_version_each(report.pins)
    repository = Repository(source_dir)
    bucket.tidy()
    if plan is not None:
        check_plan(plan, repository, report.pins)
    for pin in report.pins:
        refuse_other_content(bucket, pin)
    _send(repository, report.blobs, bucket, progress)
    for pin in report.pins:
        name_release(bucket, pin)
        log.info("published %s %s as sha256:%s in %s", pin.library, pin.version, pin.sha256, bucket.name)
    if lock is not None:
        add_pins(lock, report.pins)
    return list(report.pins)


def _check_sizes(blobs: Sequence[Blob], limit: int) -> None:
    largest = sorted(blobs, key=lambda blob: -blob.size)[:10]
    if largest[0].size > limit:
        shown = "".join(f"\n  {blob.size:>13,} bytes: {blob.what}" for blob in largest)
        raise ConfigError(
            f"a blob is larger than {limit:,} bytes; nothing was sent.  The largest are:{shown}",
            hint="build with smaller packs, or raise the limit if every server in between takes such objects",
        )


def _send(repository: Repository, blobs: Sequence[Blob], bucket: Bucket, progress: Progress | None) -> None:
    """Send every blob, in order, and read back what is new there."""
    done, total = 0, sum(blob.size for blob in blobs)
    sent = []
    for blob in blobs:
        if bucket.put_if_absent(blob_path(blob.digest), repository.blob(blob.digest)) == "created":
            sent.append(blob)
        done += blob.size
        if progress is not None:
            progress(done, total)
    for blob in sent:
        found = bucket.digest(blob_path(blob.digest))
        if found != (blob.digest, blob.size):
            raise VerificationError(
                f"{bucket.name} gives back other bytes than were sent for the {blob.what}; nothing was made public",
                source=f"{bucket.name} {blob_path(blob.digest)}",
                expected=f"sha256 {blob.digest}, {blob.size} bytes",
                actual=f"sha256 {found[0]}, {found[1]} bytes",
                hint=f"remove {blob_path(blob.digest)} there, find out what damages uploads, and publish again",
            )
    log.info("%d of %d blobs were not there yet", len(sent), len(blobs))
