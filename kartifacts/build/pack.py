"""Kernels become a bundle: packs of solid zstd blocks, the kernel table and the manifest, each written as a blob.

A block holds the kernels of a run of names as one zstd frame, so neighbours, which differ little, cost little.  The
same kernels give the same bytes, whatever the number of threads.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kartifacts.errors import ConfigError, StoreError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import Digest
from kartifacts.model.layout import check_name, check_path
from kartifacts.model.manifest import (
    ARTIFACT_BUNDLE,
    MAX_BLOCK_RAW,
    MAX_TABLE,
    MAX_TABLE_RAW,
    MEDIA_MANIFEST,
    MEDIA_PACK,
    MEDIA_TABLE,
    NOTE,
    Block,
    BundleManifest,
    Descriptor,
    KernelEntry,
    Table,
    decode_table,
    encode,
)

BLOCK_BYTES = 8 << 20  # raw; on 1.9 GB of real cubins 4 MiB costs a quarter more, 16 MiB an eighth less
PACK_BYTES = 64 << 20
LEVEL = 9  # three times the time of 3 and an eighth smaller; 19 takes forty times longer again
_WINDOW_LOG = 27  # readers accept no more
_IN_FLIGHT = 64 << 20  # raw bytes handed to threads at once; a larger block goes alone
_PIECE = 1 << 20
_MAX_JOBS = 4

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all, both before compression."""


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
class _Planned:
    entry: PackInput
    status: os.stat_result

    @property
    def size(self) -> int:
        return self.status.st_size


@dataclass(frozen=True)
class _Frame:
    """One compressed block, not yet in a pack."""

    content: IO[bytes]
    length: int
    sha256: Digest
    size: int
    kernels: list[tuple[PackInput, int, Digest]]  # with size and digest


def pack_bundle(
    entries: Iterable[PackInput],
    out: Path,
    *,
    library: str,
    family: str,
    arch: str,
    abi: str,
    toolchain: Mapping[str, str],
    block_bytes: int = BLOCK_BYTES,
    pack_bytes: int = PACK_BYTES,
    level: int = LEVEL,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Descriptor:
    """Pack `entries` into the repository directory `out`.

    Args:
        arch: canonical arch, or ``any``.
        block_bytes: kernels share a block up to this size; a larger kernel has one of its own.
        pack_bytes: a pack is closed before it grows beyond this size.
        level: of zstd, 1 to 22.
        jobs: blocks compressed at once; default: one per core, at most 4.

    Returns:
        The descriptor of the bundle manifest, for `publish.release.make_release`.

    Raises:
        ConfigError: no entries, two of the same uri, or a name that cannot be published.
        VerificationError: a file changed while it was read, or is not what `sha256` says.
        StoreError: a file cannot be read, or `out` cannot be written.
    """
    if not 1 <= level <= 22 or block_bytes < 1 or pack_bytes < 1:
        raise ConfigError(f"bad packing parameters: level {level}, block_bytes {block_bytes}, pack_bytes {pack_bytes}")
    check_name(library, "library")
    check_name(family, "family")
    check_name(abi, "ABI")
    if arch != "any" and str(parse_arch(arch)) != arch:
        raise ConfigError(f"bad arch {arch!r}: the canonical spelling is {str(parse_arch(arch))!r}")
    planned = _planned(entries)
    total = sum(kernel.size for kernel in planned)
    with _writing(out):
        blobs = out / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        frames = _compressed(_grouped(planned, block_bytes), level, jobs or _default_jobs(), out)
        packs, blocks, kernels = _packed(frames, blobs, pack_bytes, total, progress)
        table = Table(
            version=1,
            library=library,
            family=family,
            arch=arch,
            abi=abi,
            blocks=blocks,
            kernels=kernels,
            toolchain=dict(toolchain),
        )
        return _described(table, packs, total, blobs)


def _planned(entries: Iterable[PackInput]) -> list[_Planned]:
    """The entries sorted by uri, with the size and identity that each file has now."""
    planned: list[_Planned] = []
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
        planned.append(_Planned(entry, status))
    if not planned:
        raise ConfigError("a bundle needs at least one kernel, got none")
    return planned


def _grouped(planned: Iterable[_Planned], block_bytes: int) -> Iterator[list[_Planned]]:
    block: list[_Planned] = []
    size = 0
    for kernel in planned:
        if block and size + kernel.size > block_bytes:
            yield block
            block, size = [], 0
        block.append(kernel)
        size += kernel.size
    yield block


def _default_jobs() -> int:
    return min(_MAX_JOBS, len(os.sched_getaffinity(0)))


# -- blocks ------------------------------------------------------------------------------------------------------------


def _compressed(
    blocks: Iterable[list[_Planned]], level: int, jobs: int, scratch: Path
) -> Generator[_Frame, None, None]:
    """Compress in threads, hand over in order; memory is bounded by what is in flight."""
    waiting: deque[tuple[int, Future[_Frame]]] = deque()
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


def _compress(block: list[_Planned], size: int, level: int, scratch: Path) -> _Frame:
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
        return _Frame(content, length, Digest(hashed.hexdigest()), size, kernels)
    except BaseException:
        content.close()
        raise


def _read(kernel: _Planned, consume: Callable[[bytes], None]) -> Digest:
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


# -- packs, table, manifest --------------------------------------------------------------------------------------------


class _Blob:
    """A blob being written; it has no name until its digest is known."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hashed = hashlib.sha256()
        self.size = 0
        handle, self._path = tempfile.mkstemp(prefix=".partial-", dir=directory)
        self._file = os.fdopen(handle, "wb")

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self._hashed.update(piece)
        self.size += len(piece)

    def finish(self, media_type: str, *, artifact_type: str = "", notes: dict[str, str] | None = None) -> Descriptor:
        self._file.flush()
        os.fchmod(self._file.fileno(), 0o644)
        os.fsync(self._file.fileno())
        self._file.close()
        digest = Digest(self._hashed.hexdigest())
        os.replace(self._path, self._directory / digest)
        return Descriptor(
            media_type=media_type,
            digest=f"sha256:{digest}",
            size=self.size,
            artifact_type=artifact_type,
            annotations={NOTE + name: text for name, text in (notes or {}).items() if text},
        )

    def abandon(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)


def _packed(
    frames: Generator[_Frame, None, None], blobs: Path, pack_bytes: int, total: int, progress: Progress | None
) -> tuple[list[Descriptor], list[Block], list[KernelEntry]]:
    """Put the frames one after the other into packs, and note where each kernel lies."""
    packs: list[Descriptor] = []
    blocks: list[Block] = []
    kernels: list[KernelEntry] = []
    done = 0
    pack = _Blob(blobs)
    try:
        with closing(frames):
            for frame in frames:
                with frame.content as content:
                    if pack.size and pack.size + frame.length > pack_bytes:
                        packs.append(pack.finish(MEDIA_PACK))
                        pack = _Blob(blobs)
                    kernels += _entries(frame, len(blocks))
                    blocks.append(Block(len(packs), pack.size, frame.length, frame.size, frame.sha256))
                    while piece := content.read(_PIECE):
                        pack.write(piece)
                done += frame.size
                if progress is not None:
                    progress(done, total)
        packs.append(pack.finish(MEDIA_PACK))
    finally:
        pack.abandon()
    return packs, blocks, kernels


def _entries(frame: _Frame, block: int) -> Iterator[KernelEntry]:
    offset = 0
    for entry, size, digest in frame.kernels:
        yield KernelEntry(
            uri=entry.uri,
            sha256=digest,
            size=size,
            block=block,
            offset=offset,
            suffix=entry.suffix,
            key=entry.key,
            op_digest=entry.op_digest,
            exports=list(entry.exports),
            needs=dict(entry.needs),
        )
        offset += size


def _described(table: Table, packs: list[Descriptor], total: int, blobs: Path) -> Descriptor:
    """Write the table and the manifest that points at it and at the packs."""
    import zstandard

    raw = encode(table)
    compressed = zstandard.ZstdCompressor(level=12, write_content_size=True, write_checksum=False).compress(raw)
    if len(raw) > MAX_TABLE_RAW or len(compressed) > MAX_TABLE:
        raise ConfigError(f"the kernel table of {table.family!r} for {table.arch} is too large: {len(raw)} bytes")
    notes = {
        "library": table.library,
        "family": table.family,
        "arch": table.arch,
        "abi": table.abi,
        "toolchain": " ".join(f"{name}={table.toolchain[name]}" for name in sorted(table.toolchain)),
        "raw-size": str(total),
        "kernels": str(len(table.kernels)),
    }
    bundle = BundleManifest(
        schema_version=2,
        media_type=MEDIA_MANIFEST,
        artifact_type=ARTIFACT_BUNDLE,
        config=_write(blobs, compressed, MEDIA_TABLE, notes={"raw-size": str(len(raw))}),
        layers=packs,
        annotations={NOTE + name: text for name, text in notes.items() if text},
    )
    decode_table(raw, bundle)  # what a reader would refuse must not get a name
    return _write(blobs, encode(bundle), MEDIA_MANIFEST, artifact_type=ARTIFACT_BUNDLE, notes=notes)


def _write(
    blobs: Path, content: bytes, media_type: str, *, artifact_type: str = "", notes: dict[str, str]
) -> Descriptor:
    blob = _Blob(blobs)
    try:
        blob.write(content)
        return blob.finish(media_type, artifact_type=artifact_type, notes=notes)
    finally:
        blob.abandon()


# -- faults ------------------------------------------------------------------------------------------------------------


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot read {str(path)!r}: {error.strerror or error}")


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write the repository {str(out)!r}: {error.strerror or error}") from error
