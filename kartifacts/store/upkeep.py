"""Keeps a store in order: lists it, reads every entry again, removes what nobody wants, sweeps up after the killed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kartifacts.errors import StoreError
from kartifacts.files import locking
from kartifacts.files.faults import storing
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import unfit
from kartifacts.model.digest import Digest
from kartifacts.model.layout import NOTES
from kartifacts.store.writing import TEMPORARY_PREFIX

if TYPE_CHECKING:
    from kartifacts.model.manifest import KernelEntry, Listed
    from kartifacts.store.store import Store

log = logging.getLogger(__name__)

_Sought = TypeVar("_Sought", "KernelEntry", "Listed")

_NOTE_BYTES = 64 << 10
_ABANDONED_SECONDS = 3600.0  # no write of one entry takes that long without a byte
_PIECE = 1 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NAME = re.compile(r"([0-9a-f]{64})(\.[A-Za-z0-9]{1,12})?")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Entry(NamedTuple):
    """One file of the store; a plain row, since there may be very many."""

    digest: Digest
    suffix: str
    size: int
    used: float  # when it was last written or read, as far as the mount keeps the times of reads
    place: str
    unfit: str  # why it is not used, whatever its content; empty if it is

    @property
    def path(self) -> Path:
        return Path(self.place)


class Damage(NamedTuple):
    """One entry that is not what its name says."""

    path: Path
    reason: str
    moved_to: Path | None  # None where the store cannot be written


@dataclass(frozen=True)
class VerifyReport:
    """What `Store.verify` read and what it found."""

    entries: int
    bytes: int
    damaged: tuple[Damage, ...]


@dataclass(frozen=True)
class GcReport:
    """What `Store.gc` removed, or would remove."""

    removed: tuple[str, ...]
    freed: int
    kept: int
    kept_bytes: int


class Holdings:
    """What a store held when this was made: of very many entries the names and sizes, and no object for each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.entries = self.bytes = 0
        self._sizes: dict[str, int] = {}
        owners = (0, os.geteuid())
        for step in _listed(directory):
            if step.is_dir(follow_symlinks=False):
                self._add(step, owners)

    def _add(self, directory: os.DirEntry[str], owners: tuple[int, int]) -> None:
        prefix, sizes, seen, total = directory.name, self._sizes, 0, 0  # local, for a loop of a hundred thousand
        try:
            # By a descriptor, so that each look-up begins at the directory and not at the root.
            descriptor = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"cannot list {directory.path!r}: {error.strerror}") from error
        try:
            with os.scandir(descriptor) as items:
                for item in items:
                    name = item.name
                    if name[:2] != prefix or not 64 <= len(name) <= 77:  # a digest, and a suffix at most
                        continue
                    try:
                        found = item.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed meanwhile
                        continue
                    mode = found.st_mode
                    if stat.S_ISREG(mode):
                        seen += 1
                        total += found.st_size
                        if not mode & _OTHERS_WRITE and found.st_uid in owners:  # as `unfit`
                            sizes[name] = found.st_size
        finally:
            os.close(descriptor)
        self.entries += seen
        self.bytes += total

    def lacking(self, kernels: Iterable[_Sought]) -> list[_Sought]:
        """Those of the kernels that `Store.find` would not have found."""
        size_of = self._sizes.get
        return [kernel for kernel in kernels if size_of(kernel.sha256 + kernel.suffix) != kernel.size]

    def place(self, kernel: KernelEntry) -> str | None:
        """Where a kernel is; None if it is not there."""
        name = kernel.sha256 + kernel.suffix
        return f"{self._directory}/{name[:2]}/{name}" if self._sizes.get(name) == kernel.size else None


# -- listing -----------------------------------------------------------------------------------------------------------


def entries(directory: Path) -> Iterator[Entry]:
    """Every entry below the directory ``sha256`` of a store, links and foreign files left out."""
    for place, name, found in _files_below(directory):
        named = _NAME.fullmatch(name)
        if named is not None and place[-len(name) - 3 : -len(name) - 1] == name[:2] and stat.S_ISREG(found.st_mode):
            digest, suffix = named.groups("")
            used = max(found.st_atime, found.st_mtime)
            yield Entry(Digest(digest), suffix, found.st_size, used, place, unfit(found, found.st_size))


def _files_below(directory: Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """Place, name and state of every file in the sub-directories of `directory`; follows no link."""
    for step in _listed(directory):
        if step.is_dir(follow_symlinks=False):
            for item in _listed(step):
                try:
                    found = item.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed meanwhile
                    continue
                if not stat.S_ISDIR(found.st_mode):
                    yield item.path, item.name, found


def _listed(directory: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """What is in a directory, in a fixed order; nothing if it is gone."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=attrgetter("name"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot list {os.fspath(directory)!r}: {error.strerror}") from error


# -- verify ------------------------------------------------------------------------------------------------------------


def verify(store: Store, progress: Callable[[int], object] | None) -> VerifyReport:
    count = size = 0
    damaged: list[Damage] = []
    for entry in store.entries():
        reason = _damage(entry, progress or (lambda _: None))
        count += 1
        size += entry.size
        if reason:
            damaged.append(Damage(entry.path, reason, _move_away(store, entry.path)))
    return VerifyReport(count, size, tuple(damaged))


def _damage(entry: Entry, progress: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    try:
        descriptor = _open_unnoticed(entry.place)
        with open(descriptor, "rb", buffering=0) as file:
            reason = unfit(os.fstat(descriptor), entry.size)
            while piece := file.read(_PIECE):
                digest.update(piece)
                progress(len(piece))
    except FileNotFoundError:
        return ""  # another process removed it
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return reason or ("" if digest.hexdigest() == entry.digest else f"its content has sha256 {digest.hexdigest()}")


def _open_unnoticed(place: str) -> int:
    """Open a file so that this does not count as its use, which only its owner may ask for."""
    try:
        return os.open(place, _FLAGS | os.O_NOATIME)
    except PermissionError:
        return os.open(place, _FLAGS)


def _move_away(store: Store, path: Path) -> Path | None:
    try:
        return store.quarantine(path)
    except StoreError as error:
        log.warning("%s stays where it is: %s", path, error.message)
        return None


# -- gc ----------------------------------------------------------------------------------------------------------------


def collect(
    store: Store, keep: AbstractSet[str], *, max_bytes: int | None, unused_for: float, dry_run: bool
) -> GcReport:
    total = kept = 0
    loose: list[Entry] = []
    newest = time.time() - unused_for
    for entry in store.entries():
        total += entry.size
        kept += 1
        if entry.digest not in keep and (not unused_for or entry.used < newest):
            loose.append(entry)
    removed: list[str] = []
    freed = 0
    for entry in sorted(loose, key=lambda entry: entry.used):
        if max_bytes is not None and total - freed <= max_bytes:
            break
        removed.append(entry.place)
        freed += entry.size
    kept, kept_bytes = kept - len(removed), total - freed
    for place, size in (*_litter(store.root / "v1"), *_useless_notes(store.root / NOTES, set(removed))):
        removed.append(place)
        freed += size
    if not dry_run:
        for place in removed:
            with storing("remove", Path(place)):
                _remove(place)
    return GcReport(tuple(removed), freed, kept, kept_bytes)


def _remove(place: str) -> None:
    try:
        os.unlink(place)
    except FileNotFoundError:
        log.debug("%s was removed by another process", place)


def _litter(base: Path) -> Iterator[tuple[str, int]]:
    """Temporary files and locks of processes that are gone, and what was quarantined."""
    abandoned = time.time() - _ABANDONED_SECONDS
    for place, name, found in _files_below(base / "sha256"):
        if name.startswith(TEMPORARY_PREFIX) and found.st_mtime < abandoned:
            yield place, found.st_size
    for place, _, found in _files_below(base):
        directory = os.path.basename(os.path.dirname(place))
        if found.st_mtime < abandoned and (
            directory in ("tmp", "quarantine") or (directory == "locks" and not locking.is_held(Path(place)))
        ):
            yield place, found.st_size


def _useless_notes(directory: Path, removed: AbstractSet[str]) -> Iterator[tuple[str, int]]:
    """Notes about kernels that are not there or no longer will be, and what is no note."""
    abandoned = time.time() - _ABANDONED_SECONDS
    for item in _listed(directory):
        found = item.stat(follow_symlinks=False)
        if not item.name.endswith(".json"):
            useless = found.st_mtime < abandoned
        else:
            try:
                kernel = json.loads(read_regular(item.path, _NOTE_BYTES))["path"]
                useless = kernel in removed or not os.path.exists(kernel)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                useless = True
        if useless and not stat.S_ISDIR(found.st_mode):
            yield item.path, found.st_size
