"""Puts what was verified into a mirror so that its readers see the old state or the new: the timestamp comes last.

1. packs and kernel tables, bundle manifests, release indexes     immutable, named by digest
2. release indexes and provenance under the names that are signed
3. metadata: roots, targets, libraries, snapshot                   immutable, named by version
4. all of it is there, and what was sent comes back as it was      else nothing changes
5. timestamp.json of each view, if nobody else was there           now readers see it
6. index.json, for tools that know only OCI
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kartifacts.errors import KartifactsError, PublishConflict, VerificationError
from kartifacts.mirror.contents import Contents, Target, run
from kartifacts.mirror.filters import MIRROR, Filter, encode_filter
from kartifacts.mirror.reading import Reader
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import OCI_INDEX, TIMESTAMP, blob_path, metadata_path
from kartifacts.model.manifest import Pin
from kartifacts.publish.buckets import Bucket, Raced, read_back, update
from kartifacts.publish.leases import Lease, publishing
from kartifacts.publish.oci_index import change_index, reconciled, refuse_other_claim
from kartifacts.publish.release import name_release
from kartifacts.publish.repository import Blob

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all."""


@dataclass
class Promotion:
    """What was sent."""

    blobs: int = 0
    bytes: int = 0
    metadata: int = 0
    changed: bool = False  # readers see something else than before
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def sent(self, blob: Blob) -> None:
        with self._guard:
            self.blobs += 1
            self.bytes += blob.size


def promote(
    contents: Contents,
    chosen: Filter,
    reader: Reader,
    bucket: Bucket,
    *,
    threads: int,
    progress: Progress | None = None,
) -> Promotion:
    """Bring a mirror to the state of `contents`.  Running it again sends only what is missing.

    Raises:
        PublishConflict: another release has the name of one of these, or somebody else was faster.
        VerificationError: the bucket gives back other bytes than were sent, or holds damaged ones.
        SourceError: something cannot be read or written.
    """
    if not contents.basis.signatures:
        for release in contents.releases:
            refuse_other_claim(bucket, release.pin)
    done = Promotion()
    with publishing(bucket) as lease:
        send_blobs(contents, reader, bucket, done, threads=threads, progress=progress)
        if contents.basis.signatures:
            _publish_signed(contents, chosen, bucket, done, lease, threads)
        else:
            update(bucket, MIRROR, lambda _: encode_filter(chosen))
            for release in contents.releases:
                name_release(bucket, release.pin)
            done.changed = done.blobs > 0
    return done


def _publish_signed(
    contents: Contents,
    chosen: Filter,
    bucket: Bucket,
    done: Promotion,
    lease: Lease,
    threads: int,
) -> None:
    basis = contents.basis
    sent: dict[str, tuple[Digest, int]] = {}

    def put(target: Target) -> None:
        path = blob_path(target.blob.digest)
        if bucket.size(target.path) != target.blob.size:
            with _only_these(bucket, target.path):
                if bucket.copy_if_absent(path, target.path) == "created":
                    sent[target.path] = target.blob[:2]

    run(threads, [partial(put, target) for target in contents.targets])
    for path, content in basis.metadata.items():  # in order, so that a cut leaves no gap between roots
        with _only_these(bucket, path):
            done.metadata += bucket.put_if_absent(path, content) == "created"
        sent[path] = sha256(content), len(content)
    run(threads, [partial(_check_sent, bucket, path, path, file) for path, file in sent.items()])
    lease.check()
    update(bucket, MIRROR, lambda _: encode_filter(chosen))  # before the state that it speaks of, which is whole by now
    seen: list[str] = []
    try:
        for signature in basis.signatures:
            if signature.before is None or signature.before.content != signature.timestamp:
                bucket.swap(metadata_path(signature.view, TIMESTAMP), signature.timestamp, signature.before)
                done.changed = True
            seen.append(signature.view)
        change_index(bucket, lambda current: index_of(contents, current, bucket.name))
    except KartifactsError as error:
        if done.changed:
            late = OCI_INDEX if len(seen) == len(basis.signatures) else "the other view"
            error.message += f"; readers of the {' and '.join(seen)} view see the new state already, {late} is behind"
            error.hint = error.hint or "run it again: what arrived is not sent again"
        raise


def send_blobs(
    contents: Contents,
    reader: Reader,
    bucket: Bucket,
    done: Promotion,
    *,
    threads: int,
    progress: Progress | None = None,
) -> None:
    """Send every blob that the bucket lacks, whoever names it after it, and read back what is new."""
    told = Told(contents.size, progress)
    sent: list[Blob] = []

    def send(blob: Blob) -> None:
        path = blob_path(blob.digest)
        if bucket.size(path) != blob.size:
            with _content(contents, reader, blob) as content, _only_these(bucket, path):
                if bucket.put_if_absent(path, content) == "created":
                    sent.append(blob)
                    done.sent(blob)
        told.add(blob.size)

    for rank in contents.ranks:
        run(threads, [partial(send, blob) for blob in rank])
    run(threads, [partial(_check_sent, bucket, blob_path(blob.digest), blob.what, blob[:2]) for blob in sent])


def _content(contents: Contents, reader: Reader, blob: Blob) -> AbstractContextManager[bytes | Path]:
    known = contents.read.get(blob.digest)
    return reader.content(blob) if known is None else nullcontext(known)


@contextmanager
def _only_these(bucket: Bucket, path: str) -> Iterator[None]:
    """Other bytes under a name that is made of their sha256, or is signed, are damage: nobody else is to blame."""
    try:
        yield
    except Raced:
        raise
    except PublishConflict as error:
        raise VerificationError(
            f"{bucket.name} already holds other bytes as {path}: they are damaged; readers see what they saw before",
            source=f"{bucket.name} {path}",
            hint=f"remove {path} there and run it again; `kartifacts mirror verify` names all that is damaged",
        ) from error


def _check_sent(bucket: Bucket, path: str, what: str, expected: tuple[Digest, int]) -> None:
    read_back(bucket, path, what, expected, so_far="readers see what they saw before", then="run it again")


def index_of(contents: Contents, current: bytes | None, where: str = "") -> bytes:
    """The OCI index with the releases that were chosen, and of their libraries no others."""
    pins: dict[str, list[Pin]] = {}
    for release in contents.releases:
        pins.setdefault(release.pin.library, []).append(release.pin)
    return reconciled(current, pins, where, said=contents.releases)


class Told:
    """Counts for a progress bar, from several threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._guard = threading.Lock()

    def add(self, size: int) -> None:
        with self._guard:
            self._done += size
            if self._progress is not None:
                self._progress(self._done, self._total)
