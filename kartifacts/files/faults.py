"""What the operating system refuses becomes a `StoreError` that says where, how much, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kartifacts.errors import StoreError

STORE, WORKSPACE = "KARTIFACTS_STORE", "KARTIFACTS_WORKSPACE"  # the setting that would help
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)

_T = TypeVar("_T")


def once_more(call: Callable[[], _T]) -> _T:
    """The result of `call`, which is called again where a network file system says that it knew an older file."""
    for _ in range(3):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


@contextmanager
def storing(what: str, path: Path, *, need: int | None = None, setting: str = STORE) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StoreError`.  Only the file system's own calls belong inside.

    Args:
        what: the verb of the sentence, as in "cannot write ...".
        need: bytes that were to be written.
        setting: the variable that names another place.
    """
    try:
        yield
    except OSError as error:
        raise store_error(error, what, path, need=need, setting=setting) from error


def store_error(error: OSError, what: str, path: Path, *, need: int | None = None, setting: str = STORE) -> StoreError:
    reason = error.strerror or str(error) or type(error).__name__
    if isinstance(error.filename, str) and error.filename != str(path):
        reason += f" ({error.filename})"
    hint = f"set {setting} to another directory, which can be made and written there"
    if error.errno in _FULL:
        reason += f"; {'' if need is None else f'need {need} bytes, '}{_free(path)}"
        hint = f"free some space, or set {setting} to a directory on a file system that has it"
    elif error.errno in _REFUSED:
        hint = f"set {setting} to a directory that this user may write"
        if setting == STORE:
            hint += "; what is already in this store can be used by naming it in KARTIFACTS_PATH"
    return StoreError(f"cannot {what} {str(path)!r}: {reason}", hint=hint)


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
