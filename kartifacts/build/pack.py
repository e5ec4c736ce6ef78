"""Kernels become a bundle: packs of solid zstd blocks, the kernel table and the manifest, each written as a blob.

A block holds the kernels of a run of names as one zstd frame, so neighbours, which differ little, cost little.  The
same kernels give the same bytes, whatever the number of threads.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from kartifacts.build.blocks import Frame, PackInput, compressed, grouped, plan
from kartifacts.errors import ConfigError, StoreError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import Digest
from kartifacts.model.layout import check_name
from kartifacts.model.manifest import (
    ARTIFACT_BUNDLE,
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

__all__ = ["PackInput", "Progress", "pack_bundle"]

BLOCK_BYTES = 8 << 20  # raw; on 1.9 GB of real cubins 4 MiB costs a quarter more, 16 MiB a sixth less
PACK_BYTES = 64 << 20
LEVEL = 9  # four times the time of 3 and a sixth smaller; 19 takes forty times longer again
_PIECE = 1 << 20
_MAX_JOBS = 4

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all, both before compression."""


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
    planned = plan(entries)
    total = sum(kernel.size for kernel in planned)
    with _writing(out):
        blobs = out / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        frames = compressed(grouped(planned, block_bytes), level, jobs or _default_jobs(), out)
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


def _default_jobs() -> int:
    return min(_MAX_JOBS, len(os.sched_getaffinity(0)))


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

    def finish(self, media_type: str, notes: dict[str, str] | None = None) -> Descriptor:
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
            annotations={NOTE + name: text for name, text in (notes or {}).items() if text},
        )

    def abandon(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)


def _packed(
    frames: Generator[Frame, None, None], blobs: Path, pack_bytes: int, total: int, progress: Progress | None
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


def _entries(frame: Frame, block: int) -> Iterator[KernelEntry]:
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
        config=_write(blobs, compressed, MEDIA_TABLE, {"raw-size": str(len(raw))}),
        layers=packs,
        annotations={NOTE + name: text for name, text in notes.items() if text},
    )
    decode_table(raw, bundle)  # what a reader would refuse must not get a name
    return _write(blobs, encode(bundle), MEDIA_MANIFEST, notes)


def _write(blobs: Path, content: bytes, media_type: str, notes: dict[str, str]) -> Descriptor:
    blob = _Blob(blobs)
    try:
        blob.write(content)
        return blob.finish(media_type, notes)
    finally:
        blob.abandon()


# -- faults ------------------------------------------------------------------------------------------------------------


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write the repository {str(out)!r}: {error.strerror or error}") from error
