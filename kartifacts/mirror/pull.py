"""Brings a mirror to the state of another place: verified as a client would, then promoted in publish order."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError
from kartifacts.mirror.contents import Contents, contents_of
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.promote import Progress, Promotion, promote
from kartifacts.mirror.reading import BucketSource, Reader
from kartifacts.mirror.trusting import Basis, pinned, signed
from kartifacts.model.manifest import Lock
from kartifacts.publish.buckets import Bucket
from kartifacts.sources import Source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trust:
    """Whom to believe: the roots of one or both views, or a lock."""

    roots: tuple[bytes, ...] = ()
    lock: Lock | None = None

    def __post_init__(self) -> None:
        if bool(self.roots) == (self.lock is not None):
            raise ConfigError(
                "roots and a lock were given; one of them decides" if self.roots else "nothing says whom to believe",
                hint="give --root ROOT.json (of each view that is to be mirrored), or --lock kartifacts.lock",
            )

    def basis(
        self, reader: Reader, states: Path | None, *, mirror: Bucket | None = None, expired: bool = False
    ) -> Basis:
        """What is believed of what `reader` gives."""
        if self.lock is not None:
            return pinned(self.lock)
        return signed(self.roots, reader.document, states=states, mirror=mirror, expired=expired)


def states_of(settings: Settings) -> Path:
    """Where a client remembers what it has seen of each root."""
    return settings.store / "v1" / "meta"


def pull(
    source: Source,
    bucket: Bucket,
    trust: Trust,
    chosen: Filter,
    settings: Settings,
    *,
    progress: Progress | None = None,
) -> tuple[Contents, Promotion]:
    """Copy what was chosen of `source` into `bucket`.

    Raises:
        VerificationError: `source` gives what is not signed, not pinned, or older than what was seen before; readers of
            the mirror see what they saw before.
        ArtifactUnavailable: a part of the filter selects nothing.
        SourceError, PublishConflict: something cannot be read or written; running it again goes on from there.
    """
    threads = settings.download_threads
    bucket.preflight()
    bucket.tidy()
    upstream = Reader([source], settings)
    either = Reader([BucketSource(bucket), source], settings)
    for last in (False, True):
        basis = trust.basis(upstream, states_of(settings), mirror=bucket)
        try:
            contents = contents_of(basis, chosen, either, threads=threads)
            return contents, promote(contents, chosen, upstream, bucket, threads=threads, progress=progress)
        except SourceError as error:
            if last or not error.missing or not basis.signatures:
                raise
            log.warning("%s; a release may just have been replaced, so it is begun anew", error.message)
    raise AssertionError
