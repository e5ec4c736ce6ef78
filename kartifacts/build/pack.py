"""Kernels become a bundle: packs of solid zstd blocks, the kernel table and the manifest, each written as a blob.

A block holds kernels that are alike as one zstd frame, so each costs little.  The same kernels, with the same earlier
bundles to choose from, give the same bytes, whatever the number of threads.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from kartifacts.build.blocks import BLOCK_BYTES, Frame, PackInput, arranged, compressed, grouped, plan
from kartifacts.build.reuse import Earlier, Heir, Reused, best, bring, digests, heirs
from kartifacts.errors import ConfigError, StoreError
from kartifacts.files.reading import open_regular
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import Digest, digest_of, sha256
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
    Delta,
    Descriptor,
    KernelEntry,
    Table,
    decode_table,
    encode,
)

__all__ = ["PackInput", "Progress", "pack_bundle"]

PACK_BYTES = 64 << 20
LEVEL = 9  # four times the time of 3 and a sixth smaller; 19 takes forty times longer again
_PIECE = 1 << 20
_MODE = 0o644  # of every blob, whatever the umask
_MAX_JOBS = 4
_WORTH = 2  # times shorter than its share of the block has a delta to be

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
    machine: str = "",
    earlier: Sequence[Earlier] = (),
    block_bytes: int = BLOCK_BYTES,
    pack_bytes: int = PACK_BYTES,
    level: int = LEVEL,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Descriptor:
    """Pack `entries` into the repository directory `out`.

    Args:
        arch: canonical arch, or ``any``.
        machine: that the host code runs on; empty if the arch says it, or there is none.
        earlier: bundles of the same kind in earlier releases; blocks of the best one are used again.
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
        hashes = digests(planned) if earlier else {}
        reused = best(planned, hashes, earlier)
        contents = _Contents()
        if reused is not None:
            contents.take_over(reused, bring(reused, out), {kernel.entry.uri: kernel.entry for kernel in planned})
        new = [kernel for kernel in planned if reused is None or kernel.entry.uri not in reused.kernels]
        done = total - sum(kernel.size for kernel in new)
        groups = grouped(arranged(new, block_bytes), block_bytes)
        frames = compressed(groups, level, jobs or _default_jobs(), out)
        contents.pack(frames, blobs, pack_bytes, lambda size: progress and progress(done + size, total))
        if reused is not None:
            contents.describe(heirs(new, hashes, reused.earlier), blobs)
        table = Table(
            version=1,
            library=library,
            family=family,
            arch=arch,
            abi=abi,
            blocks=contents.blocks,
            kernels=sorted(contents.kernels, key=lambda entry: (entry.block, entry.offset, entry.uri)),
            toolchain=dict(toolchain),
        )
        return _described(table, contents.packs, total, blobs, machine)


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
        digest = Digest(self._hashed.hexdigest())
        if _holds(self._directory / digest, self.size):
            self.abandon()
        else:
            os.fchmod(self._file.fileno(), _MODE)
            os.fsync(self._file.fileno())
            self._file.close()
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


def _holds(place: Path, size: int) -> bool:
    """Whether a blob is there already and whole; to write it again would have to wait for the disk."""
    with suppress(OSError):
        found = place.lstat()
        if found.st_mode == stat.S_IFREG | _MODE and found.st_size == size:
            with open_regular(place) as file:
                return digest_of(iter(lambda: file.read(_PIECE), b""))[0] == place.name
    return False


class _Contents:
    """What a table says of a bundle, as it comes together."""

    def __init__(self) -> None:
        self.packs: list[Descriptor] = []
        self.blocks: list[Block] = []
        self.kernels: list[KernelEntry] = []

    def take_over(self, reused: Reused, packs: list[Descriptor], inputs: Mapping[str, PackInput]) -> None:
        """Begin with blocks of an earlier bundle; what its entries say of their kernels is said anew."""
        pack_now = {old: now for now, old in enumerate(reused.packs)}
        block_now = {old: now for now, old in enumerate(reused.blocks)}
        self.packs = packs
        for number in reused.blocks:
            block = reused.earlier.table.blocks[number]
            self.blocks.append(msgspec.structs.replace(block, pack=pack_now[block.pack]))
        for uri, old in reused.kernels.items():
            delta = old.delta and msgspec.structs.replace(old.delta, pack=pack_now[old.delta.pack])
            entry = _entry(inputs[uri], old.size, old.sha256, block_now[old.block], old.offset)
            self.kernels.append(msgspec.structs.replace(entry, delta=delta))

    def pack(
        self,
        frames: Generator[Frame, None, None],
        blobs: Path,
        pack_bytes: int,
        progress: Callable[[int], object],
    ) -> None:
        """Put the frames one after the other into packs, and note where each kernel lies."""
        done = 0
        pack = _Blob(blobs)
        try:
            with closing(frames):
                for frame in frames:
                    with frame.content as content:
                        if pack.size and pack.size + frame.length > pack_bytes:
                            self.packs.append(pack.finish(MEDIA_PACK))
                            pack = _Blob(blobs)
                        offset = 0
                        for entry, size, digest in frame.kernels:
                            self.kernels.append(_entry(entry, size, digest, len(self.blocks), offset))
                            offset += size
                        self.blocks.append(Block(len(self.packs), pack.size, frame.length, frame.size, frame.sha256))
                        while piece := content.read(_PIECE):
                            pack.write(piece)
                    done += frame.size
                    progress(done)
            if pack.size:
                self.packs.append(pack.finish(MEDIA_PACK))
        finally:
            pack.abandon()

    def describe(self, changed: Iterable[Heir], blobs: Path) -> None:
        """Add a pack of the ways from earlier kernels to changed ones, as far as they are shorter than by the block."""
        entries = {entry.uri: entry for entry in self.kernels}
        found: dict[str, Delta] = {}
        pack = _Blob(blobs)
        try:
            for heir in changed:
                entry = entries[heir.uri]
                block = self.blocks[entry.block]
                if _WORTH * len(heir.frame) * block.size > block.length * entry.size:
                    continue
                found[heir.uri] = Delta(
                    pack=len(self.packs),
                    offset=pack.size,
                    length=len(heir.frame),
                    sha256=sha256(heir.frame),
                    base=heir.base.sha256,
                    base_size=heir.base.size,
                    base_suffix=heir.base.suffix,
                )
                pack.write(heir.frame)
            if found:
                self.packs.append(pack.finish(MEDIA_PACK))
        finally:
            pack.abandon()
        self.kernels = [
            msgspec.structs.replace(entry, delta=found[entry.uri]) if entry.uri in found else entry
            for entry in self.kernels
        ]


def _entry(given: PackInput, size: int, digest: str, block: int, offset: int) -> KernelEntry:
    return KernelEntry(
        uri=given.uri,
        sha256=digest,
        size=size,
        block=block,
        offset=offset,
        suffix=given.suffix,
        key=given.key,
        op_digest=given.op_digest,
        exports=list(given.exports),
        needs=dict(given.needs),
    )


def _described(table: Table, packs: list[Descriptor], total: int, blobs: Path, machine: str) -> Descriptor:
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
        "machine": machine,
        "driver": _driver(table.kernels),
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


def _driver(kernels: Iterable[KernelEntry]) -> str:
    """The oldest driver that loads all of them; a release lists bundles for newer drivers first."""
    versions = {kernel.needs["driver"] for kernel in kernels if "driver" in kernel.needs}
    return max(versions, key=lambda text: tuple(map(int, text.split("."))), default="")


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
        raise StoreError(
            f"cannot write the repository {str(out)!r}: {error.strerror or error}",
            hint="name another directory, or make room; what was built stays in the workspace",
        ) from error
