"""The workspace: where objects, finished kernels, logs and probes of compilers are kept, and how they get there whole.

Every file appears under its name complete: written in a private place on the same file system, then linked or renamed.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

from kartifacts.config import Settings
from kartifacts.files import locking
from kartifacts.files.faults import WORKSPACE, storing
from kartifacts.files.trust import check_trusted, make_directory

STAGING = "staging"
_ABANDONED = 86_400.0  # seconds
_PLAIN = re.compile(r"[\w./+@%=-]+", re.ASCII)


def usable(workspace: Path) -> Path:
    """Make the workspace if it is not there, and refuse one in which another user could plant code.

    Raises:
        StoreError: it cannot be made, or somebody else could put something in its place or into it.
    """
    check_owner(workspace)
    with storage_errors(workspace):
        make_directory(workspace)
    check_owner(workspace)
    return workspace


def check_owner(workspace: Path) -> None:
    """Refuse a workspace in which another user could plant code; one that is not there is fine."""
    check_trusted(workspace, setting=WORKSPACE)


def storage_errors(path: Path, doing: str = "write in") -> AbstractContextManager[None]:
    """Turn an `OSError` into a `StoreError` that says where, why, and what to do."""
    return storing(f"{doing} the workspace", path, setting=WORKSPACE)


def locks(workspace: Path) -> Path:
    """Where the locks of a workspace are; what keeps it from being made is left for the lock to say."""
    place = workspace / "locks"
    with contextlib.suppress(OSError):
        make_directory(place, 0o700)
    return locking.elsewhere(workspace) or place


@contextlib.contextmanager
def staging(workspace: Path) -> Iterator[Path]:
    """A private directory on the workspace's file system; gone afterwards, and if we are killed, at the next build."""
    parent = workspace / STAGING
    with storage_errors(workspace):
        make_directory(parent)
        _reap(parent)
        place, lock = _claim(parent)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def plainly(place: Path) -> Iterator[Path]:
    """The directory `place` under a name that every compiler can hand on to the programs that it starts.

    nvcc gives names to its parts through a shell, and in lists that it divides at commas.
    """
    if _PLAIN.fullmatch(str(place)):
        yield place
        return
    with storage_errors(place):
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        called = Path(f"/proc/{os.getpid()}/fd/{handle}")
        yield called if called.is_dir() else place
    finally:
        os.close(handle)


def apart(settings: Settings) -> Settings:
    """The settings to build with: where the disk cache is switched off, with places of this process alone.

    Nothing that was kept is found in them, and they are gone with the process.

    Raises:
        StoreError: they cannot be made.
    """
    if settings.disk_cache == "on":
        return settings
    place = _apart(settings.workspace, os.getpid())
    return dataclasses.replace(settings, workspace=place / "workspace", generated=place / "generated")


@cache
def _apart(workspace: Path, process: int) -> Path:
    held = contextlib.ExitStack()
    place = held.enter_context(staging(usable(workspace)))
    atexit.register(lambda: held.close() if os.getpid() == process else None)
    return place


def _host() -> str:
    return os.uname().nodename[:40]


def _claim(parent: Path) -> tuple[Path, int]:
    """A new directory, and a descriptor whose lock shows others that its owner lives."""
    while True:
        place = parent / f"{_host()}-{os.getpid()}-{uuid.uuid4().hex}"
        place.mkdir(0o755)
        try:
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # somebody took it for abandoned before it was locked
            continue
        try:
            if locking.try_lock(lock) and place.is_dir():
                return place, lock
        except OSError:  # no locks on this file system: it is reaped by its age
            return place, lock
        os.close(lock)


def _reap(parent: Path) -> None:
    """Remove what killed builds left behind: nobody holds its lock any more."""
    for place in parent.iterdir():
        with contextlib.suppress(OSError):
            # Across machines, and where there are no locks, only age tells; no build takes so long.
            old = time.time() - place.stat().st_mtime >= _ABANDONED
            if not old and not place.name.startswith(f"{_host()}-"):
                continue
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if _free(handle, unknown=old):
                    shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(handle)


def neighbours(own: Path) -> list[Path]:
    """The staging directories of other builds that run on this machine now; `own` is ours."""
    return [place for place in own.parent.glob(f"{_host()}-*") if place != own and _is_in_use(place)]


def _is_in_use(place: Path) -> bool:
    with contextlib.suppress(OSError):
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return not _free(handle, unknown=True)
        finally:
            os.close(handle)
    return False


def _free(handle: int, *, unknown: bool) -> bool:
    try:
        return locking.try_lock(handle)
    except OSError:
        return unknown


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old content or the new; a `StoreError` if that cannot be done."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with storage_errors(path.parent):
        make_directory(path.parent)
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
        make_directory(target.parent)
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
