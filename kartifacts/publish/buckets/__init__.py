"""Where releases are written to: objects that never change under their name, and pointers that do.

A bucket is chosen by a text: a path or ``dir:PATH``, ``s3://…``, ``https://…`` or ``oci://…``; see `open_bucket`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, PublishConflict, SourceError, VerificationError
from kartifacts.files.directories import directory_in
from kartifacts.model.digest import Digest
from kartifacts.model.layout import check_path
from kartifacts.remote.addresses import shown

MAX_SMALL = 64 << 20  # bytes of an object that is read whole
_ROUNDS = 200  # races in a row that one writer may lose

Change = Callable[[bytes | None], bytes]
"""Makes the new content of a pointer out of the present one, which is None at first; may be asked several times."""


class Stamped(NamedTuple):
    """What a pointer held when it was read, and the bucket's own mark (ETag) of that state."""

    content: bytes
    mark: str


class Listed(NamedTuple):
    """One object of a bucket."""

    path: str
    size: int  # bytes
    modified: float  # seconds since 1970, by the bucket's clock


class Raced(PublishConflict):
    """Somebody else changed a pointer first; nothing was written."""


class Unlisted(SourceError):
    """This kind of bucket cannot say what lies in it."""


class Bucket(Protocol):
    """A place to write to.  Paths are those of `model.layout`; every fault is a `SourceError`.

    A write whose outcome is not known (a timeout, a 5xx) is settled by reading back, inside the bucket.
    """

    name: str  # for messages, without credentials

    def preflight(self) -> None:
        """Prove by a probe that conditional writes are kept here; a `ConfigError` says what is broken.

        A bucket that was opened for a single writer only warns.
        """
        ...

    def put_if_absent(self, path: str, content: bytes | Path) -> Literal["created", "same"]:
        """Store `content` under `path` for good, whole or not at all.

        Raises:
            PublishConflict: other bytes stand there already; they stay.
        """
        ...

    def copy_if_absent(self, source: str, path: str) -> Literal["created", "same"]:
        """As `put_if_absent` of what lies under `source` already, without sending it again where that can be had.

        Both names hold the digest of the bytes: a release index is a blob too.
        """
        ...

    def get(self, path: str, limit: int = MAX_SMALL) -> bytes:
        """A small object's content; a `SourceError` that is `missing` if there is none, or if it is larger."""
        ...

    def digest(self, path: str) -> tuple[Digest, int]:
        """sha256 and size of what a reader would get now: the bytes are read back, never an ETag."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of an object; None if there is none."""
        ...

    def read(self, path: str) -> Stamped | None:
        """The state of a pointer, for `swap`; None if there is none yet."""
        ...

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        """Replace a pointer if it is still as it was `before`; None: if there still is none.

        Raises:
            Raced: it is not.
        """
        ...

    def list(self, prefix: str) -> list[Listed]:
        """All objects below the directory `prefix`, sorted by path; `Unlisted` if the bucket cannot say."""
        ...

    def delete(self, path: str) -> None:
        """Remove an object; nothing happens if there is none."""
        ...

    def tidy(self) -> None:
        """Remove what writers that were killed have left behind."""
        ...


def checked(path: str) -> str:
    """Give back a path if it leads nowhere out of a bucket; else `VerificationError`."""
    return check_path(path, what="a path in a bucket")


def taken(bucket: Bucket, path: str) -> PublishConflict:
    """The error for a name under which other bytes lie."""
    return PublishConflict(
        f"{bucket.name} already holds other bytes under {path!r}; they were left as they are",
        hint="a name never changes its content: publish under another version; "
        "a blob whose sha256 is not its name is damaged: remove it by hand and publish again",
    )


def raced(bucket: Bucket, path: str) -> Raced:
    """The error for a pointer that is not any more what it was."""
    return Raced(f"{path!r} in {bucket.name} was changed by somebody else in the meantime")


def read_back(bucket: Bucket, path: str, what: str, sent: tuple[Digest, int], *, so_far: str, then: str) -> None:
    """Hash what a reader would get now.

    Args:
        so_far, then: what readers see, and what is to be done when the damage has been found, for the message.

    Raises:
        VerificationError: it is not what was `sent`.
    """
    found = bucket.digest(path)
    if found != sent:
        raise VerificationError(
            f"{bucket.name} gives back other bytes than were sent for the {what}; {so_far}",
            source=f"{bucket.name} {path}",
            expected=f"sha256 {sent[0]}, {sent[1]} bytes",
            actual=f"sha256 {found[0]}, {found[1]} bytes",
            hint=f"remove {path} there, find out what damages uploads, and {then}",
        )


def update(bucket: Bucket, path: str, change: Change) -> bool:
    """Replace a pointer by `change` of it, so that no other writer's update is lost; False if nothing changed.

    Raises:
        Raced: others were faster too many times in a row.
    """
    for _ in range(_ROUNDS):
        before = bucket.read(path)
        after = change(before.content if before is not None else None)
        if before is not None and after == before.content:
            return False
        try:
            bucket.swap(path, after, before)
        except Raced:
            continue
        return True
    raise Raced(f"{path!r} in {bucket.name} could not be updated: others were faster {_ROUNDS} times in a row")


_KINDS = "dir:PATH, s3://BUCKET/PREFIX, https://HOST/PATH, http://HOST/PATH, oci://HOST/NAME or oci+http://HOST/NAME"


def open_bucket(text: str, settings: Settings, *, single_writer: bool = False) -> Bucket:
    """The bucket that `text` names; nothing is asked of it yet.

    Args:
        text: ``dir:PATH``, or the path of a directory (`files.directories`); ``s3://bucket/prefix[?endpoint=URL&region=R&checksums=C&single-writer=1]``;
            ``https://host/path`` for servers that take a plain PUT; ``oci://host/name`` for a registry.
        settings: timeouts, tries, proxies, authorities, netrc.
        single_writer: somebody vouches that nobody else writes there meanwhile, so that a bucket which keeps no
            conditional writes will do.

    Raises:
        ConfigError: the scheme is unknown, the rest is malformed, what is needed for it is not installed, or it needs
            a socket and none may be opened.
    """
    directory = directory_in(text)
    if directory is not None:
        from kartifacts.publish.buckets.directory import DirectoryBucket

        return DirectoryBucket(directory)
    scheme = text.partition(":")[0]
    if scheme in ("s3", "http", "https", "oci", "oci+http"):
        settings.check_online(shown(text))
    if scheme == "s3":
        from kartifacts.publish.buckets.s3 import S3Bucket

        return S3Bucket(text, settings, single_writer=single_writer)
    if scheme in ("http", "https"):
        from kartifacts.publish.buckets.http import HttpBucket

        return HttpBucket(text, settings, single_writer=single_writer)
    if scheme in ("oci", "oci+http"):
        from kartifacts.publish.buckets.oci import OciBucket

        return OciBucket(text, settings, single_writer=single_writer)
    raise ConfigError(
        f"{shown(text)!r} names no bucket: expected {_KINDS}",
        hint=None if ":" in text or not text else f"a new directory of that name is dir:{text}",
    )
