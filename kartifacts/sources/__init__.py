"""The read side: places that hold blobs by digest, behind one protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from kartifacts.model.digest import Digest


class Source(Protocol):
    """A place to read from.  It is never trusted: whoever reads checks size and digest."""

    name: str  # for messages: a path or a URL without credentials
    local: bool  # True if reading opens no socket

    def read(
        self, digest: Digest, size: int, *, start: int = 0, length: int | None = None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Open `length` bytes (all, if None) from `start` of the blob `digest`, which is `size` bytes long.

        The iterator gives at most `length` bytes, in pieces of 64 KiB to 1 MiB, and raises if the source ends early.

        Raises:
            SourceError: `missing` if the source does not hold the blob; otherwise the fault, with the effective URL,
                HTTP status and what to do.  Raised inside the iterator too.
            VerificationError: the source answers with something that cannot be the blob (wrong length, HTML).
        """
        ...

    def loose(self, digest: Digest, size: int, suffix: str) -> Path | None:
        """The path of a raw, unpacked kernel that can be used in place, if this source holds one."""
        ...
