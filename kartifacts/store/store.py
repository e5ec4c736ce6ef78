"""The store: looks entries up without writing, takes new ones in, and keeps itself in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path

from kartifacts.errors import StoreError
from kartifacts.files import locking
from kartifacts.files.faults import free_bytes, once_more, store_error, storing
from kartifacts.files.trust import check_own_directory, check_trusted, make_directory, unfit
from kartifacts.model.digest import Digest, sha256
from kartifacts.store import upkeep
from kartifacts.store.writing import Batch, Partial, Writer

log = logging.getLogger(__name__)

_PRIVATE, _SHARED = 0o700, 0o755


class Store:
    """The content-addressed store under `root`, which need not exist yet.

    Trusted means: no component of its path can be changed by another user.  An entry found there was checked when it
    was written, so a look-up costs one `lstat`; `verify` reads everything again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._base = root / "v1"
        self._entries = str(self._base / "sha256")
        self._trusted = False
        self._made: set[Path] = set()
        self._filled: set[str] = set()  # directories of entries, as `_made`

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def path(self, digest: Digest, suffix: str = "") -> Path:
        """Where an entry is or would be."""
        return Path(self._place(digest, suffix))

    def _place(self, digest: Digest, suffix: str) -> str:
        return f"{self._entries}/{digest[:2]}/{digest}{suffix}"

    # -- reading: writes nothing -------------------------------------------------------------------------------------

    def find(self, digest: Digest, size: int, suffix: str = "") -> Path | None:
        """The path of an entry, or None if the store does not hold it.

        Raises:
            StoreError: the store cannot be read or cannot be trusted.
        """
        return self.path(digest, suffix) if self.holds(digest, size, suffix) else None

    def holds(self, digest: Digest, size: int, suffix: str = "") -> bool:
        """Whether `find` finds an entry."""
        place = self._place(digest, suffix)
        try:
            found = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise store_error(error, "read", Path(place)) from error
        self._check()
        reason = unfit(found, size)
        if reason:
            log.warning("%s is not used: %s", place, reason)
        return not reason

    def read(self, digest: Digest, size: int) -> bytes | None:
        """The content of a small entry, its hash checked; None if the store does not hold it undamaged."""
        path = self.find(digest, size)
        if path is None:
            return None
        try:
            data = once_more(path.read_bytes)
        except FileNotFoundError:  # removed since it was found, as by a gc; it can be had again
            return None
        except OSError as error:
            raise store_error(error, "read", path) from error
        if sha256(data) == digest:
            return data
        log.warning("%s is damaged: its content has sha256 %s", path, sha256(data))
        try:
            self.quarantine(path)
        except StoreError as error:  # a read-only store keeps it; the bytes come from elsewhere
            log.warning("%s", error.message)
        return None

    def entries(self) -> Iterator[upkeep.Entry]:
        """Every entry, links and foreign files left out."""
        return upkeep.entries(self._base / "sha256")

    def holdings(self) -> upkeep.Holdings:
        """What the store holds, read in one pass: for questions about many entries, where `find` asks for one.

        Raises:
            StoreError: as `find`.
        """
        self._check()
        return upkeep.Holdings(self._base / "sha256")

    # -- writing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def writer(self, digest: Digest, size: int, suffix: str = "") -> Iterator[Writer]:
        """Write one entry; it appears when the block ends well, and else nothing does.

        Raises:
            VerificationError: the bytes written are not `size` bytes with this digest.
            StoreError: they cannot be written.
        """
        writer = self._begin(digest, size, suffix)
        try:
            yield writer
            writer.install()
        finally:
            writer.close()

    @contextmanager
    def batch(self) -> Iterator[Batch]:
        """Write many entries; all of them have appeared when the block ends well, and some may have if it does not."""
        batch = Batch(self._begin)
        try:
            yield batch
            batch.install()
        finally:
            batch.close()

    def _begin(self, digest: Digest, size: int, suffix: str) -> Writer:
        place = self._place(digest, suffix)
        directory = place[: len(self._entries) + 3]
        if directory not in self._filled:
            self._fill(directory, size)
        try:
            return Writer(place, directory, digest, size, quarantine=self.quarantine)
        except FileNotFoundError:  # somebody tidied up
            self._fill(directory, size)
        with storing("write into", Path(directory), need=size):
            return Writer(place, directory, digest, size, quarantine=self.quarantine)

    def put(self, digest: Digest, data: bytes, suffix: str = "") -> Path:
        """Write one entry from memory."""
        with self.writer(digest, len(data), suffix) as writer:
            writer.write(data)
        return writer.path

    @contextmanager
    def partial(self, digest: Digest, need: int) -> Iterator[Partial]:
        """What is here of `need` bytes with a digest; it stays if the block fails, unless the store is at fault."""
        directory = self._base / "tmp"
        self._make(directory, need=need)
        partial = Partial(f"{directory}/part-{digest}", need)
        try:
            yield partial
        except StoreError:  # a full disk, most likely
            partial.drop()
            raise
        finally:
            partial.close()

    def quarantine(self, path: Path) -> Path:
        """Move an entry away and say where to.  A process that has it mapped keeps it."""
        directory = self._base / "quarantine"
        self._make(directory)
        away = directory / f"{path.name}.{os.urandom(4).hex()}"
        with storing("move away", path):
            try:
                os.rename(path, away)
            except FileNotFoundError:
                log.debug("%s was moved away by another process", path)
        return away

    # -- locks -------------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, name: str, *, waiting: locking.Waiting | None = None) -> Iterator[bool]:
        """Hold a lock of this store; gives False where there can be none.  The kernel frees it if the holder dies.

        Args:
            name: letters, digits and ``-._``; processes that use the same name take turns.
            waiting: called every ten seconds that another process holds it; default: logs it.
        """
        directory = self._lock_directory()
        if directory is None:
            yield False
            return
        with locking.hold(directory / f"{name}.lock", waiting=waiting) as held:
            yield held

    def slot(self, count: int) -> AbstractContextManager[None]:
        """Hold one of the `count` transfers that all processes using this store may run at once."""
        return locking.slot(self._lock_directory(), count)

    def _lock_directory(self) -> Path | None:
        try:
            self._make(self._base / "locks")
        except StoreError as error:  # whoever has to write here will say so
            log.debug("no locks: %s", error.message)
            return None
        return self._elsewhere or self._base / "locks"

    @cached_property
    def _elsewhere(self) -> Path | None:
        return locking.elsewhere(self._base)

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def verify(self, progress: Callable[[int], object] | None = None) -> upkeep.VerifyReport:
        """Read every entry again; damaged ones are listed, and moved away where the store may be written.

        Args:
            progress: called with the number of bytes just read.
        """
        return upkeep.verify(self, progress)

    def gc(
        self,
        keep: AbstractSet[str],
        *,
        max_bytes: int | None = None,
        unused_for: float = 0.0,
        dry_run: bool = False,
    ) -> upkeep.GcReport:
        """Remove what is not in `keep`, the longest unused first, and what killed processes left behind.

        Args:
            keep: digests that stay, whatever their size.
            max_bytes: stop as soon as the store is no larger than this; None removes all that is not kept.
            unused_for: seconds; what was written or read since stays too.
            dry_run: only say what would be removed.
        """
        return upkeep.collect(self, keep, max_bytes=max_bytes, unused_for=unused_for, dry_run=dry_run)

    def free_bytes(self) -> int | None:
        """Bytes that may still be written; None if the file system does not say."""
        return free_bytes(self._base)

    # -- directories -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self._trusted:
            check_trusted(self._base / "sha256")
            self._trusted = True

    def _fill(self, directory: str, need: int) -> None:
        """Make a directory of entries, or see that the one there is is nobody else's."""
        self._make(self._base / "sha256", need=need)
        with storing("make", Path(directory), need=need):
            try:
                os.mkdir(directory, _SHARED)
            except FileExistsError:
                check_own_directory(directory)
        self._filled.add(directory)

    def _make(self, directory: Path, *, need: int | None = None) -> None:
        """Make a directory of the store, after the place where it will be was looked at."""
        if directory in self._made and directory.is_dir():
            return
        check_trusted(directory)
        with storing("make", directory, need=need):
            make_directory(self.root, _SHARED)
            inside = directory.relative_to(self.root)
            for step in (*reversed(inside.parents), inside):
                mode = _SHARED if step.parts[:2] in ((), ("v1",), ("v1", "sha256")) else _PRIVATE
                make_directory(self.root / step, mode)
        check_trusted(directory)
        self._made.add(directory)
