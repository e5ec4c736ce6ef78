"""A directory as a source: a repository's blobs, and loose kernels as an unpacked tree or a copied store holds them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from kartifacts.errors import SourceError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import Digest
from kartifacts.model.layout import blob_path, check_path, loose_path
from kartifacts.sources import Pieces
from kartifacts.sources.breaker import Breaker

PIECE = 1 << 20


class DirectorySource:
    """Blobs at ``blobs/sha256/<hex>``, loose files at ``v1/sha256/<aa>/<hex><suffix>`` below `path`.

    Read-only: nothing is ever written below `path`.
    """

    local = True

    def __init__(self, path: Path, *, name: str = "", mirror: bool = False, installed: bool = False) -> None:
        self.path = path
        self.mirror = mirror
        self.installed = installed
        self.name = name or str(path)
        self.breaker = Breaker(self.name)

    def __repr__(self) -> str:
        return f"DirectorySource({self.name!r})"

    @contextmanager
    def read(self, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> Iterator[Pieces]:
        path, descriptor = self._open(digest)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise SourceError(f"{path!r} is not a regular file", permanent=True)
        with open(descriptor, "rb", buffering=0) as file:
            if found.st_size != size:
                raise VerificationError(
                    f"{path!r} has {found.st_size} bytes, expected {size}",
                    source=path,
                    expected=f"{size} bytes",
                    actual=f"{found.st_size} bytes",
                )
            file.seek(start)
            yield Pieces(_pieces(file, path, size - start if length is None else length), path)

    def document(self, path: str, limit: int) -> bytes:
        place = self.path / check_path(path, what="a path in a repository")
        try:
            return read_regular(place, limit)
        except OSError as error:
            raise SourceError(
                f"cannot read {str(place)!r}: {error.strerror or error}",
                missing=isinstance(error, (FileNotFoundError, NotADirectoryError)),
                permanent=True,
            ) from error

    def blob(self, digest: Digest, size: int) -> Path | None:
        path = self.path / blob_path(digest)
        found = _regular(path)
        return path if found is not None and found.st_size == size else None

    def loose(self, digest: Digest, suffix: str) -> Path | None:
        path = self.path / loose_path(digest, suffix)
        return path if _regular(path) is not None else None

    def _open(self, digest: Digest) -> tuple[str, int]:
        blob = os.path.join(self.path, blob_path(digest))
        for path in (blob, os.path.join(self.path, loose_path(digest, ""))):
            descriptor = _open(path)
            if descriptor is not None:
                return path, descriptor
        if not os.path.isdir(self.path):
            raise SourceError("is not a directory", missing=True)
        raise SourceError(f"does not hold {blob_path(digest)}", missing=True)


def _regular(path: Path) -> os.stat_result | None:
    try:
        found = os.stat(path)
    except OSError:  # whatever keeps it from being used in place, its bytes may still come from elsewhere
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _open(path: str) -> int | None:
    try:  # non-blocking, so that a named pipe planted here is found out instead of waited for
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SourceError(f"cannot read {path!r}: {error.strerror}", permanent=True) from error


def _pieces(file: FileIO, path: str, length: int) -> Iterator[bytes]:
    while length:
        try:
            piece = file.read(min(PIECE, length))
        except OSError as error:
            raise SourceError(f"cannot read {path!r}: {error.strerror}") from error
        if not piece:
            raise SourceError(f"{path!r} ended {length} bytes early")
        length -= len(piece)
        yield piece
