"""What is sent to a bucket: its bytes, their digests as servers want to see them, and how they are to be served."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kartifacts.errors import SourceError
from kartifacts.files.reading import open_regular
from kartifacts.model.digest import Digest

PART = 16 << 20  # bytes of a large object that are sent at a time
_PIECE = 1 << 20
_ADDRESSED = re.compile(r"(blobs/sha256/[0-9a-f]{64}|targets/.*/[0-9a-f]{64}\.[a-z]+\.json)")
_NUMBERED = re.compile(r"[0-9]+\..+\.json")


class Served(NamedTuple):
    """Headers with which an object is to be given to readers and to the caches between."""

    content_type: str
    cache_control: str


def served_as(path: str) -> Served:
    """What may be replaced is asked for anew each time; what is named by a digest or a number never changes."""
    kept = holds_digest(path) or _NUMBERED.fullmatch(path.rpartition("/")[2]) is not None
    return Served(
        "application/json" if path.endswith(".json") else "application/octet-stream",
        "public, max-age=31536000, immutable" if kept else "no-cache",
    )


def holds_digest(path: str) -> bool:
    """Whether a name holds the digest of its bytes, so that all who write it write the same."""
    return _ADDRESSED.fullmatch(path) is not None


class _Hashed(NamedTuple):
    size: int
    sha256: bytes
    md5: bytes
    parts: tuple[bytes, ...]  # md5 of each


class Sent:
    """Bytes, or a file, which is never in memory as a whole; a file that cannot be read is a `SourceError`."""

    def __init__(self, content: bytes | Path) -> None:
        self._content = content

    @property
    def size(self) -> int:
        return self._hashed.size

    @property
    def digest(self) -> tuple[Digest, int]:
        return Digest(self._hashed.sha256.hex()), self._hashed.size

    @property
    def sha256(self) -> str:
        """In base64."""
        return base64.b64encode(self._hashed.sha256).decode()

    @property
    def md5(self) -> str:
        """In base64."""
        return base64.b64encode(self._hashed.md5).decode()

    @property
    def parts(self) -> int:
        return len(self._hashed.parts)

    @property
    def etags(self) -> tuple[str, str]:
        """What S3 calls these bytes, sent at once or in parts."""
        joined = hashlib.md5(b"".join(self._hashed.parts), usedforsecurity=False).hexdigest()
        return self._hashed.md5.hex(), f"{joined}-{self.parts}"

    def part(self, number: int) -> tuple[bytes, str]:
        """Part `number`, counted from 1, and its md5 in base64."""
        with self.open() as file:
            file.seek((number - 1) * PART)
            return _read(file, PART, self._content), base64.b64encode(self._hashed.parts[number - 1]).decode()

    def open(self) -> BinaryIO:
        if isinstance(self._content, bytes):
            return io.BytesIO(self._content)
        try:
            return open_regular(str(self._content))
        except OSError as error:
            raise _unreadable(self._content, error) from error

    @cached_property
    def _hashed(self) -> _Hashed:
        size, sha256, whole = 0, hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        parts = [hashlib.md5(usedforsecurity=False)]
        with self.open() as file:
            while piece := _read(file, _PIECE, self._content):
                if size and size % PART == 0:
                    parts.append(hashlib.md5(usedforsecurity=False))
                for hashed in (sha256, whole, parts[-1]):
                    hashed.update(piece)
                size += len(piece)
        return _Hashed(size, sha256.digest(), whole.digest(), tuple(part.digest() for part in parts))


def _read(file: BinaryIO, count: int, content: bytes | Path) -> bytes:
    try:
        return file.read(count)
    except OSError as error:
        raise _unreadable(content, error) from error


def _unreadable(content: object, error: OSError) -> SourceError:
    return SourceError(f"cannot read {str(content)!r}: {error.strerror or error}", permanent=True)
