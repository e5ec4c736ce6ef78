"""One entry comes into being: written under no name, checked, made read-only, then linked to its final name."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from kartifacts.errors import StoreError, VerificationError
from kartifacts.files.faults import once_more, store_error, storing
from kartifacts.files.trust import unfit
from kartifacts.model.digest import Digest

log = logging.getLogger(__name__)

TEMPORARY_PREFIX = ".tmp-"  # in the entry's own directory, so that linking never crosses a mount
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.ENOENT)
_NO_MODES = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_NO_FLUSH = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EROFS)
_PIECE = 1 << 20
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def write_all(descriptor: int, piece: bytes | bytearray | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


class Partial:
    """The first bytes of something large on their way in, kept for who comes next if the end is not reached.

    They are worth nothing before all of them have been hashed; whoever continues begins with that.
    """

    def __init__(self, place: str, need: int) -> None:
        self._place = place
        self._need = need
        self._descriptor = self._open()
        self.file: IO[bytes] = os.fdopen(self._descriptor, "r+b", buffering=0)

    def hashed(self) -> tuple[hashlib._Hash, int]:
        """The sha256 of what is there, and how much that is; further bytes go behind it."""
        digest, size = hashlib.sha256(), 0
        self.file.seek(0)
        with storing("read", Path(self._place)):
            while piece := self.file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
        return digest, size

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        with storing("write into", Path(self._place).parent, need=self._need):
            write_all(self._descriptor, piece)

    def drop(self) -> None:
        """Leave nothing to continue."""
        try:
            os.unlink(self._place)
        except FileNotFoundError:
            log.debug("%s was removed by another process", self._place)

    def close(self) -> None:
        self.file.close()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with storing("write into", Path(self._place).parent, need=self._need):
            for _ in range(3):
                try:
                    descriptor = os.open(self._place, flags, 0o600)
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EPERM):
                        raise
                else:
                    found = os.fstat(descriptor)
                    if not unfit(found, found.st_size) and found.st_size <= self._need and found.st_nlink == 1:
                        return descriptor
                    os.close(descriptor)
                os.unlink(self._place)  # something that is none of ours, or longer than it may be
        raise StoreError(f"cannot write {self._place!r}: something wrong is put there again and again")


class Writer:
    """Receives the bytes of one entry; `install` gives it its name, `close` without it leaves nothing."""

    def __init__(
        self, place: str, directory: str, digest: Digest, size: int, *, quarantine: Callable[[Path], Path]
    ) -> None:
        self._place = place  # a str: thousands of these are made in a second
        self._directory = directory
        self.digest = digest
        self.size = size
        self.written = 0
        self._quarantine = quarantine
        self._hash = hashlib.sha256()
        self._name: str | None = None  # of the temporary file, where it needs one
        try:
            self._descriptor = once_more(self._open)
        except FileNotFoundError:  # the directory; whoever made it can make it again
            raise
        except OSError as error:
            raise store_error(error, "write into", Path(directory), need=size) from error

    @property
    def path(self) -> Path:
        return Path(self._place)

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        """Take the next bytes.

        Raises:
            VerificationError: more bytes than were promised.
            StoreError: they cannot be written.
        """
        if self.written + len(piece) > self.size:
            raise self._wrong(f"more than {self.size} bytes")
        try:
            write_all(self._descriptor, piece)
        except OSError as error:
            raise self._fault(error) from error
        self._hash.update(piece)
        self.written += len(piece)

    def install(self) -> None:
        """Check what was written, make it durable and link it to its name."""
        self.seal()
        self.flush()
        self.link()

    def seal(self) -> None:
        """Check what was written; nothing more can be."""
        if self.written != self.size:
            raise self._wrong(f"{self.written} bytes")
        if self._hash.hexdigest() != self.digest:
            raise self._wrong(f"sha256 {self._hash.hexdigest()}")
        try:
            os.fchmod(self._descriptor, 0o444)
        except OSError as error:
            if error.errno not in _NO_MODES:  # whoever looks the entry up judges by the mode that it has
                raise self._fault(error) from error

    def flush(self) -> None:
        """Have the bytes on the disk before a name leads to them.

        The name itself is not flushed: after a crash it may be gone, and the entry is fetched again.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno not in _NO_FLUSH:
                raise self._fault(error) from error

    def flush_all(self) -> bool:
        """Have everything on the disk that was written to this file system; False where that cannot be done at once."""
        try:
            return _flush_file_system(self._descriptor)
        except OSError as error:
            raise self._fault(error) from error

    def link(self) -> None:
        """Link the file to its name; a name that is taken by the same content is left alone."""
        try:
            for _ in range(3):
                if self._linked() or self._winner_is_good():
                    return
        except OSError as error:
            raise self._fault(error) from error
        raise StoreError(f"cannot write {self._place!r}: something wrong is put there again and again")

    def close(self) -> None:
        os.close(self._descriptor)
        if self._name is not None:
            try:
                os.unlink(self._name)
            except OSError as error:
                log.debug("removing %s: %s", self._name, error)

    def _fault(self, error: OSError) -> StoreError:
        return store_error(error, "write", self.path, need=self.size)

    def _wrong(self, actual: str) -> VerificationError:
        expected = f"{self.size} bytes with sha256 {self.digest}"
        return VerificationError(
            f"content of {self.digest[:12]}: expected {expected}, got {actual}", expected=expected, actual=actual
        )

    def _open(self) -> int:
        if _can_link_nameless():
            try:
                return os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        return self._open_named()

    def _open_named(self) -> int:
        self._name = f"{self._directory}/{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
        return os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _linked(self) -> bool:
        """Give the file its name; False if the name is taken."""
        try:
            if self._name is None:
                # linkat, which alone follows the link in /proc, is what Python calls if there are directories; with
                # absolute paths their descriptors do not matter.
                link = f"/proc/self/fd/{self._descriptor}"
                os.link(link, self._place, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            else:
                os.link(self._name, self._place, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if self._name is None and error.errno in (*_NO_LINK, *_NO_TMPFILE, errno.EXDEV):
                self._take_name()
                return self._linked()
            if self._name is None or error.errno not in (*_NO_LINK, errno.EXDEV):
                raise
            # No hard links here (FAT, some network mounts).  A rename would replace, so look first; losing that race
            # replaces an entry by its like, and whoever has the old one mapped keeps it.
            if os.path.lexists(self._place):
                return False
            try:
                os.rename(self._name, self._place)
            except FileNotFoundError:  # a network file system may have done it, and then not have known it
                if os.path.lexists(self._name) or unfit(os.lstat(self._place), self.size):
                    raise
            self._name = None
        return True

    def _take_name(self) -> None:
        """Copy a nameless file that this file system will not link after all into one that has a name."""
        nameless = self._descriptor
        self._descriptor = self._open_named()
        try:
            at = 0
            while piece := os.pread(nameless, _PIECE, at):
                write_all(self._descriptor, piece)
                at += len(piece)
        finally:
            os.close(nameless)
        self.seal()
        self.flush()

    def _winner_is_good(self) -> bool:
        try:
            reason = unfit(os.lstat(self._place), self.size)
        except FileNotFoundError:
            return False
        if reason:
            log.warning("%s is damaged and is moved away: %s", self._place, reason)
            self._quarantine(self.path)
        return not reason


@cache
def _can_link_nameless() -> bool:
    return os.path.isdir("/proc/self/fd")


class Batch:
    """Entries that are flushed together: one flush of the file system costs less than one for each of many files."""

    _MOST = 64  # files held open

    def __init__(self, begin: Callable[[Digest, int, str], Writer]) -> None:
        self._begin = begin
        self._sealed: list[Writer] = []

    def put(self, digest: Digest, content: memoryview, suffix: str = "") -> None:
        """Write one entry from memory; it appears by the end of the batch."""
        writer = self._begin(digest, len(content), suffix)
        try:
            writer.write(content)
            writer.seal()
        except BaseException:
            writer.close()
            raise
        self._add(writer)

    @contextmanager
    def writer(self, digest: Digest, size: int, suffix: str = "") -> Iterator[Writer]:
        """As `put`, for what comes in pieces."""
        writer = self._begin(digest, size, suffix)
        try:
            yield writer
            writer.seal()
        except BaseException:
            writer.close()
            raise
        self._add(writer)

    def _add(self, writer: Writer) -> None:
        self._sealed.append(writer)
        if len(self._sealed) >= self._MOST:
            self.install()

    def install(self) -> None:
        """Let everything that is complete appear."""
        try:
            if not (len(self._sealed) > 1 and self._sealed[0].flush_all()):
                for writer in self._sealed:
                    writer.flush()
            for writer in self._sealed:
                writer.link()
        finally:
            self.close()

    def close(self) -> None:
        for writer in self._sealed:
            writer.close()
        self._sealed.clear()


def _flush_file_system(descriptor: int) -> bool:
    """Flush the file system that an open file is on; False where that cannot be done."""
    syncfs = _syncfs()
    if syncfs is None:
        return False
    if syncfs(descriptor) != 0:
        import ctypes

        failed = ctypes.get_errno()
        if failed not in _NO_FLUSH:
            raise OSError(failed, os.strerror(failed))
        return False
    return True


@cache
def _syncfs() -> Callable[[int], int] | None:
    import ctypes

    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return found
