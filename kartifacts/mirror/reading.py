"""Reads what is to be mirrored from places in order; nothing is given out before its size and sha256 were checked."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from kartifacts.config import Settings
from kartifacts.errors import SourceError, VerificationError
from kartifacts.files.faults import WORKSPACE, storing
from kartifacts.files.trust import make_directory
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import blob_path
from kartifacts.publish import files
from kartifacts.publish.buckets import Bucket
from kartifacts.publish.repository import Blob
from kartifacts.sources import Pieces, Source
from kartifacts.sources.breaker import Breaker
from kartifacts.sources.turns import first_good

IN_MEMORY = 1 << 20  # bytes; what is larger goes through the disk

_T = TypeVar("_T")


class BucketSource:
    """A bucket as a source of documents and small blobs, so that what a mirror holds is not asked for elsewhere."""

    local = True
    mirror = True
    installed = False

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.name = bucket.name
        self.breaker = Breaker(self.name)

    @contextmanager
    def read(self, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> Iterator[Pieces]:
        end = size if length is None else start + length
        content = self.document(blob_path(digest), size)
        yield Pieces(iter([content[start:end]]), f"{self.name} {blob_path(digest)}")

    def document(self, path: str, limit: int) -> bytes:
        try:
            return self._bucket.get(path, limit)
        except SourceError as error:
            if error.missing or (self._bucket.size(path) or 0) <= limit:
                raise
            # What is signed says how long it may be at most, so more is damage and no fault of reading.
            raise VerificationError(f"{self.name} holds more than {limit} bytes as {path}", source=self.name) from error

    def blob(self, digest: Digest, size: int) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    def loose(self, digest: Digest, suffix: str) -> Path | None:  # noqa: ARG002  the protocol's names
        return None


class Reader:
    """Reads from `sources` in order, each with its tries.

    Args:
        settings: tries, and the workspace, on whose disk large blobs wait until they are known to be right.
    """

    def __init__(self, sources: Sequence[Source], settings: Settings) -> None:
        self._sources = sources
        self._settings = settings

    def document(self, path: str, limit: int) -> bytes:
        """A file as it is now, from the first source that has it; `SourceError` (`missing`) if none has."""
        return self._from_first(lambda source: source.document(path, limit), path)

    def small(self, blob: Blob) -> bytes:
        """A blob in memory."""

        def attempt(source: Source) -> bytes:
            with source.read(blob.digest, blob.size) as pieces:
                content = bytearray()
                for piece in pieces:
                    content += piece
                    if len(content) > blob.size:
                        break
                _check(blob, sha256(content), len(content), pieces.place)
                return bytes(content)

        return self._from_first(attempt, blob.what)

    @contextmanager
    def content(self, blob: Blob) -> Iterator[bytes | Path]:
        """A blob of any size: in memory if it is small, else as a file, which is gone afterwards."""
        place = self._in_place(blob)
        if place is not None:
            yield place
        elif blob.size <= IN_MEMORY:
            yield self.small(blob)
        else:
            with self._scratch(blob.size) as file:
                self._from_first(lambda source: _copy(source, blob, file, self._settings.workspace), blob.what)
                yield Path(f"/proc/self/fd/{file.fileno()}")

    def _in_place(self, blob: Blob) -> Path | None:
        """The blob's file, where a source is a directory and it is sound there."""
        for source in self._sources:
            path = source.blob(blob.digest, blob.size)
            if path is not None:
                try:
                    sound = files.digest(path) == (blob.digest, blob.size)
                except OSError:
                    sound = False
                if sound:
                    return path
        return None

    @contextmanager
    def _scratch(self, need: int) -> Iterator[IO[bytes]]:
        """A file without a name, so that nothing is left of it even if this process is killed."""
        place = self._settings.workspace
        with storing("write into", place, need=need, setting=WORKSPACE):
            make_directory(place, 0o700)
            file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115  closed below
        with file:
            yield file

    def _from_first(self, attempt: Callable[[Source], _T], label: str) -> _T:
        errors: list[SourceError | VerificationError] = []
        found = first_good(
            self._sources,
            attempt,
            label=label,
            retries=self._settings.retries,
            refused=lambda _, error: errors.append(error),
        )
        if found is not None:
            return found
        wrong = [error for error in errors if isinstance(error, VerificationError)]
        faults = [error for error in errors if not (isinstance(error, SourceError) and error.missing)]
        worst = (wrong or faults or errors)[-1]
        if label not in worst.message:
            worst.message = f"{label}: {worst.message}"
        raise worst


def _copy(source: Source, blob: Blob, file: IO[bytes], place: Path) -> int:
    hashed, size = hashlib.sha256(), 0
    file.seek(0)
    with source.read(blob.digest, blob.size) as pieces:
        for piece in pieces:
            hashed.update(piece)
            size += len(piece)
            if size > blob.size:
                break
            with storing("write into", place, need=blob.size, setting=WORKSPACE):
                file.write(piece)
        _check(blob, hashed.hexdigest(), size, pieces.place)
    with storing("write into", place, need=blob.size, setting=WORKSPACE):
        file.truncate()
        file.flush()
    return size


def _check(blob: Blob, actual: str, size: int, place: str) -> None:
    if (actual, size) != (blob.digest, blob.size):
        got = "more" if size > blob.size else size
        raise VerificationError(
            f"{place} gave other bytes for the {blob.what}: expected {blob.size} bytes with sha256 {blob.digest}, "
            f"got {got} with sha256 {actual}",
            source=place,
            expected=blob.digest,
            actual=actual,
        )
