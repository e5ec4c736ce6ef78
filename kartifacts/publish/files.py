"""Files that appear whole under their name, durable and readable by all; every fault is the bare `OSError`."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kartifacts.model.digest import Digest

log = logging.getLogger(__name__)

PARTIAL = ".partial-"  # begins the names of files that are being written

_PIECE = 1 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)

Change = Callable[[bytes | None], bytes]
"""Makes the new content out of the present one, which is None at first."""


def create(path: Path, content: bytes | Path) -> bool:
    """Write a file if there is none of that name; False if there is."""
    if path.exists():
        return False
    make_parents(path)
    partial = _written(path.parent, content)
    try:
        os.link(partial, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(partial, path)  # no hard links here: the last of two writers wins
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)
    _sync_directory(path.parent)
    return True


def update(path: Path, change: Change) -> bool:
    """Replace a file by `change` of it; no update of another process is lost.  False if nothing changed."""
    make_parents(path)
    lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(lock, path)
        before = path.read_bytes() if path.exists() else None
        after = change(before)
        if after == before:
            return False
        os.replace(_written(path.parent, after), path)
        os.fsync(lock)
        return True
    finally:
        os.close(lock)


def digest(content: bytes | Path) -> tuple[Digest, int]:
    """sha256 and size."""
    hashed, size = hashlib.sha256(), 0
    for piece in _pieces(content):
        hashed.update(piece)
        size += len(piece)
    return Digest(hashed.hexdigest()), size


def make_parents(path: Path) -> None:
    for parent in reversed(path.parents):
        if not parent.exists():
            with suppress(FileExistsError):
                parent.mkdir()
                parent.chmod(0o755)  # whatever the umask: others are to read it


def _written(directory: Path, content: bytes | Path) -> Path:
    """The content in a file of its own, durable, next to where it will be."""
    handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in _pieces(content):
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


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
    with open(content, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
