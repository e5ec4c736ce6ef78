"""Keeps a store in order: reads every entry again, removes what nobody wants, sweeps up after killed processes."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kartifacts.errors import StoreError
from kartifacts.model.digest import Digest
from kartifacts.store import locking
from kartifacts.store.faults import storing
from kartifacts.store.writing import TEMPORARY_PREFIX, unfit

if TYPE_CHECKING:
    from kartifacts.store.store import Entry, Store

log = logging.getLogger(__name__)

_ABANDONED_SECONDS = 3600.0  # no write of one entry takes that long without a byte
_PIECE = 1 << 20


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

    removed: tuple[Path, ...]
    freed: int
    kept: int
    kept_bytes: int


def files_below(directory: Path) -> Iterator[Path]:
    """Every file in the sub-directories of `directory`, in a fixed order; follows no link."""
    try:
        with os.scandir(directory) as found:
            below = sorted(item.path for item in found if item.is_dir(follow_symlinks=False))
        for step in below:
            with os.scandir(step) as found:
                yield from sorted(Path(item.path) for item in found if not item.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot list {str(directory)!r}: {error.strerror}") from error


def verify(store: Store, progress: Callable[[int], object] | None) -> VerifyReport:
    entries = size = 0
    damaged: list[Damage] = []
    for entry in store.entries():
        reason = _damage(entry, progress or (lambda _: None))
        entries += 1
        size += entry.size
        if reason:
            damaged.append(Damage(entry.path, reason, _move_away(store, entry.path)))
    return VerifyReport(entries, size, tuple(damaged))


def _damage(entry: Entry, progress: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    try:
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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


def _move_away(store: Store, path: Path) -> Path | None:
    try:
        return store.quarantine(path)
    except StoreError as error:
        log.warning("%s stays where it is: %s", path, error.message)
        return None


def collect(store: Store, keep: AbstractSet[Digest], *, max_bytes: int | None, dry_run: bool) -> GcReport:
    entries = list(store.entries())
    total = sum(entry.size for entry in entries)
    removed: list[Path] = []
    freed = 0
    for entry in sorted((entry for entry in entries if entry.digest not in keep), key=_last_used):
        if max_bytes is not None and total - freed <= max_bytes:
            break
        removed.append(entry.path)
        freed += entry.size
    kept = len(entries) - len(removed)
    kept_bytes = total - freed
    for path, size in _litter(store):
        removed.append(path)
        freed += size
    if not dry_run:
        for path in removed:
            with storing("remove", path):
                path.unlink(missing_ok=True)
    return GcReport(tuple(removed), freed, kept, kept_bytes)


def _last_used(entry: Entry) -> float:
    try:
        found = os.lstat(entry.path)
    except FileNotFoundError:
        return 0.0
    return max(found.st_atime, found.st_mtime)


def _litter(store: Store) -> Iterator[tuple[Path, int]]:
    """Temporary files and locks of processes that are gone, and what was quarantined."""
    base = store.root / "v1"
    abandoned = time.time() - _ABANDONED_SECONDS
    for path in files_below(base / "sha256"):
        if path.name.startswith(TEMPORARY_PREFIX):
            yield from _older(path, abandoned)
    for path in files_below(base):
        if path.parent.name in ("tmp", "quarantine") or (path.parent.name == "locks" and not locking.is_held(path)):
            yield from _older(path, abandoned)


def _older(path: Path, limit: float) -> Iterator[tuple[Path, int]]:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if found.st_mtime < limit:
        yield path, found.st_size
