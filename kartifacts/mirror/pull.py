"""Brings a mirror to the state of another place: verified as a client would, then promoted in publish order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.mirror.contents import Contents, contents_of
from kartifacts.mirror.filters import Filter, held_filter
from kartifacts.mirror.promote import Progress, Promotion, promote
from kartifacts.mirror.reading import BucketSource, Reader
from kartifacts.mirror.trusting import Basis, pinned, signed
from kartifacts.model.layout import OCI_INDEX, TIMESTAMP, View, metadata_path
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
    refilter: bool = False,
    progress: Progress | None = None,
) -> tuple[Contents, Promotion]:
    """Copy what was chosen of `source` into `bucket`.

    Args:
        refilter: the mirror may promise less than it did.

    Raises:
        ConfigError: the mirror would promise less than it does.
        VerificationError: `source` gives what is not signed, not pinned, or older than what was seen before; readers of
            the mirror see what they saw before.
        ArtifactUnavailable: a part of the filter selects nothing.
        SourceError, PublishConflict: something cannot be read or written; running it again goes on from there.
    """
    threads = settings.download_threads
    bucket.preflight()
    if not refilter:
        refuse_less(bucket, chosen)
    bucket.tidy()
    upstream = Reader([source], settings)
    either = Reader([BucketSource(bucket), source], settings)
    for last in (False, True):
        basis = trust.basis(upstream, states_of(settings), mirror=bucket)
        try:
            with naming_filter_of(source, chosen):
                contents = contents_of(basis, chosen, either, threads=threads)
                return contents, promote(contents, chosen, upstream, bucket, threads=threads, progress=progress)
        except SourceError as error:
            if last or not error.missing or not basis.signatures:
                raise
            log.warning("%s; a release may just have been replaced, so it is begun anew", error.message)
    raise AssertionError


def refuse_less(bucket: Bucket, chosen: Filter) -> None:
    """Refuse to make a mirror one of less than it is, as one command with an option too many would."""
    held = None if chosen == Filter() else _held(bucket)
    if held is not None and not chosen.covers(held):
        raise ConfigError(
            f"{bucket.name} holds {held}, and would hold less: {chosen}; nothing was changed",
            hint="choose all that it holds, or another destination; --change-filter makes it a mirror of just this",
        )


def _held(bucket: Bucket) -> Filter | None:
    """What a mirror promises now, which is everything where others than mirrors have put something; None if new."""
    held = held_filter(bucket.get, bucket.name)
    pointers = (OCI_INDEX, *(metadata_path(view, TIMESTAMP) for view in get_args(View)))
    if held is None and any(bucket.size(path) is not None for path in pointers):
        return Filter()
    return held


@contextmanager
def naming_filter_of(source: Source, chosen: Filter) -> Iterator[None]:
    """Where a source lacks something because it is a mirror of less, say so: nobody else knows what was left out."""
    try:
        yield
    except SourceError as error:
        if error.missing and error.hint is None:
            error.hint = _why_missing(source, chosen)
        raise


def _why_missing(source: Source, chosen: Filter) -> str:
    try:
        held = held_filter(source.document, source.name)
    except (SourceError, VerificationError):
        held = None
    if held is not None and not held.covers(chosen):
        return f"{source.name} is a mirror of a part, and says of which: give {held} here, too"
    return f"{source.name} does not hold all that was chosen; take a whole repository, or choose what it has"
