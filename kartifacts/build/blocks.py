"""Files become blocks: runs of files that are alike, each compressed in a thread as one solid zstd frame.

Memory is bounded by what is in flight, and a file that is not what it was when it was planned is an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kartifacts.errors import ConfigError, StoreError, VerificationError
from kartifacts.model.digest import Digest
from kartifacts.model.layout import check_path
from kartifacts.model.manifest import MAX_BLOCK_RAW

BLOCK_BYTES = 16 << 20  # raw; docs/adr/0010 has the curve
BLOCK_LENGTH = 1 << 20  # compressed: one kernel costs its block, so what compresses badly gets smaller ones
_WINDOW_LOG = 24  # a block; one large kernel would gain little by more, and every reader would pay in memory
_SAMPLED = 8  # groups that an order is judged by
_WORDS = re.compile(r"[A-Z]?[a-z]+\d*|[A-Z]+\d*|\d+")
_IN_FLIGHT = 64 << 20  # raw bytes handed to threads at once; a larger block goes alone
_PIECE = 1 << 20


@dataclass(frozen=True)
class PackInput:
    """One file to publish, and what its entry in the kernel table says."""

    uri: str
    path: Path
    suffix: str = ""
    key: str = ""
    op_digest: str = ""
    exports: Sequence[str] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    sha256: str = ""  # what the content must be, if the caller knows


@dataclass(frozen=True)
class Planned:
    entry: PackInput
    status: os.stat_result

    @property
    def size(self) -> int:
        return self.status.st_size


@dataclass(frozen=True)
class Frame:
    """One compressed block, not yet in a pack."""

    content: IO[bytes]
    length: int
    sha256: Digest
    size: int
    kernels: list[tuple[PackInput, int, Digest]]  # with size and digest


def plan(entries: Iterable[PackInput]) -> list[Planned]:
    """The entries sorted by uri, with the size and identity that each file has now."""
    planned: list[Planned] = []
    for entry in sorted(entries, key=lambda entry: entry.uri):
        check_path(entry.uri.partition("?")[0], what="a uri")
        if planned and planned[-1].entry.uri == entry.uri:
            raise ConfigError(
                f"two files want the name {entry.uri!r}: {str(planned[-1].entry.path)!r} and {str(entry.path)!r}"
            )
        try:
            status = os.stat(entry.path)
        except OSError as error:
            raise _unreadable(entry.path, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{str(entry.path)!r} is not a regular file")
        if status.st_size > MAX_BLOCK_RAW:
            raise ConfigError(f"{str(entry.path)!r} has {status.st_size} bytes; at most {MAX_BLOCK_RAW} are published")
        planned.append(Planned(entry, status))
    if not planned:
        raise ConfigError("a bundle needs at least one kernel, got none")
    return planned


def arranged(planned: Sequence[Planned], block_bytes: int) -> Sequence[Planned]:
    """The order that compresses best; which it is depends on how a library names its kernels.

    On real cubins the second saves a third of the bytes of the first, and where names are hashes only the third finds
    anything; see docs/adr/0010.
    """
    return min(orders(planned), key=lambda order: _sampled(order, block_bytes))


def orders(planned: Sequence[Planned]) -> tuple[Sequence[Planned], ...]:
    """By name, by the words of the name from the last to the first, and by size."""
    backwards = sorted(planned, key=lambda kernel: (_WORDS.findall(kernel.entry.uri)[::-1], kernel.entry.uri))
    by_size = sorted(planned, key=lambda kernel: (kernel.size, kernel.entry.uri))
    return planned, backwards, by_size


def _sampled(order: Sequence[Planned], block_bytes: int) -> float:
    """What is left of a part of the groups of this order by quick compression."""
    groups = [group for group in grouped(order, block_bytes) if len(group) > 1]  # else it has no neighbours
    before = after = 0
    for group in groups[:: max(1, len(groups) // _SAMPLED)]:
        size = sum(kernel.size for kernel in group)
        before += size
        after += sum(map(len, _stream(group, size, 1, [])))
    return after / before if before else 0.0


def grouped(planned: Iterable[Planned], block_bytes: int) -> Iterator[list[Planned]]:
    block: list[Planned] = []
    size = 0
    for kernel in planned:
        if block and size + kernel.size > block_bytes:
            yield block
            block, size = [], 0
        block.append(kernel)
        size += kernel.size
    if block:
        yield block


def compressed(
    groups: Iterable[list[Planned]], level: int, jobs: int, scratch: Path, *, block_length: int = BLOCK_LENGTH
) -> Generator[Frame, None, None]:
    """Compress in threads, hand over in order; memory is bounded by what is in flight.

    A group whose frame is longer than `block_length` becomes several.
    """
    waiting: deque[tuple[int, Future[list[Frame]]]] = deque()
    with ThreadPoolExecutor(jobs, thread_name_prefix="pack") as pool:
        try:
            for group in groups:
                size = sum(kernel.size for kernel in group)
                while waiting and sum(size for size, _ in waiting) + size > _IN_FLIGHT:
                    yield from waiting.popleft()[1].result()
                waiting.append((size, pool.submit(_frames, group, level, scratch, block_length)))
            while waiting:
                yield from waiting.popleft()[1].result()
        finally:
            for _, future in waiting:
                if not future.cancel() and future.exception() is None:
                    for frame in future.result():
                        frame.content.close()


def _frames(group: list[Planned], level: int, scratch: Path, block_length: int) -> list[Frame]:
    size = sum(kernel.size for kernel in group)
    frame = _compress(group, size, level, scratch)
    if frame.length <= block_length or len(group) == 1:
        return [frame]
    frame.content.close()
    frames: list[Frame] = []
    try:
        # A window that is smaller compresses less, hence the one part more.
        parts = grouped(group, size // (frame.length // block_length + 1))
        frames.extend(_compress(part, sum(kernel.size for kernel in part), level, scratch) for part in parts)
    except BaseException:
        for frame in frames:
            frame.content.close()
        raise
    return frames


def _compress(block: list[Planned], size: int, level: int, scratch: Path) -> Frame:
    content = tempfile.SpooledTemporaryFile(16 << 20, dir=str(scratch))  # noqa: SIM115  closed by whoever packs it
    try:
        hashed = hashlib.sha256()
        kernels: list[tuple[PackInput, int, Digest]] = []
        for piece in _stream(block, size, level, kernels):
            content.write(piece)
            hashed.update(piece)
        length = content.tell()
        content.seek(0)
        return Frame(content, length, Digest(hashed.hexdigest()), size, kernels)
    except BaseException:
        content.close()
        raise


def _stream(
    block: list[Planned], size: int, level: int, kernels: list[tuple[PackInput, int, Digest]]
) -> Iterator[bytes]:
    """The pieces of one frame; notes in `kernels` what went in."""
    import zstandard

    # The window covers the whole block where readers allow it; zstd's own choice would be 2 to 8 MiB.
    window = min(_WINDOW_LOG, max(10, size.bit_length()))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=max(size, 1), window_log=window, write_content_size=True, write_checksum=False
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=size)
    made: list[bytes] = []
    for kernel in block:
        digest = read(kernel, lambda piece: made.append(stream.compress(piece)))
        kernels.append((kernel.entry, kernel.size, digest))
        yield from made
        made.clear()
    yield stream.flush()


def read(kernel: Planned, consume: Callable[[bytes], None]) -> Digest:
    """Pass the content on, and make sure that it is the one that was planned."""
    path, hashed, read = kernel.entry.path, hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            while read <= kernel.size and (piece := file.read(_PIECE)):
                hashed.update(piece)
                read += len(piece)
                if read <= kernel.size:
                    consume(piece)
            now = os.fstat(file.fileno())
    except OSError as error:
        raise _unreadable(path, error) from error
    if read != kernel.size or _version(now) != _version(kernel.status):
        raise VerificationError(
            f"{str(path)!r} changed while it was packed",
            source=str(path),
            hint="pack again once nothing writes to it any more",
        )
    digest = Digest(hashed.hexdigest())
    if kernel.entry.sha256 and kernel.entry.sha256 != digest:
        raise VerificationError(
            f"{str(path)!r} is not what was promised: expected sha256 {kernel.entry.sha256}, got {digest}",
            source=str(path),
            expected=kernel.entry.sha256,
            actual=digest,
        )
    return digest


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot read {str(path)!r}: {error.strerror or error}")
