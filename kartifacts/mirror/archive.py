"""One file or directory that carries a part of a repository: what may be in it, how it is written, how it is read.

The file is an uncompressed tar whose bytes follow from its content alone: members sorted by name, nothing of the host.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kartifacts.errors import ConfigError, SourceError, VerificationError
from kartifacts.files.reading import open_regular
from kartifacts.mirror.filters import MAX_MIRROR, MIRROR
from kartifacts.mirror.trusting import MAX_ROOT
from kartifacts.model.digest import Digest
from kartifacts.model.layout import MAX_PATH, OCI_INDEX, OCI_LAYOUT, OCI_LAYOUT_CONTENT, blob_path, check_path
from kartifacts.model.manifest import MAX_INDEX, MAX_PACK
from kartifacts.sources import Pieces, Source
from kartifacts.sources.breaker import Breaker
from kartifacts.sources.directory import DirectorySource

MAX_PROVENANCE = 64 << 20  # bytes
MAX_METADATA = 16 << 20  # bytes of a metadata file; clients read less, as their settings say
MAX_MEMBERS = 4_000_000

_BLOCK = tarfile.BLOCKSIZE
_PIECE = 1 << 20
_NAME = r"[a-z0-9](?:[a-z0-9._+-]{0,126}[a-z0-9])?"
_VERSION = r"[1-9][0-9]{0,17}"
_KINDS: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), limit)
    for pattern, limit in (
        (r"blobs/sha256/[0-9a-f]{64}", MAX_PACK),
        (rf"targets/{_NAME}/{_NAME}/[0-9a-f]{{64}}\.index\.json", MAX_INDEX),
        (rf"targets/{_NAME}/{_NAME}/[0-9a-f]{{64}}\.provenance\.json", MAX_PROVENANCE),
        (rf"(?:metadata|airgap)/{_VERSION}\.root\.json", MAX_ROOT),
        (rf"(?:metadata|airgap)/{_VERSION}\.{_NAME}\.json", MAX_METADATA),
        (r"(?:metadata|airgap)/timestamp\.json", MAX_METADATA),
        (re.escape(OCI_LAYOUT), len(OCI_LAYOUT_CONTENT)),
        (re.escape(OCI_INDEX), MAX_INDEX),
        (re.escape(MIRROR), MAX_MIRROR),
    )
)
_LONG_NAME = re.compile(rb"(\d{1,5}) path=([!-~]{1,1024})\n")  # of pax, and nothing else of it


def check_member(name: str, size: int, where: str) -> None:
    """Refuse a member that is not of the layout, or larger than its kind may be."""
    limit = next((limit for pattern, limit in _KINDS if pattern.fullmatch(name)), None)
    if limit is None or ".." in name:
        raise VerificationError(f"{where} holds {name[:150]!r}, which is no part of a repository", source=where)
    check_path(name, what=f"a name in {where}")
    if not 0 <= size <= limit:
        raise VerificationError(f"{where} holds {size} bytes as {name!r}; at most {limit} are read", source=where)


@dataclass(frozen=True)
class Archive:
    """What was carried here; every name and size is of the layout, and not a byte is believed yet."""

    where: str
    members: Mapping[str, int]  # path → size
    source: Source


def open_archive(path: Path) -> Archive:
    """Look at the names in a tar file, or in a directory.

    Raises:
        ConfigError: there is nothing there.
        VerificationError: something in it is no part of a repository, stands twice, is no regular file, or is cut off.
    """
    if path.is_dir():
        return Archive(str(path), dict(_walk(path, str(path))), _Carried(path, mirror=True))
    try:
        with open_regular(path) as file:
            places = _scan(file, str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    return Archive(str(path), {name: size for name, (_, size) in places.items()}, TarSource(path, places))


# -- a directory -------------------------------------------------------------------------------------------------------


class _Carried(DirectorySource):
    """A directory whose files were looked at: what is wrong with one now is a fault of the file, not of reading."""

    def document(self, path: str, limit: int) -> bytes:
        try:
            return super().document(path, limit)
        except SourceError as error:
            if error.missing:
                raise
            raise _too_large(path, self.name, limit) from error


def _too_large(path: str, where: str, limit: int) -> VerificationError:
    return VerificationError(f"{path} in {where} is not what it should be: at most {limit} bytes", source=where)


def _walk(root: Path, where: str) -> Iterator[tuple[str, int]]:
    pending = [root]
    while pending:
        try:
            entries = sorted(os.scandir(pending.pop()), key=lambda entry: entry.name)
            for entry in entries:
                name = os.path.relpath(entry.path, root)
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(Path(entry.path))
                    continue
                if not stat.S_ISREG(status.st_mode):
                    raise VerificationError(f"{where} holds {name[:150]!r}, which is no regular file", source=where)
                check_member(name, status.st_size, where)
                yield name, status.st_size
        except OSError as error:
            raise ConfigError(f"cannot read {where!r}: {error.strerror or error}") from error


# -- a tar file --------------------------------------------------------------------------------------------------------


class TarSource:
    """A tar file as a source; its members were looked at before."""

    local = True
    mirror = True
    installed = False

    def __init__(self, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
        self._path = path
        self._places = places
        self.name = str(path)
        self.breaker = Breaker(self.name)

    @contextmanager
    def read(self, digest: Digest, size: int, *, start: int = 0, length: int | None = None) -> Iterator[Pieces]:
        with self._open(blob_path(digest)) as (file, at, there):
            if there != size:
                raise VerificationError(
                    f"{self.name} holds {there} bytes as {blob_path(digest)}, expected {size}", source=self.name
                )
            file.seek(at + start)
            yield Pieces(_pieces(file, size - start if length is None else length, self.name), self.name)

    def document(self, path: str, limit: int) -> bytes:
        with self._open(path) as (file, at, size):
            if size > limit:
                raise _too_large(path, self.name, limit)
            file.seek(at)
            return b"".join(_pieces(file, size, self.name))

    def blob(self, digest: Digest, size: int) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    def loose(self, digest: Digest, suffix: str) -> Path | None:  # noqa: ARG002  the protocol's names
        return None

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[IO[bytes], int, int]]:
        if name not in self._places:
            raise SourceError(f"{self.name} does not hold {name}", missing=True)
        try:
            file = open_regular(self._path)
        except OSError as error:
            raise SourceError(f"cannot read {self.name!r}: {error.strerror or error}", permanent=True) from error
        with file:
            yield file, *self._places[name]


def _pieces(file: IO[bytes], length: int, where: str) -> Iterator[bytes]:
    while length:
        try:
            piece = file.read(min(_PIECE, length))
        except OSError as error:
            raise SourceError(f"cannot read {where!r}: {error.strerror or error}") from error
        if not piece:
            raise SourceError(f"{where} ended {length} bytes early", permanent=True)
        length -= len(piece)
        yield piece


def _scan(file: IO[bytes], where: str) -> dict[str, tuple[int, int]]:
    """Name → offset and size of every member, by their headers alone."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    places: dict[str, tuple[int, int]] = {}
    long_name = ""
    while (header := file.read(_BLOCK)) != bytes(_BLOCK):
        info = _header(header, where)
        at = file.tell()
        if at + _padded(info.size) > end:
            raise VerificationError(f"{where} is cut off within {info.name[:150]!r}", source=where)
        if info.type == tarfile.XHDTYPE and not long_name and 0 < info.size <= MAX_PATH + 32:
            long_name = _long_name(file.read(info.size), where)
        elif info.type == tarfile.REGTYPE:
            name, long_name = long_name or info.name, ""
            check_member(name, info.size, where)
            if name in places:
                raise VerificationError(f"{where} holds {name!r} twice", source=where)
            if len(places) == MAX_MEMBERS:
                raise VerificationError(f"{where} holds more than {MAX_MEMBERS} members", source=where)
            places[name] = at, info.size
        else:
            raise VerificationError(
                f"{where} holds {info.name[:150]!r} of type {info.type!r}, which is no regular file",
                source=where,
                hint="`kartifacts mirror export` writes plain files only; a directory can be imported as it is",
            )
        file.seek(at + _padded(info.size))
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise VerificationError(f"{where} is cut off at its end", source=where)
    if long_name or any(map(any, iter(lambda: file.read(_PIECE), b""))):
        raise VerificationError(f"{where} goes on after its end", source=where)
    return places


def _header(block: bytes, where: str) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        if info.size < 0 or block[257:265] != tarfile.POSIX_MAGIC:
            raise ValueError("it is not of the POSIX kind")
    except (tarfile.HeaderError, ValueError) as error:
        reason = "it has no end" if len(block) < _BLOCK else str(error)
        raise VerificationError(f"{where} is no tar file that `mirror export` wrote: {reason}", source=where) from error
    return info


def _long_name(data: bytes, where: str) -> str:
    matched = _LONG_NAME.fullmatch(data)
    if matched is None or int(matched[1]) != len(data):
        raise VerificationError(f"{where} holds a header that is none of ours: {data[:80]!r}", source=where)
    return matched[2].decode("ascii")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


class TarWriter:
    """Writes members, which have to come sorted; `finish` makes the file whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._last = ""

    def add(self, name: str, size: int, pieces: Iterator[bytes]) -> None:
        assert name > self._last, (name, self._last)
        self._last = name
        info = tarfile.TarInfo(name)
        info.size = size
        self._file.write(info.tobuf(tarfile.PAX_FORMAT, "ascii", "strict"))
        for piece in pieces:
            self._file.write(piece)
            size -= len(piece)
        assert size == 0, name
        self._file.write(bytes(_padded(info.size) - info.size))

    def finish(self) -> None:
        self._file.write(bytes(2 * _BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
