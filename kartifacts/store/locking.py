"""flock for politeness: one of many processes does the work, the others sleep and then find it done."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kartifacts.store.faults import READ_ONLY, store_error

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.2
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, *READ_ONLY)

_held: set[int] = set()
_warned = False


def _close_in_child() -> None:
    # A forked worker shares the open file and would keep the lock after this process is gone.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def hold(path: Path, *, waiting: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Hold the lock file `path`; gives False where the file system cannot lock, which is warned about once.

    Args:
        waiting: called with a sentence every `PROGRESS_SECONDS` that another process holds it.
    """
    try:
        descriptor = _acquire(path, waiting or (lambda sentence: log.info("%s", sentence)))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise store_error(error, "lock", path) from error
        _warn_once(path, error)
        yield False
        return
    with _holding(descriptor, path):
        yield True


@contextmanager
def slot(directory: Path | None, count: int) -> Iterator[None]:
    """Hold one of `count` numbered lock files, whichever is free first; goes on at once where there are no locks."""
    try:
        taken = _take_any([directory / f"slot-{number}.lock" for number in range(count)]) if directory else None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise store_error(error, "lock", directory or Path()) from error
        taken = None
    if taken is None:
        yield
        return
    with _holding(*taken):
        yield


def is_held(path: Path) -> bool:
    """Whether some process holds the lock file; one that cannot be asked counts as held."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return not _try(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _holding(descriptor: int, path: Path) -> Iterator[None]:
    _held.add(descriptor)
    try:
        yield
    finally:
        _held.discard(descriptor)
        _release(descriptor, path)


def _take_any(paths: list[Path]) -> tuple[int, Path]:
    pause = _FIRST_PAUSE
    while True:
        for path in paths:
            descriptor = _open(path)
            try:
                taken = _try(descriptor) and _same_file(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
            if taken:
                return descriptor, path
            os.close(descriptor)
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _acquire(path: Path, waiting: Callable[[str], None]) -> int:
    started = time.monotonic()
    told = 0
    pause = _FIRST_PAUSE
    while True:
        descriptor = _open(path)
        try:
            while not _try(descriptor):
                waited = time.monotonic() - started
                if waited >= (told + 1) * PROGRESS_SECONDS:
                    told += 1
                    waiting(f"waiting {waited:.0f} s for {path.name}, held by {_holder(descriptor)}")
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE)
            # The holder removes the file when it is done; a lock on a removed file excludes nobody.
            if _same_file(descriptor, path):
                _sign(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    except OSError:
        log.debug("cannot write the holder's name into a lock file", exc_info=True)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "a process that left no name"


def _release(descriptor: int, path: Path) -> None:
    try:
        os.unlink(path)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        # CIFS refuses to unlock at times; closing releases it in any case.
        log.debug("releasing %s: %s", path, error)
    finally:
        os.close(descriptor)


def _warn_once(path: Path, error: OSError) -> None:
    global _warned
    if not _warned and error.errno != errno.EROFS:  # a store that nobody writes needs none
        _warned = True
        log.warning(
            "no locks under %s (%s): going on without; several processes may fetch the same bytes",
            path.parent,
            error.strerror,
        )
