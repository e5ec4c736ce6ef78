"""flock for politeness: one of many processes does the work, the others sleep and then find it done.

Locks save work and nothing depends on them: what stands in the way of locking is said once and then gone on without.
The kernel frees a lock when its holder dies, so a lock file that is left behind means nothing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kartifacts.errors import StoreError
from kartifacts.files.trust import check_trusted

log = logging.getLogger(__name__)

Waiting = Callable[[str, float], None]
"""Told who holds what is waited for, and since how many seconds."""

EVERY = 10.0  # seconds between two lines of who waits
# A holder may be stopped or hang in a file system; to do its work again is better than to wait for ever.
PATIENCE = 600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.2
_ONCE_MORE = (errno.EINTR, errno.ESTALE)  # the file has to be opened again
_TRIES = 5

# Across nodes the locks of these are slow, go stale, or exclude nobody, as their mount options say.
_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs",
            "ocfs2", "gfs2", "orangefs", "virtiofs", "wekafs", "panfs"}  # fmt: skip
_NODE_LOCAL = (Path("/dev/shm"), Path("/tmp"))  # noqa: S108  what is made there is checked before use

_open_locks: set[int] = set()
_warned: set[Path] = set()


def _close_in_child() -> None:
    # A forked worker shares the open file and would keep the lock after this process is gone.
    for descriptor in _open_locks:
        os.close(descriptor)
    _open_locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def hold(
    path: Path, *, waiting: Waiting | None = None, every: float = EVERY, patience: float = PATIENCE
) -> Iterator[bool]:
    """Hold the lock file `path`; gives False where that cannot be or takes too long, which is warned about.

    Args:
        waiting: called each time that another process has held it for another `every` seconds; default: logs it.
        patience: seconds after which it is gone on without the lock.
    """
    with _one_of([path], waiting or _teller(path.name), every, patience) as held:
        yield held


@contextmanager
def slot(directory: Path | None, count: int) -> Iterator[None]:
    """Hold one of `count` numbered lock files, whichever is free first; goes on at once where there are no locks."""
    paths = [directory / f"slot-{number}.lock" for number in range(count)] if directory else []
    with _one_of(paths, _teller(f"one of {count} transfers"), EVERY, PATIENCE):
        yield


def is_held(path: Path) -> bool:
    """Whether some process holds the lock file; one that cannot be asked counts as held."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return not try_lock(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file; False if somebody else holds it, an `OSError` if it cannot be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def elsewhere(home: Path) -> Path | None:
    """The directory of this node for locks on what lies below `home`; None if they can lie there too.

    On a local file system they do, since containers may share that and nothing else.  On a network file system the
    processes of one node take turns, and what two nodes do twice is right all the same: entries appear whole.
    """
    kind = _network_kind(home)
    if kind is None:
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(home))).hexdigest()[:16]
    for base in _NODE_LOCAL:
        place = base / f"kartifacts-{os.geteuid()}"
        try:
            for directory in (place, place / name):
                directory.mkdir(0o700, exist_ok=True)
            check_trusted(place / name)
        except (OSError, StoreError) as error:
            log.debug("no locks in %s: %s", place, error)
            continue
        log.debug("the locks of %s are in %s, since it lies on %s", home, place / name, kind)
        return place / name
    _warn_once(home, f"{home} lies on {kind}, and no directory of this node can have its locks: they stay there")
    return None


def _network_kind(path: Path) -> str | None:
    """The network file system that a path, or where it will be made, lies on; None if it is a local one."""
    for place in (path, *path.parents):
        try:
            device = os.stat(place).st_dev
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
        return network_kind(mounts, f"{os.major(device)}:{os.minor(device)}")
    return None


def network_kind(mounts: str, device: str) -> str | None:
    """The type of the file system `device` in the text of a mountinfo, if it is one of the network."""
    for line in mounts.splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2:3] == [device] and file_system:
            kind = file_system.split()[0]
            return kind if kind in _NETWORK or kind.startswith("fuse.") else None
    return None


# -- taking and waiting ------------------------------------------------------------------------------------------------


@contextmanager
def _one_of(paths: Sequence[Path], waiting: Waiting, every: float, patience: float) -> Iterator[bool]:
    taken = _wait(list(paths), waiting, every, patience)
    if taken is None:
        yield False
        return
    descriptor, path = taken
    owner = os.getpid()
    try:
        yield True
    finally:
        if os.getpid() == owner:  # a forked child that leaves this block has nothing to release
            _release(descriptor, path)


def _wait(paths: list[Path], waiting: Waiting, every: float, patience: float) -> tuple[int, Path] | None:
    """The first of the lock files that is free; None if none can be locked or that takes too long."""
    started = told = time.monotonic()
    pause = _FIRST_PAUSE
    faults = 0
    while paths:
        for path in tuple(paths):
            try:
                descriptor = _take(path)
            except OSError as error:
                faults += 1
                if error.errno not in _ONCE_MORE or faults > _TRIES:
                    paths.remove(path)
                    if error.errno != errno.EROFS:  # what nobody writes needs no locks
                        _warn_once(
                            path.parent,
                            f"no locks in {path.parent} ({path.name}: {error.strerror or error}): going on without; "
                            "several processes may do the same work",
                        )
                continue
            if descriptor is not None:
                return descriptor, path
        now = time.monotonic()
        if paths and now - started >= patience:
            log.warning("%s is held by %s for %.0f s: going on without", paths[0], _holder(paths[0]), now - started)
            break
        if paths and now - told >= every:
            told = now
            waiting(_holder(paths[0]), now - started)
        time.sleep(min(pause, every))
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return None


def _take(path: Path) -> int | None:
    """Open and lock a lock file; None if somebody else holds it, an `OSError` if it cannot be one."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    _open_locks.add(descriptor)
    mine = False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        # The holder removes the file when it is done; a lock on a removed file excludes nobody.
        mine = try_lock(descriptor) and _is_at(descriptor, path)
        if mine:
            _sign(descriptor)
    finally:
        if not mine:
            _close(descriptor)
    return descriptor if mine else None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    except OSError:  # such as a full disk
        log.debug("cannot write the holder's name into a lock file", exc_info=True)


def _holder(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(200).decode(errors="replace") or "another process"
    except OSError:
        return "another process"


def _release(descriptor: int, path: Path) -> None:
    try:
        os.unlink(path)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        # CIFS refuses to unlock at times; closing releases it in any case.
        log.debug("releasing %s: %s", path, error)
    finally:
        _close(descriptor)


def _close(descriptor: int) -> None:
    _open_locks.discard(descriptor)
    os.close(descriptor)


def _teller(what: str) -> Waiting:
    return lambda holder, seconds: log.warning("waiting for %s, held by %s: %.0f s", what, holder, seconds)


def _warn_once(directory: Path, sentence: str) -> None:
    if directory not in _warned:
        _warned.add(directory)
        log.warning("%s", sentence)
