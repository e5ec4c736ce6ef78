"""Decompresses verified blocks, never past what was declared, and cuts kernels out of them."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from kartifacts.errors import StoreError, VerificationError
from kartifacts.fetch.plan import Part
from kartifacts.files.reading import read_regular
from kartifacts.model.frames import MAX_WINDOW
from kartifacts.model.manifest import MAX_DELTA_BASE, KernelEntry
from kartifacts.store import Batch, Store

if TYPE_CHECKING:
    import zstandard

WHOLE = 16 << 20  # bytes of a block up to which it is decompressed in one piece, as its publisher packs them
_PIECE = 256 << 10
_HEAD = 18  # bytes of a frame's header at most
# Bytes that all threads of this process decompress into at once.  A block more than there are cores would only make
# threads wait for each other; four is what fits beside the rest into 150 MB.
_BUDGET = min(4, len(os.sched_getaffinity(0))) * WHOLE


class WrongPacking(VerificationError):
    """A blob is what was pinned, yet does not hold what its table says: no other source can do better."""


class _Memory:
    """Lets work through as long as its sizes add up to less than the budget; something larger goes alone.

    Buffers are lent again: a new one would cost as much time in page faults as the bytes that are put into it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._changed = threading.Condition()
        self._buffers: list[mmap.mmap] = []

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

    @contextmanager
    def buffer(self, size: int) -> Iterator[memoryview]:
        """`size` bytes to write into, at most `WHOLE`."""
        with self.spend(WHOLE):
            with self._changed:
                lent = self._buffers.pop() if self._buffers else _new_buffer()
            try:
                with memoryview(lent) as whole, whole[:size] as view:
                    yield view
            finally:
                with self._changed:
                    self._buffers.append(lent)


def _new_buffer() -> mmap.mmap:
    try:
        return mmap.mmap(-1, WHOLE)
    except OSError as error:
        raise StoreError(
            f"no memory to decompress a block of {WHOLE} bytes: {error.strerror}",
            hint="see ulimit -v and the memory limit of this container",
        ) from error


_memory = _Memory(_BUDGET)
compressed = _Memory(24 << 20)  # for blocks that wait to be decompressed, however many threads read them


def unpack(packed: bytes | bytearray | IO[bytes], part: Part, store: Store, *, what: str) -> None:
    """Write the wanted kernels of one block into the store, each under its own digest and size."""
    base = None if part.base is None else read_regular(part.base, MAX_DELTA_BASE)
    if part.block.size <= WHOLE and isinstance(packed, (bytes, bytearray)):
        with _memory.buffer(part.block.size) as content, store.batch() as batch:
            _fill(content, packed, base, what)
            for entry in part.kernels:
                try:
                    batch.put(entry.digest, content[entry.offset : entry.offset + entry.size], entry.suffix)
                except VerificationError as error:
                    raise _misplaced(entry, what, error) from error
        return
    kernels = list(part.kernels)
    with _memory.spend(_window(packed, what)), store.batch() as batch:
        while kernels:  # once, unless kernels share bytes
            if not isinstance(packed, (bytes, bytearray)):
                packed.seek(0)
            frame = _Frame(packed, base, what)
            later: list[KernelEntry] = []
            for entry in kernels:
                if entry.offset < frame.position:
                    later.append(entry)
                else:
                    _cut(frame, entry, batch)
            kernels = later


def _window(packed: bytes | bytearray | IO[bytes], what: str) -> int:
    """The memory that decompressing takes, as the head of the frame says."""
    import zstandard

    if isinstance(packed, (bytes, bytearray)):
        head = bytes(packed[:_HEAD])
    else:
        packed.seek(0)
        head = packed.read(_HEAD)
    try:
        return min(int(zstandard.get_frame_parameters(head).window_size), MAX_WINDOW)
    except zstandard.ZstdError as error:
        raise WrongPacking(f"{what} cannot be decompressed: {error}") from error


def _fill(content: memoryview, compressed: bytes | bytearray, base: bytes | None, what: str) -> None:
    """Decompress a frame into memory that is exactly as large as it was declared."""
    import zstandard

    try:
        reader = _decompressor(base).stream_reader(compressed)
        done = 0
        while done < len(content) and (more := reader.readinto(content[done:])):
            done += more
        rest = reader.read(1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise WrongPacking(f"{what} cannot be decompressed: {error}") from error
    if done < len(content) or rest:
        got = "more" if rest else f"{done}"
        raise WrongPacking(f"{what} has {got} bytes, {len(content)} were declared")


def _cut(frame: _Frame, entry: KernelEntry, batch: Batch) -> None:
    while frame.position < entry.offset:
        frame.read(min(_PIECE, entry.offset - frame.position))
    end = entry.offset + entry.size
    try:
        with batch.writer(entry.digest, entry.size, entry.suffix) as writer:
            while frame.position < end:
                writer.write(frame.read(min(_PIECE, end - frame.position)))
    except WrongPacking:
        raise
    except VerificationError as error:
        raise _misplaced(entry, frame.what, error) from error


def _misplaced(entry: KernelEntry, what: str, error: VerificationError) -> WrongPacking:
    """What is wrong with a kernel is what was packed, since its block has been verified."""
    return WrongPacking(f"{what}: {entry.uri}: {error.message}", expected=error.expected, actual=error.actual)


def _decompressor(base: bytes | None) -> zstandard.ZstdDecompressor:
    import zstandard

    given = None if base is None else zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.ZstdDecompressor(dict_data=given, max_window_size=MAX_WINDOW)


class _Frame:
    """One zstd frame, read piece by piece."""

    def __init__(self, compressed: bytes | bytearray | IO[bytes], base: bytes | None, what: str) -> None:
        import zstandard

        self._errors = zstandard.ZstdError
        self._reader = _decompressor(base).stream_reader(compressed, closefd=False)
        self.what = what
        self.position = 0

    def read(self, limit: int) -> bytes:
        """At most `limit` bytes, at least one."""
        try:
            piece = self._reader.read(limit)
        except (self._errors, MemoryError) as error:
            raise WrongPacking(f"{self.what} cannot be decompressed: {error}") from error
        if not piece:
            raise WrongPacking(f"{self.what} ends after {self.position} bytes")
        self.position += len(piece)
        return piece
