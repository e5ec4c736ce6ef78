"""Where releases are written to: objects that never change under their name, and pointers that do.

A bucket is chosen by a URL-like text; ``dir:PATH`` is a directory that any web server can serve.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from kartifacts.errors import ConfigError, PublishConflict
from kartifacts.model.digest import Digest

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
        """All objects below the directory `prefix`, sorted by path."""
        ...

    def delete(self, path: str) -> None:
        """Remove an object; nothing happens if there is none."""
        ...

    def tidy(self) -> None:
        """Remove what writers that were killed have left behind."""
        ...


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


_SCHEMES = {"dir": "dir:PATH"}


def open_bucket(text: str) -> Bucket:
    """The bucket that ``dir:PATH`` names.

    Raises:
        ConfigError: the scheme is unknown, or there is no path.
    """
    from kartifacts.publish.buckets.directory import DirectoryBucket

    scheme, _, rest = text.partition(":")
    if scheme not in _SCHEMES or not rest:
        raise ConfigError(f"cannot publish to {text!r}: expected {' or '.join(_SCHEMES.values())}")
    return DirectoryBucket(Path(rest))
