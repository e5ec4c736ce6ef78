"""Proves that a mirror is what it promises: signatures, age, and every byte of what was chosen; or says what is not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial

from kartifacts.config import Settings
from kartifacts.errors import KartifactsError, SourceError, VerificationError
from kartifacts.mirror.contents import Contents, run, survey
from kartifacts.mirror.filters import Filter, held_filter
from kartifacts.mirror.promote import Progress, Told
from kartifacts.mirror.pull import Trust
from kartifacts.mirror.reading import BucketSource, Reader
from kartifacts.mirror.trusting import Signature
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import TIMESTAMP, View, blob_path, metadata_path
from kartifacts.publish.buckets import Bucket
from kartifacts.publish.verify import Fault


@dataclass(frozen=True)
class Freshness:
    """How old one view of a mirror is."""

    view: View
    timestamp: int  # versions
    snapshot: int
    age: timedelta  # since its timestamp was signed, if that was signed for as long as ours are
    expires: datetime  # what expires first of it

    def stale(self, now: datetime, max_age: timedelta | None) -> str:
        """Why readers will not take it, or its keeper would not have it so; empty if all is well."""
        if self.expires <= now:
            return f"the {self.view} metadata expired on {self.expires:%Y-%m-%d %H:%M} UTC"
        if max_age is not None and self.age > max_age:
            allowed = max_age / timedelta(days=1)
            return f"the {self.view} metadata was signed {self.age.days} days ago; at most {allowed:g} are allowed"
        return ""


@dataclass(frozen=True)
class Report:
    """What was looked at, and every fault found."""

    contents: Contents
    faults: tuple[Fault, ...]
    freshness: tuple[Freshness, ...]
    checked: int  # files
    chosen: Filter  # what was looked for


def promised(bucket: Bucket) -> Filter:
    """What whoever filled a mirror meant to have there; everything if nobody has said."""
    return held_filter(bucket.get, bucket.name) or Filter()


def verify(
    bucket: Bucket, trust: Trust, chosen: Filter | None, settings: Settings, *, progress: Progress | None = None
) -> Report:
    """Read everything that was chosen, or else promised, as its readers would.

    Raises:
        VerificationError: the metadata does not verify, or a part of it is missing, so that nothing else can be said.
        ArtifactUnavailable: a part of the filter selects nothing.
        SourceError: the mirror cannot be read.
    """
    reader = Reader([BucketSource(bucket)], settings)
    threads = settings.download_threads
    try:
        basis = trust.basis(reader, None, expired=True)
    except SourceError as error:
        if not error.missing:
            raise
        raise VerificationError(f"{bucket.name} lacks a part of its metadata: {error.message}") from error
    chosen = chosen if chosen is not None else promised(bucket)
    contents, failed = survey(basis, chosen, reader, threads=threads)
    known = {blob_path(blob.digest): (blob.what, blob[:2]) for blob in contents.blobs}
    files = dict(known)
    if basis.signatures:
        files |= {target.path: (target.path, target.blob[:2]) for target in contents.targets}
        files |= {path: (path, (sha256(data), len(data))) for path, data in basis.metadata.items()}
    look = _Look(bucket, Told(sum(size for _, (_, size) in files.values()), progress))
    run(threads, [partial(look.at, path, *expected) for path, expected in files.items()])
    seen = {fault.what for fault in look.faults}
    unread = [_fault(what, error) for what, error in failed if what not in seen]
    return Report(
        contents=contents,
        faults=tuple(sorted([*look.faults, *unread])),
        freshness=tuple(map(_freshness, basis.signatures)),
        checked=len(files),
        chosen=chosen,
    )


class _Look:
    """What several threads have found."""

    def __init__(self, bucket: Bucket, told: Told) -> None:
        self._bucket = bucket
        self._told = told
        self.faults: list[Fault] = []

    def at(self, path: str, what: str, expected: tuple[Digest, int]) -> None:
        try:
            digest, size = self._bucket.digest(path)
        except SourceError as error:
            if not error.missing:
                raise
            self.faults.append(Fault(what, f"missing: {path}", missing=True))
        else:
            if size != expected[1]:
                self.faults.append(Fault(what, f"expected {expected[1]} bytes, got {size}: {path}"))
            elif digest != expected[0]:
                self.faults.append(Fault(what, f"damaged, its sha256 is {digest}: {path}"))
        self._told.add(expected[1])


def _fault(what: str, error: KartifactsError) -> Fault:
    return Fault(what, error.message, missing=isinstance(error, SourceError) and error.missing)


def _freshness(signature: Signature) -> Freshness:
    from tuf.api.metadata import Timestamp

    from kartifacts.trust.signed import lifetime, parse

    path = metadata_path(signature.view, TIMESTAMP)
    signed = parse(signature.timestamp, Timestamp, path).signed
    return Freshness(
        view=signature.view,
        timestamp=signature.seen.timestamp,
        snapshot=signature.seen.snapshot,
        age=datetime.now(timezone.utc) - (signed.expires - lifetime("timestamp", signature.view)),
        expires=datetime.fromisoformat(signature.seen.expires.replace("Z", "+00:00")),
    )
