"""What the operating system refuses becomes a `StoreError` that says where, how much, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kartifacts.errors import StoreError

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def storing(what: str, path: Path, *, need: int | None = None) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StoreError`.  Only the store's own calls belong inside."""
    try:
        yield
    except OSError as error:
        raise store_error(error, what, path, need=need) from error


def store_error(error: OSError, what: str, path: Path, *, need: int | None = None) -> StoreError:
    reason = error.strerror or type(error).__name__
    if error.errno in _FULL:
        amount = "" if need is None else f"; need {need} bytes, {_free(path)}"
        return StoreError(
            f"cannot {what} {str(path)!r}: {reason}{amount}",
            hint="free some space, or set KARTIFACTS_STORE to a directory on a file system that has it",
        )
    if error.errno in READ_ONLY:
        return StoreError(
            f"cannot {what} {str(path)!r}: {reason}",
            hint="set KARTIFACTS_STORE to a directory that this user may write; "
            "what is already in this store can be used by naming it in KARTIFACTS_PATH",
        )
    return StoreError(f"cannot {what} {str(path)!r}: {reason}")


def free_bytes(path: Path) -> int | None:
    """Bytes that this user may still write at `path` or where it will be made; None if nobody can say."""
    for place in (path, *path.parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        # A file system that counts no blocks (some network and FUSE mounts) knows no limit either.
        return found.f_bavail * found.f_frsize if found.f_blocks else None
    return None


def _free(path: Path) -> str:
    free = free_bytes(path)
    return "free space unknown" if free is None else f"{free} free"
