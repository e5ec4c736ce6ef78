"""Files become blocks: runs of neighbours by name, each compressed in a thread as one solid zstd frame.

Memory is bounded by what is in flight, and a file that is not what it was when it was planned is an error.
"""

from __future__ import annotations

import hashlib
import os
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

_WINDOW_LOG = 26  # readers accept 27; a reader keeps a whole window in memory, and has several threads
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


def grouped(planned: Iterable[Planned], block_bytes: int) -> Iterator[list[Planned]]:
    block: list[Planned] = []
    size = 0
    for kernel in planned:
        if block and size + kernel.size > block_bytes:
            yield block
            block, size = [], 0
        block.append(kernel)
        size += kernel.size
    yield block


def compressed(blocks: Iterable[list[Planned]], level: int, jobs: int, scratch: Path) -> Generator[Frame, None, None]:
    """Compress in threads, hand over in order; memory is bounded by what is in flight."""
    waiting: deque[tuple[int, Future[Frame]]] = deque()
    with ThreadPoolExecutor(jobs, thread_name_prefix="pack") as pool:
        try:
            for block in blocks:
                size = sum(kernel.size for kernel in block)
                while waiting and sum(size for size, _ in waiting) + size > _IN_FLIGHT:
                    yield waiting.popleft()[1].result()
                waiting.append((size, pool.submit(_compress, block, size, level, scratch)))
            while waiting:
                yield waiting.popleft()[1].result()
        finally:
            for _, future in waiting:
                if not future.cancel() and future.exception() is None:
                    future.result().content.close()


def _compress(block: list[Planned], size: int, level: int, scratch: Path) -> Frame:
    import zstandard

    # The window covers the whole block where readers allow it; zstd's own choice would be 2 to 8 MiB.
    window = min(_WINDOW_LOG, max(10, size.bit_length()))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=max(size, 1), window_log=window, write_content_size=True, write_checksum=False
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=size)
    content = tempfile.SpooledTemporaryFile(16 << 20, dir=str(scratch))  # noqa: SIM115  closed by whoever packs it
    try:
        hashed = hashlib.sha256()

        def emit(piece: bytes) -> None:
            content.write(piece)
            hashed.update(piece)

        kernels = []
        for kernel in block:
            digest = _read(kernel, lambda piece: emit(stream.compress(piece)))
            kernels.append((kernel.entry, kernel.size, digest))
        emit(stream.flush())
        length = content.tell()
        content.seek(0)
        return Frame(content, length, Digest(hashed.hexdigest()), size, kernels)
    except BaseException:
        content.close()
        raise


def _read(kernel: Planned, consume: Callable[[bytes], None]) -> Digest:
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
