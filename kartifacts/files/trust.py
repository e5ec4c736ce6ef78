"""Says whether a path can be trusted: nobody but root and this user could have put something else there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kartifacts.errors import StoreError
from kartifacts.files.faults import STORE

_MAX_LINKS = 40


def make_directory(path: Path, mode: int = 0o755) -> None:
    """Make a directory and those above it that are missing; whatever the umask, none that others may write to."""
    if not path.is_dir():
        if path != path.parent:
            make_directory(path.parent)
        try:
            path.mkdir(mode, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def check_trusted(path: Path, *, setting: str = STORE) -> None:
    """Walk every component of `path`, through symbolic links, as far as it exists.

    Args:
        setting: the variable that names another place, for the hint.

    Raises:
        StoreError: naming the component that another user owns or may write.
    """
    pending = _names(os.path.abspath(path))
    here = os.sep
    links = 0
    owners = {0, os.geteuid()}
    unmapped = _unmapped_root()
    _check(here, owners | unmapped, setting, last=not pending)
    while pending:
        name = pending.pop()
        if name == "..":
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, name)
        # Where everybody may make names, one that belongs to somebody unknown need not be root's.
        known = owners | unmapped if unmapped and not _is_open(here) else owners
        try:
            target = _check(step, known, setting, last=not pending)
        except (FileNotFoundError, NotADirectoryError):  # whoever makes something there will be told
            return
        except OSError as error:
            raise StoreError(
                f"cannot look at {step!r}, on the way to {str(path)!r}: {error.strerror}",
                hint=f"set {setting} to another directory",
            ) from error
        if target is None:
            here = step
            continue
        links += 1
        if links > _MAX_LINKS:
            raise StoreError(
                f"{str(path)!r} goes through more than {_MAX_LINKS} symbolic links",
                hint=f"set {setting} to another directory",
            )
        pending.extend(_names(target))
        if target.startswith(os.sep):
            here = os.sep


def _names(path: str) -> list[str]:
    """The components of a path, the first at the end."""
    return [name for name in reversed(path.split(os.sep)) if name not in ("", ".")]


def _unmapped_root() -> set[int]:
    """The user that root appears as in a name space of users that does not know it, as rootless containers are."""
    owner = os.lstat(os.sep).st_uid
    if owner == 0:
        return set()
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return set()
    return {owner} & {unknown}


def _is_open(directory: str) -> bool:
    return bool(os.stat(directory).st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _check(step: str, owners: set[int], setting: str, *, last: bool) -> str | None:
    """Check one component; gives the target of a link."""
    found = os.lstat(step)
    if found.st_uid not in owners:
        raise StoreError(
            f"{step!r} belongs to user {found.st_uid}: expected root or user {os.geteuid()}, who runs this process",
            hint=f"set {setting} to a directory of your own"
            + ("; another user's files are used through KARTIFACTS_PATH" if setting == STORE else ""),
        )
    if stat.S_ISLNK(found.st_mode):
        return os.readlink(step)
    if not last and not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if shared == stat.S_IWGRP and _is_private_group(found.st_gid):
        shared = 0
    # Where only owners may rename, what lies on the way is safe; but into the end of it anybody could put something.
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX and not last
    if shared and not sticky:
        raise StoreError(
            f"{step!r} may be written by other users (mode {stat.S_IMODE(found.st_mode):04o}), "
            "so what lies below it cannot be trusted",
            hint=f"chmod go-w {step}, or set {setting} to a directory that only you can write",
        )
    return None


def _is_private_group(gid: int) -> bool:
    """Whether the group is this user's own, as on systems where home directories are group-writable for that reason."""
    import grp
    import pwd

    if os.geteuid() == 0:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def check_own_directory(path: str) -> None:
    """As `check_trusted`, of a directory in one that was looked at: a single look suffices where all is well."""
    found = os.lstat(path)
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid())
    if not mine or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        check_trusted(Path(path))


def unfit(found: os.stat_result, size: int) -> str:
    """Why what was found under an entry's name is not the entry; empty if it is."""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write it (mode {stat.S_IMODE(found.st_mode):04o})"
    if found.st_size != size:
        return f"it has {found.st_size} bytes, expected {size}"
    return ""
