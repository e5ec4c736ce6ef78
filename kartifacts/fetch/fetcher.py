"""Gives the path of every kernel that was asked for: in place, from the store, or fetched into it; all or an error."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kartifacts.config import Settings
from kartifacts.errors import ArtifactUnavailable, KartifactsError, StoreError, VerificationError
from kartifacts.fetch.catalog import Bundle, read_release
from kartifacts.fetch.parallel import run_all
from kartifacts.fetch.plan import Range, Want, plan, shortcuts
from kartifacts.fetch.progress import bar
from kartifacts.fetch.transfer import Stats, Transfer
from kartifacts.files.trust import check_trusted
from kartifacts.model.digest import Digest, parse_digest
from kartifacts.model.manifest import Delta, KernelEntry, Pin, Release
from kartifacts.sources import Source
from kartifacts.store import Store

log = logging.getLogger(__name__)

_PIECE = 1 << 20
# Files used in place that were hashed by this process, by what would be different had they changed since.
_hashed: set[tuple[str, str, int, int, int, int]] = set()


class Fetcher:
    """Turns pins into kernels on disk.

    Args:
        store: where fetched kernels and metadata are kept.
        sources: where they come from, in order; see `kartifacts.sources.from_settings`.
        settings: threads, tries, offline.
    """

    def __init__(self, store: Store, sources: Sequence[Source], settings: Settings) -> None:
        self.store = store
        self.sources = tuple(sources)
        self.settings = settings
        self._transfer = Transfer(store, self.sources, settings)
        self._bundles: dict[str, list[Bundle]] = {}  # what was read once; never shared by two stores

    @property
    def stats(self) -> Stats:
        """What was read from sources so far."""
        return self._transfer.stats

    @property
    def wrong_in_place(self) -> dict[str, VerificationError]:
        """Loose files of local sources that `find` met with other bytes than were pinned, by the sha256 of those."""
        return self._transfer.wrong_in_place

    def release(self, pin: Pin) -> Release:
        """The release index that a pin names.

        Raises:
            ArtifactUnavailable: no place holds it; the error lists them all.
            VerificationError: the only ones that do hold other bytes, or it is malformed.
        """
        return read_release(pin, self._transfer)

    def bundles(self, pin: Pin) -> list[Bundle]:
        """The bundles of a release; choose by their descriptors' notes before touching manifest or table."""
        if pin.sha256 not in self._bundles:
            self._bundles[pin.sha256] = [Bundle(pin, each, self._transfer) for each in self.release(pin).manifests]
        return self._bundles[pin.sha256]

    def blob(self, digest: Digest, size: int, *, what: str) -> bytes:
        """An index, manifest or table as it is published; raises as `release`."""
        return self._transfer.blob(digest, size, what=what)

    def ensure(
        self,
        bundle: Bundle,
        entries: Iterable[KernelEntry],
        *,
        progress: Callable[[int], object] | None = None,
    ) -> dict[str, Path]:
        """Have every entry as a verified file on this machine; gives uri → path.

        Args:
            bundle: the bundle whose table lists the entries.
            entries: entries of ``bundle.table.kernels``.
            progress: called, from several threads, with numbers of bytes that add up to `missing_bytes`; without it
                a bar is shown as ``KARTIFACTS_PROGRESS`` says.

        Raises:
            ArtifactUnavailable: something is in no place; everything else that was asked for has been fetched.
            VerificationError: a place holds other bytes, and none the right ones.
            StoreError: the store cannot take them.
        """
        entries = list(entries)
        found = {
            entry.uri: path for entry in entries if (path := self._intact(entry) or self._adopt(entry)) is not None
        }
        missing = [entry for entry in entries if entry.uri not in found]
        if missing:
            self._bring([(bundle, missing)], bundle.name, progress)
            found.update((entry.uri, self._fetched(entry)) for entry in missing)
        return found

    def bring(self, wanted: Sequence[tuple[Bundle, Sequence[KernelEntry]]], what: str) -> None:
        """Have entries of many bundles, none of which `find` finds, in the store; all at once, as `ensure` has some.

        Args:
            what: stands beside the bar.
        """
        if any(source.local for source in self.sources):
            wanted = [
                (bundle, [entry for entry in entries if self._adopt(entry) is None]) for bundle, entries in wanted
            ]
        self._bring([(bundle, entries) for bundle, entries in wanted if entries], what, None)

    def open(self, bundles: Iterable[Bundle]) -> None:
        """Read the tables of bundles side by side, as far as they can be; who asks for one is told what is wrong."""
        jobs = [partial(getattr, bundle, "table") for bundle in bundles if "table" not in vars(bundle)]
        if len(jobs) > 1:
            run_all(jobs, self.settings.download_threads)

    def _bring(
        self,
        wanted: Sequence[tuple[Bundle, Sequence[KernelEntry]]],
        what: str,
        progress: Callable[[int], object] | None,
    ) -> None:
        threads = self.settings.download_threads
        wants = [Want(bundle.manifest, bundle.table, entries) for bundle, entries in wanted]
        self._warn_if_full(entry for want in wants for entry in want.entries)
        quick, rest = shortcuts(wants, self._base, threads=threads)
        ranges = plan(rest, threads=threads)
        if progress is not None:
            errors = self._run_all(wants, quick, ranges, progress)
        else:
            with bar(self.settings, sum(found.wanted for found in (*quick, *ranges)), what) as shown:
                errors = self._run_all(wants, quick, ranges, shown)
        if errors:
            raise _joined(errors)

    def _run_all(
        self, wants: Sequence[Want], quick: Sequence[Range], ranges: Sequence[Range], progress: Callable[[int], object]
    ) -> list[KartifactsError]:
        """First the short cuts, then the rest; where a short cut failed, the block, which says what is wrong."""
        failed = self._run(quick, progress, patient=False)
        for error in failed:
            log.info("%s", error.message)
        if failed:
            lacking = [Want(want.manifest, want.table, self._lacking(want.entries)) for want in wants]
            ranges = plan(lacking, threads=self.settings.download_threads)
        return self._run(ranges, progress)

    def _run(
        self, ranges: Sequence[Range], progress: Callable[[int], object], *, patient: bool = True
    ) -> list[KartifactsError]:
        jobs = [partial(self._transfer.range, wanted, progress, patient=patient) for wanted in ranges]
        return run_all(jobs, self.settings.download_threads)

    def _base(self, delta: Delta) -> Path | None:
        return self.store.find(parse_digest(delta.base), delta.base_size, delta.base_suffix)

    def _lacking(self, entries: Iterable[KernelEntry]) -> list[KernelEntry]:
        return [entry for entry in entries if not self.store.holds(entry.digest, entry.size, entry.suffix)]

    def missing_bytes(self, bundle: Bundle, entries: Iterable[KernelEntry]) -> int:
        """How many bytes `ensure` would read from sources; writes nothing."""
        missing = [entry for entry in entries if self.find(entry) is None]
        if not missing:
            return 0
        quick, rest = shortcuts([Want(bundle.manifest, bundle.table, missing)], self._base)
        return sum(found.wanted for found in (*quick, *plan(rest)))

    def _intact(self, entry: KernelEntry) -> Path | None:
        """As `find`; an entry of the store is read once more, as a process will use it, and moved away if damaged."""
        path = self.find(entry)
        if path is None or path != self.store.path(entry.digest, entry.suffix) or self._has_right_bytes(path, entry):
            return path
        try:
            self.store.quarantine(path)
        except StoreError as error:  # it stays in the way of the right bytes, and must not be taken for them
            raise self.wrong_in_place[entry.sha256] from error
        return None

    def find(self, entry: KernelEntry) -> Path | None:
        """Where an entry is on this machine without fetching: loose in a local source, or in the store."""
        for source, path in self._loose(entry):
            if (source.installed or _trusted(path)) and self._has_right_bytes(path, entry):
                self._transfer.origins[entry.sha256] = source.name
                return path
        return self.store.find(entry.digest, entry.size, entry.suffix)

    def place(self, bundle: Bundle, entry: KernelEntry) -> Path | None:
        """Where an entry can be had without a socket: as `find`, or the pack of a local source that holds it."""
        found = self.find(entry)
        if found is not None:
            return found
        pack = bundle.manifest.layers[bundle.table.blocks[entry.block].pack]
        packs = (source.blob(pack.sha256, pack.size) for source in self.sources if source.local and not source.mirror)
        return next((path for path in packs if path is not None), None)

    def origin_of(self, entry: KernelEntry) -> str:
        """The name of the source that gave an entry to this process, or ``store`` if it was there before."""
        return self._transfer.origins.get(entry.sha256, "store")

    def _loose(self, entry: KernelEntry) -> Iterator[tuple[Source, Path]]:
        digest = entry.digest
        for source in self.sources:
            path = source.loose(digest, entry.suffix) if source.local else None
            if path is not None:
                yield source, path

    def _adopt(self, entry: KernelEntry) -> Path | None:
        """Copy a loose file that other users may change into the store, checked on the way."""
        for source, path in self._loose(entry):
            if source.installed or _trusted(path):
                continue
            digest = entry.digest
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                with (
                    open(descriptor, "rb", buffering=0) as file,
                    self.store.writer(digest, entry.size, entry.suffix) as new,
                ):
                    while piece := file.read(_PIECE):
                        new.write(piece)
            except VerificationError as error:
                self._note_wrong(path, entry, error.actual)
            except OSError as error:
                log.warning("cannot read %s: %s", path, error.strerror)
            else:
                self._transfer.origins[entry.sha256] = source.name
                return new.path
        return None

    def _has_right_bytes(self, path: Path, entry: KernelEntry) -> bool:
        try:
            with open(path, "rb", buffering=0) as file:
                state = os.fstat(file.fileno())
                if state.st_size != entry.size:
                    self._note_wrong(path, entry, f"{state.st_size} bytes instead of {entry.size}")
                    return False
                if self.settings.verify == "off":
                    log.warning("%s is used unchecked: KARTIFACTS_VERIFY is off", path)
                    return True
                known = (entry.sha256, str(path), state.st_dev, state.st_ino, state.st_mtime_ns, state.st_ctime_ns)
                if known in _hashed:
                    return True
                digest = hashlib.sha256()
                while piece := file.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            log.warning("cannot read %s: %s", path, error.strerror)
            return False
        if digest.hexdigest() != entry.digest:
            self._note_wrong(path, entry, f"sha256 {digest.hexdigest()}")
            return False
        _hashed.add(known)
        return True

    def _note_wrong(self, path: Path, entry: KernelEntry, actual: str) -> None:
        error = VerificationError(
            f"{entry.uri}: {path} has {actual}, expected sha256 {entry.sha256}",
            source=str(path),
            expected=entry.sha256,
            actual=actual,
        )
        log.warning("%s", error.message)
        self._transfer.wrong_in_place[entry.sha256] = error

    def _fetched(self, entry: KernelEntry) -> Path:
        path = self.store.find(entry.digest, entry.size, entry.suffix)
        if path is None:
            raise StoreError(
                f"{entry.uri} was written to {str(self.store.root)!r} and is gone",
                hint="something else removes files there, perhaps a gc that keeps less",
            )
        return path

    def _warn_if_full(self, missing: Iterable[KernelEntry]) -> None:
        need = sum(entry.size for entry in missing)
        free = self.store.free_bytes()
        if free is not None and free < need:
            log.warning("%s needs %d bytes and %d are free", self.store.root, need, free)


def _trusted(path: Path) -> bool:
    try:
        check_trusted(path)
    except StoreError as error:
        log.debug("%s is copied before use: %s", path, error.message)
        return False
    return True


def _joined(errors: Sequence[KartifactsError]) -> KartifactsError:
    """One error for all that failed: about wrong bytes if there were any, and naming everything."""
    if len(errors) == 1:
        return errors[0]
    message = "\n".join(dict.fromkeys(error.message for error in errors))
    wrong = next((error for error in errors if isinstance(error, VerificationError)), None)
    if wrong is not None:
        return VerificationError(
            message, source=wrong.source, expected=wrong.expected, actual=wrong.actual, hint=wrong.hint
        )
    refusals = dict.fromkeys(
        refusal for error in errors if isinstance(error, ArtifactUnavailable) for refusal in error.refusals
    )
    return ArtifactUnavailable(message, refusals=tuple(refusals), hint=errors[0].hint)
