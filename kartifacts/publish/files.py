"""Files that appear whole under their name, durable and readable by all; every fault is the bare `OSError`.

A file that is being written has a name of its own and is locked, so that what a killed writer left can be told apart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kartifacts.files.reading import open_regular, read_regular
from kartifacts.model.digest import Digest, digest_of

log = logging.getLogger(__name__)

PARTIAL = ".partial-"  # begins the names of files that are being written
MAX_UPDATED = 64 << 20  # bytes of a file that is read to be replaced

_ABANDONED = 86_400.0  # seconds after which nobody writes any more, on a disk where locks of others are not seen
_PIECE = 1 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)

Change = Callable[[bytes | None], bytes]
"""Makes the new content out of the present one, which is None at first."""


def create(path: Path, content: bytes | Path) -> bool:
    """Write a file if there is none of that name; False if there is."""
    if os.path.lexists(path):
        return False
    make_parents(path)
    with _written(path.parent, content) as partial:
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(partial, path)  # no hard links here: the last of two writers wins
    _sync_directory(path.parent)
    return True


def update(path: Path, change: Change) -> bool:
    """Replace a file by `change` of it; no update of another process is lost.  False if nothing changed."""
    make_parents(path)
    lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(lock, path)
        reap(path.parent)
        before = read_regular(path, MAX_UPDATED) if os.path.lexists(path) else None
        after = change(before)
        if after == before:
            return False
        with _written(path.parent, after) as partial:
            os.replace(partial, path)
        os.fsync(lock)
        return True
    finally:
        os.close(lock)


def digest(content: bytes | Path) -> tuple[Digest, int]:
    """sha256 and size."""
    return digest_of(_pieces(content))


def make_parents(path: Path) -> None:
    for parent in reversed(path.parents):
        if not parent.exists():
            with suppress(FileExistsError):
                parent.mkdir()
                parent.chmod(0o755)  # whatever the umask: others are to read it


def reap(directory: Path) -> None:
    """Remove what killed writers left in a directory: nobody holds its lock any more."""
    try:
        left = [entry for entry in os.scandir(directory) if entry.name.startswith(PARTIAL)]
    except FileNotFoundError:
        return
    for entry in left:
        with suppress(OSError):  # somebody else removed it, or it is not ours to remove
            status = entry.stat(follow_symlinks=False)
            # Where writers of other machines hold no lock that is seen here, only age tells.
            if not entry.name.startswith(_own_prefix()) and time.time() - status.st_mtime < _ABANDONED:
                continue
            if stat.S_ISREG(status.st_mode) and _is_abandoned(entry.path):
                os.unlink(entry.path)
                log.info("removed %s, which a writer that was killed had left", entry.path)


def _is_abandoned(path: str) -> bool:
    with open_regular(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _own_prefix() -> str:
    return f"{PARTIAL}{socket.gethostname()[:40]}-"


@contextmanager
def _written(directory: Path, content: bytes | Path) -> Iterator[str]:
    """The content in a file of its own, durable, next to where it will be; gone afterwards if it is still there."""
    descriptor, name = _claimed(directory)
    with os.fdopen(descriptor, "wb") as file:
        try:
            for piece in _pieces(content):
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
            yield name
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)


def _claimed(directory: Path) -> tuple[int, str]:
    """A new file, locked where there are locks."""
    while True:
        name = os.path.join(directory, _own_prefix() + uuid.uuid4().hex)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # taken for abandoned before it was locked


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        log.warning("%s cannot be locked (%s): let no two processes write it at once", path.parent, error.strerror)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with open_regular(content) as file:
        while piece := file.read(_PIECE):
            yield piece
