"""Decompresses verified bytes, never past what was declared, and cuts kernels out of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from kartifacts.errors import VerificationError
from kartifacts.fetch.plan import Part
from kartifacts.model.digest import parse_digest
from kartifacts.model.manifest import KernelEntry
from kartifacts.store import Batch, Store

MAX_WINDOW = 1 << 27
_PIECE = 256 << 10
_BUDGET = 32 << 20  # bytes of decompression windows at once in this process


class WrongPacking(VerificationError):
    """A blob is what was pinned, yet does not hold what its table says: no other source can do better."""


class _Budget:
    """Lets work through as long as its sizes add up to less than the budget; something larger goes alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def spend(self, amount: int) -> Iterator[None]:
        amount = min(amount, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._changed:
                self._free += amount
                self._changed.notify_all()


_windows = _Budget(_BUDGET)


def decompress(compressed: bytes, size: int, *, what: str) -> bytes:
    """The one zstd frame `compressed`, which must give exactly `size` bytes."""
    content = bytearray()
    with _windows.spend(min(size, MAX_WINDOW)):
        frame = _Frame(compressed, what)
        while len(content) < size:
            content += frame.read(min(_PIECE, size - len(content)))
        frame.expect_end(size)
    return bytes(content)


def unpack(compressed: bytes | bytearray | IO[bytes], part: Part, store: Store, *, what: str) -> None:
    """Write the wanted kernels of one block into the store, each under its own digest and size."""
    kernels = list(part.kernels)
    with _windows.spend(min(part.block.size, MAX_WINDOW)), store.batch() as batch:
        while kernels:  # once, unless kernels share bytes
            if not isinstance(compressed, (bytes, bytearray)):
                compressed.seek(0)
            frame = _Frame(compressed, what)
            later: list[KernelEntry] = []
            for entry in kernels:
                if entry.offset < frame.position:
                    later.append(entry)
                else:
                    _cut(frame, entry, batch)
            kernels = later


def _cut(frame: _Frame, entry: KernelEntry, batch: Batch) -> None:
    while frame.position < entry.offset:
        frame.read(min(_PIECE, entry.offset - frame.position))
    end = entry.offset + entry.size
    try:
        with batch.writer(parse_digest(entry.sha256), entry.size, entry.suffix) as writer:
            while frame.position < end:
                writer.write(frame.read(min(_PIECE, end - frame.position)))
    except WrongPacking:
        raise
    except VerificationError as error:
        raise WrongPacking(
            f"{frame.what}: {entry.uri}: {error.message}", expected=error.expected, actual=error.actual
        ) from error


class _Frame:
    """One zstd frame, read piece by piece."""

    def __init__(self, compressed: bytes | bytearray | IO[bytes], what: str) -> None:
        import zstandard

        self._errors = zstandard.ZstdError
        self._reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(compressed, closefd=False)
        self.what = what
        self.position = 0

    def read(self, limit: int) -> bytes:
        """At most `limit` bytes, at least one."""
        piece = self._read(limit)
        if not piece:
            raise WrongPacking(f"{self.what} ends after {self.position} bytes")
        self.position += len(piece)
        return piece

    def expect_end(self, size: int) -> None:
        if self._read(1):
            raise WrongPacking(f"{self.what} has more than the {size} bytes that were declared")

    def _read(self, limit: int) -> bytes:
        try:
            return self._reader.read(limit)
        except (self._errors, MemoryError) as error:
            raise WrongPacking(f"{self.what} cannot be decompressed: {error}") from error
