"""Finds out by a probe whether a bucket keeps what a publisher relies on; what it answers is not taken for granted."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

from kartifacts.errors import ConfigError, PublishConflict, SourceError
from kartifacts.publish.buckets import Bucket, Raced

log = logging.getLogger(__name__)


class Unsupported(SourceError):
    """A store says of itself that it does not know conditional writes."""


def check(bucket: Bucket, plain: Callable[[str], None], *, single_writer: bool) -> bool:
    """Whether conditional writes are kept.

    Args:
        plain: writes something under a path without a condition.

    Raises:
        ConfigError: they are not, and others may be writing there.
        SourceError: nothing can be written there at all.
    """
    probe = f"probe/{uuid.uuid4().hex}"
    try:
        broken = _broken(bucket, probe, plain)
    finally:
        try:
            bucket.delete(probe)
        except SourceError as error:
            log.info("the probe stays, which does no harm: %s", error.message)
    if broken and not single_writer:
        raise ConfigError(
            f"{bucket.name} does not keep conditional writes: {broken}; nothing was published",
            hint="two publishers at once would undo each other's work there: take another store, or say "
            "--single-writer if nobody else ever writes there meanwhile",
        )
    if broken:
        log.warning("%s does not keep conditional writes (%s): let nobody else write there", bucket.name, broken)
    return not broken


def _broken(bucket: Bucket, probe: str, plain: Callable[[str], None]) -> str:
    """What is wrong with a bucket; "" if nothing is."""
    try:
        _begin(bucket, probe)
        try:
            bucket.put_if_absent(probe, b"2")
        except PublishConflict:
            pass
        else:
            return "it let a second writer of one name overwrite the first and said that all was well"
        first = bucket.read(probe)
        if first is None or first.content != b"1":
            return "it does not give back what was written just before"
        bucket.swap(probe, b"3", first)
        try:
            bucket.swap(probe, b"4", first)
        except Raced:
            return ""
        return "it let a writer replace a pointer that another had changed meanwhile"
    except Raced as error:
        return f"it refuses to replace a pointer that nobody has changed: {error.message}"
    except Unsupported as error:
        try:
            plain(probe)
        except SourceError as refused:
            raise SourceError(
                f"{bucket.name} takes no writes: {refused.message}",
                denied=refused.denied,
                permanent=True,
                hint="it may be for reading only: publish where the server's files come from",
            ) from refused
        return error.message


def _begin(bucket: Bucket, probe: str) -> None:
    try:
        bucket.put_if_absent(probe, b"1")
    except PublishConflict as error:
        raise SourceError(
            f"{bucket.name} says that it holds {probe!r}, a name that was made up just now: what answers is no store",
            permanent=True,
        ) from error
