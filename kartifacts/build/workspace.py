"""The workspace: where objects, finished kernels, logs and probes of compilers are kept, and how they get there whole.

Every file appears under its name complete: written in a private place on the same file system, then linked or renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from kartifacts.errors import StoreError

STAGING = "staging"
_ABANDONED = 86_400.0  # seconds


def usable(workspace: Path) -> Path:
    """Make the workspace if it is not there, and refuse one in which another user could plant code.

    Raises:
        StoreError: it cannot be made, or somebody else could put something in its place or into it.
    """
    with storage_errors(workspace):
        make_folder(workspace)
        check_owner(workspace)
    return workspace


def check_owner(workspace: Path) -> None:
    """Refuse a workspace in which another user could plant code; one that is not there is fine.

    Whoever owns a directory on the way is trusted, as the path was chosen; whoever may write to one is not.
    """
    for path in dict.fromkeys((Path(os.path.abspath(workspace)), Path(os.path.realpath(workspace)))):
        for step in (path, *path.parents):
            _check_step(step, is_workspace=step == path)


def _check_step(step: Path, *, is_workspace: bool) -> None:
    status, above = _status(step), _status(step.parent)
    if status is None:
        return
    open_above = above is not None and above.st_mode & stat.S_IWOTH  # as /tmp, where anybody may have made it
    if (is_workspace or open_above) and status.st_uid not in (0, os.geteuid()):
        raise StoreError(
            f"{str(step)!r}, used as workspace, belongs to user {status.st_uid}, not to user {os.geteuid()}",
            hint="set KARTIFACTS_WORKSPACE to a directory of your own",
        )
    sticky = status.st_mode & stat.S_ISVTX and not is_workspace
    if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode) and not sticky:
        raise StoreError(
            f"everybody may write to {str(step)!r}, used as workspace, and code from it is run",
            hint=f"chmod o-w {step}",
        )


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def make_folder(path: Path) -> None:
    """Make a directory, and those above it, to which not everybody may write, whatever the umask says."""
    if not path.is_dir():
        if path != path.parent:
            make_folder(path.parent)
        path.mkdir(0o775, exist_ok=True)


@contextlib.contextmanager
def storage_errors(path: Path, doing: str = "write in") -> Iterator[None]:
    """Turn an `OSError` into a `StoreError` that says where, why and how much room there is."""
    try:
        yield
    except OSError as error:
        room = ""
        with contextlib.suppress(OSError):
            room = f"; {shutil.disk_usage(path).free >> 20} MiB are free there"
        raise StoreError(
            f"cannot {doing} the workspace {str(path)!r}: {error.strerror or error} ({error.filename}){room}",
            hint="set KARTIFACTS_WORKSPACE to a directory that can be written",
        ) from error


@contextlib.contextmanager
def staging(workspace: Path) -> Iterator[Path]:
    """A private directory on the workspace's file system; gone afterwards, and if we are killed, at the next build."""
    parent = workspace / STAGING
    with storage_errors(workspace):
        make_folder(parent)
        _reap(parent)
        place, lock = _claim(parent)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _host() -> str:
    return socket.gethostname()[:40]


def _claim(parent: Path) -> tuple[Path, int]:
    """A new directory, and a descriptor whose lock shows others that its owner lives."""
    while True:
        place = parent / f"{_host()}-{os.getpid()}-{uuid.uuid4().hex}"
        place.mkdir(0o775)
        try:
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # somebody took it for abandoned before it was locked
            continue
        try:
            if _locked(lock) and place.is_dir():
                return place, lock
        except OSError:  # no locks on this file system: then nothing is ever reaped
            return place, lock
        os.close(lock)


def _locked(handle: int) -> bool:
    """False if somebody else holds the lock; an `OSError` if there are no locks here."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _reap(parent: Path) -> None:
    """Remove what killed builds left behind: nobody holds its lock any more."""
    for place in parent.iterdir():
        with contextlib.suppress(OSError):
            # On a shared disk the lock of another machine may not be seen, but no build takes so long.
            if not place.name.startswith(f"{_host()}-") and time.time() - place.stat().st_mtime < _ABANDONED:
                continue
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if _locked(handle):
                    shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old content or the new; a `StoreError` if that cannot be done."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with storage_errors(path.parent):
        make_folder(path.parent)
        try:
            temporary.write_bytes(content)
            temporary.chmod(0o644)  # whatever the umask: code is linked and run from here
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def share_file(source: Path, target: Path) -> None:
    """Let `target` name the content of `source`, durably, in place of whatever it named before."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    with storage_errors(target.parent):
        make_folder(target.parent)
        try:
            try:
                os.link(source, temporary)
            except OSError:  # no hard links here
                shutil.copyfile(source, temporary)
            temporary.chmod(0o444)
            sync(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file or the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
