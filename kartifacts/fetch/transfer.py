"""Moves verified bytes from the sources into the store: one reader a range, the next source after a fault."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import IO, TypeVar

from kartifacts.config import Settings
from kartifacts.errors import ArtifactUnavailable, Refusal, SourceError, StoreError, VerificationError
from kartifacts.fetch.plan import Part, Range, coalesce
from kartifacts.fetch.unpack import WrongPacking, compressed, unpack
from kartifacts.model.digest import Digest, parse_digest, sha256
from kartifacts.model.manifest import Descriptor, KernelEntry
from kartifacts.sources import Pieces, Source
from kartifacts.sources.breaker import PATIENCE
from kartifacts.sources.turns import first_good
from kartifacts.store import Store

log = logging.getLogger(__name__)

_IN_MEMORY = 2 << 20  # a compressed block larger than this goes through the disk

_T = TypeVar("_T")


@dataclass
class Stats:
    """What was read from sources so far."""

    requests: int = 0  # reads that a source began to answer
    bytes: int = 0  # that came, wanted or not
    blobs: int = 0  # indexes, manifests and tables
    kernels: int = 0  # written to the store
    kernel_bytes: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **amounts: int) -> None:
        with self._guard:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


class Transfer:
    """Reads blobs and ranges from `sources` in order, under locks of `store`."""

    def __init__(self, store: Store, sources: Sequence[Source], settings: Settings) -> None:
        self._store = store
        self._sources = sources
        self._settings = settings
        self.stats = Stats()
        self.origins: dict[str, str] = {}  # sha256 of a kernel → the source that gave it
        self.wrong_in_place: dict[str, VerificationError] = {}  # the same → a loose file that has other bytes

    # -- small blobs -------------------------------------------------------------------------------------------------

    def blob(self, digest: Digest, size: int, *, what: str) -> bytes:
        """A blob in memory: from a directory, the store, or a mirror, in which case the store keeps it."""
        label = f"{what} {digest[:12]}"
        refusals: list[Refusal] = []
        directories = [source for source in self._sources if not source.mirror]
        mirrors = [source for source in self._sources if source.mirror]

        def attempt(source: Source) -> bytes:
            return self._read_blob(source, digest, size)

        wrong: list[VerificationError] = []
        found = self._first_good(directories, attempt, label, refusals, wrong)
        if found is not None:
            return found
        kept = self._store.read(digest, size)
        if kept is None and mirrors:
            with self._store.slot(self._settings.download_threads), self._store.lock(f"blob-{digest[:32]}"):
                kept = self._store.read(digest, size)
                if kept is None:
                    kept = self._first_good(mirrors, attempt, label, refusals, wrong)
                    self._keep(digest, kept)
        if kept is None:
            raise self._nowhere(label, refusals, wrong)
        return kept

    def _read_blob(self, source: Source, digest: Digest, size: int) -> bytes:
        with source.read(digest, size) as pieces:
            self.stats.add(requests=1)
            content = b"".join(pieces)
            place = pieces.place
        self.stats.add(bytes=len(content), blobs=1)
        if len(content) != size or sha256(content) != digest:
            raise wrong_bytes(place, size, digest, len(content), sha256(content))
        return content

    def _keep(self, digest: Digest, content: bytes | None) -> None:
        if content is None:
            return
        try:
            self._store.put(digest, content)
        except StoreError as error:  # it is asked for again next time; what needs the store itself will say so
            log.warning("%s", error.message)

    # -- ranges of packs ---------------------------------------------------------------------------------------------

    def range(self, wanted: Range, progress: Callable[[int], object], *, patient: bool = True) -> None:
        """Bring the kernels of a range into the store, each block by the one process that holds its lock.

        Args:
            patient: ask again after faults and pauses; else each source is asked once.
        """
        if not any(not source.local or source.blob(wanted.pack.sha256, wanted.pack.size) for source in self._sources):
            # Nothing will come, and so nothing need be locked.
            self._pending(wanted.pack, {part.block.offset: part for part in wanted.parts}, progress, patient)
        with ExitStack() as held:
            if not all(source.local for source in self._sources):
                held.enter_context(self._store.slot(self._settings.download_threads))
            # In one order everywhere, so that no two processes wait for each other.
            for name in sorted({f"block-{parse_digest(part.block.sha256)[:32]}" for part in wanted.parts}):
                held.enter_context(self._store.lock(name))
            pending = {part.block.offset: part for part in self._still_missing(wanted.parts)}
            progress(wanted.wanted - sum(part.block.length for part in pending.values()))
            if pending:
                self._pending(wanted.pack, pending, progress, patient)

    def _still_missing(self, parts: Sequence[Part]) -> Iterator[Part]:
        """What another process did not bring while this one waited."""
        for part in parts:
            if not self._holds(part.kernels[0]):  # then nobody was here who wants the same
                yield part
            elif kernels := tuple(entry for entry in part.kernels if not self._holds(entry)):
                yield replace(part, kernels=kernels)

    def _holds(self, entry: KernelEntry) -> bool:
        return self._store.holds(entry.digest, entry.size, entry.suffix)

    def _pending(
        self, pack: Descriptor, pending: dict[int, Part], progress: Callable[[int], object], patient: bool
    ) -> None:
        def attempt(source: Source) -> bool:
            with closing(self._blocks(source, pack, list(pending.values()))) as blocks:
                for part, content in blocks:
                    unpack(content, part, self._store, what=f"a block of pack {pack.sha256[:12]}")
                    del pending[part.block.offset]
                    self._arrived(source, part.kernels)
                    progress(part.block.length)
            return True

        kernels = [entry.uri for part in pending.values() for entry in part.kernels]
        label = f"{', '.join(kernels[:3])}{f' and {len(kernels) - 3} more' if len(kernels) > 3 else ''}"
        wrong = [
            self.wrong_in_place[entry.sha256]
            for part in pending.values()
            for entry in part.kernels
            if entry.sha256 in self.wrong_in_place
        ]
        refusals = [Refusal(error.source, error.message) for error in wrong]
        named = f"{label} (pack {pack.sha256[:12]})"
        if self._first_good(self._sources, attempt, named, refusals, wrong, patient=patient) is None:
            raise self._nowhere(f"{label} in pack {pack.sha256}", refusals, wrong)

    def _blocks(
        self, source: Source, pack: Descriptor, parts: list[Part]
    ) -> Generator[tuple[Part, bytearray | IO[bytes]], None, None]:
        """Read the blocks in as few ranges as possible; each is checked before it is given out."""
        for row in coalesce(pack, [part for part in parts if part.block.length <= _IN_MEMORY]):
            whole = row.start == 0 and row.length == pack.size
            with source.read(pack.sha256, pack.size, start=row.start, length=None if whole else row.length) as pieces:
                self.stats.add(requests=1)
                stream = _Stream(pieces)
                try:
                    at = row.start
                    for part in row.parts:
                        stream.skip(part.block.offset - at)
                        at = part.end
                        with compressed.spend(part.block.length):
                            yield part, self._in_memory(stream, part)
                finally:
                    self.stats.add(bytes=stream.given)
        for part in parts:
            if part.block.length > _IN_MEMORY:
                yield from self._on_disk(source, pack, part)

    def _in_memory(self, stream: _Stream, part: Part) -> bytearray:
        content = bytearray()
        while len(content) < part.block.length:
            content += stream.take(part.block.length - len(content))
        _check(hashlib.sha256(content), part, stream.place)
        return content

    def _on_disk(self, source: Source, pack: Descriptor, part: Part) -> Generator[tuple[Part, IO[bytes]], None, None]:
        """One large block; what an earlier try or process got of it is not read again."""
        length = part.block.length
        with self._store.partial(parse_digest(part.block.sha256), length) as partial:
            digest, there = partial.hashed()
            place = "what was kept of it"
            if there < length:
                whole = there == 0 and length == pack.size
                start, rest = part.block.offset + there, None if whole else length - there
                with source.read(pack.sha256, pack.size, start=start, length=rest) as pieces:
                    self.stats.add(requests=1)
                    stream, place = _Stream(pieces), pieces.place
                    try:
                        while there < length:
                            piece = stream.take(length - there)
                            digest.update(piece)
                            partial.write(piece)
                            there += len(piece)
                    finally:
                        self.stats.add(bytes=stream.given)
            try:
                _check(digest, part, place)
                yield part, partial.file
            finally:
                partial.drop()  # good or not, nobody continues it

    def _arrived(self, source: Source, kernels: Sequence[KernelEntry]) -> None:
        self.stats.add(kernels=len(kernels), kernel_bytes=sum(entry.size for entry in kernels))
        for entry in kernels:
            self.origins[entry.sha256] = source.name

    # -- one source after the other ----------------------------------------------------------------------------------

    def _first_good(
        self,
        sources: Sequence[Source],
        attempt: Callable[[Source], _T],
        label: str,
        refusals: list[Refusal],
        wrong: list[VerificationError],
        *,
        patient: bool = True,
    ) -> _T | None:
        """What the first source that can do it gives; None if none can, with the reasons in `refusals` and `wrong`."""

        def refused(source: Source, error: SourceError | VerificationError) -> None:
            if isinstance(error, VerificationError):
                wrong.append(error)
            refusal = Refusal(source.name, f"{error.message} ({error.hint})" if error.hint else error.message)
            if refusal not in refusals:  # the same fault again, in another turn
                refusals.append(refusal)

        return first_good(
            sources,
            attempt,
            label=label,
            retries=self._settings.retries if patient else 0,
            patience=PATIENCE if patient else 0.0,
            refused=refused,
            final=(WrongPacking,),
        )

    def _nowhere(
        self, label: str, refusals: list[Refusal], wrong: list[VerificationError]
    ) -> VerificationError | ArtifactUnavailable:
        places = [*refusals, Refusal(f"store {self._store.root}", "does not hold it")]
        if self._settings.offline and self._settings.mirrors:
            places.append(Refusal("mirrors", "not asked: KARTIFACTS_OFFLINE is set"))
        elif not self._settings.mirrors:
            places.append(Refusal("mirrors", "none is set"))
        if wrong:
            listed = "\n".join(f"  {place}" for place in places)
            return VerificationError(
                f"{label}: no source has the right bytes\n{listed}",
                source=wrong[-1].source,
                expected=wrong[-1].expected,
                actual=wrong[-1].actual,
                hint="no wrong byte was installed; "
                + (
                    "the mirror's owner should compare these files with the release"
                    if any(source.mirror for source in self._sources)
                    else "copy that directory anew, or install the wheel again: pip install --force-reinstall --no-deps"
                ),
            )
        hint = (
            "run `kartifacts fetch` where there is a network, or name a directory that holds it in KARTIFACTS_PATH"
            if self._settings.offline
            else "name a mirror in KARTIFACTS_MIRRORS, or a directory that holds it in KARTIFACTS_PATH"
            if not self._settings.mirrors
            else "see that the mirrors in KARTIFACTS_MIRRORS hold the whole release"
        )
        return ArtifactUnavailable(f"{label} is not available", refusals=tuple(places), hint=hint)


class _Stream:
    """Pieces of any size, taken in pieces of the size that is wanted."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self.given = 0

    @property
    def place(self) -> str:
        return self._pieces.place

    def take(self, limit: int) -> memoryview:
        """At most `limit` bytes, at least one."""
        while not self._rest:
            try:
                self._rest = memoryview(next(self._pieces))
            except StopIteration:
                raise SourceError(f"{self.place} ended early") from None
            self.given += len(self._rest)
        piece, self._rest = self._rest[:limit], self._rest[limit:]
        return piece

    def skip(self, amount: int) -> None:
        while amount:
            amount -= len(self.take(amount))


def _check(digest: hashlib._Hash, part: Part, place: str) -> None:
    length = part.block.length
    if digest.hexdigest() != parse_digest(part.block.sha256):
        where = f"{place}, bytes {part.block.offset}-{part.end - 1}"
        raise wrong_bytes(where, length, part.block.sha256, length, digest.hexdigest())


def wrong_bytes(place: str, size: int, digest: str, got: int, actual: str) -> VerificationError:
    return VerificationError(
        f"{place} gave {got} bytes with sha256 {actual}, expected {size} bytes with sha256 {digest}",
        source=place,
        expected=digest,
        actual=actual,
    )
