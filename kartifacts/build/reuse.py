"""What an earlier release in reach holds is used again: its blocks as they are, its kernels as a start for their heirs.

So who has the earlier release fetches little more than what changed, and who publishes uploads no more than that.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kartifacts.build.blocks import Planned, read
from kartifacts.errors import VerificationError
from kartifacts.files.reading import open_regular
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.frames import MAX_WINDOW
from kartifacts.model.layout import blob_path
from kartifacts.model.manifest import MAX_DELTA_BASE, BundleManifest, Descriptor, KernelEntry, Table

_MOST_WASTE = 4  # of the bytes of the blocks that live on, at most one in four may be for nobody
_DELTA_LEVEL = 12
_PIECE = 1 << 20


@dataclass(frozen=True)
class Earlier:
    """A bundle of an earlier release, and the repository that holds it."""

    repository: Path
    manifest: BundleManifest
    table: Table


@dataclass(frozen=True)
class Reused:
    """The part of an earlier bundle that lives on."""

    earlier: Earlier
    blocks: tuple[int, ...]  # numbers in the earlier table
    kernels: Mapping[str, KernelEntry]  # uri → the earlier entry of the same bytes, in one of these blocks
    matching: int  # bytes of all kernels that were there before, in whatever block

    @property
    def packs(self) -> list[int]:
        """Numbers in the earlier manifest, in order."""
        layers = {self.earlier.table.blocks[number].pack for number in self.blocks}
        layers.update(entry.delta.pack for entry in self.kernels.values() if entry.delta is not None)
        return sorted(layers)


@dataclass(frozen=True)
class Heir:
    """One changed kernel as a frame that starts from the kernel it replaces."""

    uri: str
    frame: bytes
    base: KernelEntry


def digests(planned: Iterable[Planned]) -> dict[str, Digest]:
    """The sha256 of every planned file, by uri."""
    return {kernel.entry.uri: read(kernel, lambda _: None) for kernel in planned}


def best(planned: Sequence[Planned], hashes: Mapping[str, Digest], candidates: Iterable[Earlier]) -> Reused | None:
    """The candidate that saves most and what of it lives on, which may be nothing; None if there is no candidate."""
    found = [_reused(planned, hashes, earlier) for earlier in candidates]
    # The digest last, so that the same repository gives the same bundle.
    return max(found, key=lambda reused: (*_worth(reused), reused.earlier.manifest.config.digest), default=None)


def _worth(reused: Reused) -> tuple[int, int]:
    blocks = reused.earlier.table.blocks
    return sum(blocks[number].length for number in reused.blocks), reused.matching


def _reused(planned: Sequence[Planned], hashes: Mapping[str, Digest], earlier: Earlier) -> Reused:
    table = earlier.table
    held: dict[str, KernelEntry] = {}
    for entry in table.kernels:
        held.setdefault(entry.sha256, entry)
    matched = {kernel.entry.uri: held[digest] for kernel in planned if (digest := hashes[kernel.entry.uri]) in held}
    alive: dict[int, dict[str, int]] = {}
    for entry in matched.values():
        alive.setdefault(entry.block, {})[entry.sha256] = entry.size
    used = {number: sum(sizes.values()) for number, sizes in alive.items()}
    kept = sorted(used, key=lambda number: (used[number] / max(table.blocks[number].size, 1), -number))
    raw = sum(table.blocks[number].size for number in kept)
    wasted = raw - sum(used.values())
    while kept and _MOST_WASTE * wasted > raw:  # the worst go first
        worst = kept.pop(0)
        raw -= table.blocks[worst].size
        wasted -= table.blocks[worst].size - used[worst]
    lasting = set(kept)
    kernels = {uri: entry for uri, entry in matched.items() if entry.block in lasting}
    return Reused(earlier, tuple(sorted(kept)), kernels, sum(used.values()))


def bring(reused: Reused, out: Path) -> list[Descriptor]:
    """Have the packs that live on in the repository `out`; gives their descriptors."""
    layers = [reused.earlier.manifest.layers[number] for number in reused.packs]
    for layer in layers:
        source, target = (place / blob_path(layer.sha256) for place in (reused.earlier.repository, out))
        if target.exists():
            continue
        if not source.exists():
            raise VerificationError(
                f"an earlier release lacks its pack {layer.sha256}: {str(source)!r}",
                source=str(source),
                hint="kartifacts verify shows what else; build into another directory to do without that release",
            )
        with open_regular(source) as old, tempfile.NamedTemporaryFile(dir=target.parent, prefix=".partial-") as new:
            hashed = hashlib.sha256()
            while piece := old.read(_PIECE):
                hashed.update(piece)
                new.write(piece)
            new.flush()
            if hashed.hexdigest() != layer.sha256:
                raise VerificationError(f"a pack of the earlier release is damaged: {str(source)!r}")
            os.fchmod(new.fileno(), 0o644)
            os.fsync(new.fileno())
            os.link(new.name, target)
    return layers


def heirs(planned: Iterable[Planned], hashes: Mapping[str, Digest], earlier: Earlier) -> Iterator[Heir]:
    """For each changed kernel whose forerunner is known, a frame that starts from it."""
    import zstandard

    forerunners = _forerunners(earlier.table)
    wanted: dict[int, list[tuple[Planned, KernelEntry]]] = {}
    for kernel in planned:
        base = forerunners.get(kernel.entry.uri) or forerunners.get(_last(kernel.entry.uri))
        if (
            base is not None
            and base.sha256 != hashes[kernel.entry.uri]
            and 0 < base.size <= MAX_DELTA_BASE
            and 0 < kernel.size <= MAX_DELTA_BASE
        ):
            wanted.setdefault(base.block, []).append((kernel, base))
    for number, pairs in sorted(wanted.items()):
        content = _content(earlier, number)
        for kernel, base in pairs:
            old = content[base.offset : base.offset + base.size]
            if sha256(old) != base.sha256:
                raise VerificationError(f"{base.uri} of the earlier release is not what its table says")
            new = bytearray()
            read(kernel, new.extend)
            given = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            parameters = zstandard.ZstdCompressionParameters.from_level(
                _DELTA_LEVEL,
                source_size=len(new) + len(old),
                window_log=max(10, (len(new) + len(old)).bit_length()),
                write_content_size=True,
                write_checksum=False,
            )
            frame = zstandard.ZstdCompressor(compression_params=parameters, dict_data=given).compress(bytes(new))
            yield Heir(kernel.entry.uri, frame, base)


def _forerunners(table: Table) -> dict[str, KernelEntry]:
    """Kernels by uri, and by the last part of it where only one has that: trees name their version above it."""
    found: dict[str, KernelEntry] = {}
    twice: set[str] = set()
    for entry in table.kernels:
        name = _last(entry.uri)
        twice.update({name} & found.keys())
        found[name] = entry
    for name in twice:
        del found[name]
    found.update((entry.uri, entry) for entry in table.kernels)
    return found


def _last(uri: str) -> str:
    path, question, axes = uri.partition("?")
    return path.rpartition("/")[2] + question + axes


def _content(earlier: Earlier, number: int) -> bytes:
    import zstandard

    block = earlier.table.blocks[number]
    pack = earlier.manifest.layers[block.pack]
    with open_regular(earlier.repository / blob_path(pack.sha256)) as file:
        file.seek(block.offset)
        compressed = file.read(block.length)
    if sha256(compressed) != block.sha256:
        raise VerificationError(f"a block of the earlier release is damaged: {pack.sha256}")
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    return reader.decompress(compressed, max_output_size=block.size)
