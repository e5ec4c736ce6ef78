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
import uuid
from collections.abc import Iterator
from pathlib import Path

from kartifacts.errors import StoreError

STAGING = "staging"


def usable(workspace: Path) -> Path:
    """Make the workspace if it is not there, and refuse one in which another user could plant code.

    Raises:
        StoreError: it cannot be made, or belongs to somebody else, or everybody may write to it.
    """
    with storage_errors(workspace):
        workspace.mkdir(parents=True, exist_ok=True)
        check_owner(workspace)
    return workspace


def check_owner(workspace: Path) -> None:
    """Refuse a workspace in which another user could plant code; one that is not there is fine."""
    for status in (_status(workspace, follow=False), _status(workspace, follow=True)):
        if status is None:
            return
        if status.st_uid not in (0, os.geteuid()):
            raise StoreError(
                f"the workspace {str(workspace)!r} belongs to user {status.st_uid}, not to user {os.geteuid()}",
                hint="set KARTIFACTS_WORKSPACE to a directory of your own",
            )
        if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            raise StoreError(
                f"everybody may write to the workspace {str(workspace)!r}, and code from it is run",
                hint=f"chmod o-w {workspace}",
            )


def _status(path: Path, *, follow: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return None


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
        parent.mkdir(parents=True, exist_ok=True)
        _reap(parent)
        place, lock = _claim(parent)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _claim(parent: Path) -> tuple[Path, int]:
    """A new directory, and a descriptor whose lock shows others that its owner lives."""
    while True:
        place = parent / f"{socket.gethostname()[:40]}-{os.getpid()}-{uuid.uuid4().hex}"
        place.mkdir()
        try:
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # somebody took it for abandoned before it was locked
            continue
        with contextlib.suppress(OSError):  # no locks on this file system: then nothing is ever reaped
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if place.is_dir():
            return place, lock
        os.close(lock)


def _reap(parent: Path) -> None:
    """Remove what killed builds left behind: nobody holds its lock any more."""
    for place in parent.iterdir():
        with contextlib.suppress(OSError):
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old content or the new; a `StoreError` if that cannot be done."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def share_file(source: Path, target: Path) -> None:
    """Let `target` name the content of `source`, durably, in place of whatever it named before."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    with storage_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            try:
                os.link(source, temporary)
            except OSError:  # no hard links here
                shutil.copyfile(source, temporary)
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
