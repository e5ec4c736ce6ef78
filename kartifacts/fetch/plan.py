"""Which ranges of which packs hold the wanted kernels: a pure function of the table and of what is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kartifacts.model.manifest import Block, BundleManifest, Delta, Descriptor, KernelEntry, Table

# A gap is fetched and let go where that is faster than another round trip: 20 ms at 200 Mbit/s.
GAP = 512 << 10
# A range is one unit of parallel work, of another try, and of waiting for another process.
RANGE_BYTES = 8 << 20
RANGE_BLOCKS = 64
_SHORTEST = 1 << 20  # a shorter one would cost more by its round trip than it gains by being one more at a time
_AT_ONCE = 6  # enough to fill a line that loses packets; a release of thousands of kernels stays within ten requests


@dataclass(frozen=True)
class Part:
    """One block to read, and the kernels wanted from it."""

    block: Block
    kernels: tuple[KernelEntry, ...]  # by offset, no content twice
    base: Path | None = None  # the older kernel that the block starts from

    @property
    def end(self) -> int:
        return self.block.offset + self.block.length


@dataclass(frozen=True)
class Range:
    """Bytes of one pack that are read in one go; blocks nobody wants may lie between its parts."""

    pack: Descriptor
    parts: tuple[Part, ...]  # by offset

    @property
    def start(self) -> int:
        return self.parts[0].block.offset

    @property
    def length(self) -> int:
        return self.parts[-1].end - self.start

    @property
    def wanted(self) -> int:
        return sum(part.block.length for part in self.parts)


@dataclass(frozen=True)
class Want:
    """Kernels of one bundle that are to be fetched."""

    manifest: BundleManifest
    table: Table
    entries: Sequence[KernelEntry]


def plan(wants: Iterable[Want], *, threads: int = 1) -> list[Range]:
    """The ranges that hold what is wanted, short enough for all threads to have some, the longest first."""
    found: dict[str, tuple[Descriptor, list[Part]]] = {}
    for want in wants:
        for number, kernels in _by_block(want).items():
            block = want.table.blocks[number]
            pack = want.manifest.layers[block.pack]
            _, parts = found.setdefault(pack.digest, (pack, []))
            parts.append(Part(block, tuple(sorted(kernels.values(), key=lambda entry: entry.offset))))
    return _ranges(found, threads)


def shortcuts(
    wants: Iterable[Want], held: Callable[[Delta], Path | None], *, threads: int = 1
) -> tuple[list[Range], list[Want]]:
    """Ranges that make kernels from older ones that are `held`, and what is left without.

    A block is left alone by this if some kernel wanted from it cannot be had this way: then all come with it.
    """
    found: dict[str, tuple[Descriptor, list[Part]]] = {}
    left: list[Want] = []
    for want in wants:
        rest: list[KernelEntry] = []
        for number, kernels in _by_block(want).items():
            made = [part for entry in kernels.values() if (part := _shortcut(entry, held)) is not None]
            length = sum(part.block.length for part in made)
            if len(made) < len(kernels) or length > want.table.blocks[number].length:
                rest += kernels.values()
                continue
            for part in made:
                pack = want.manifest.layers[part.block.pack]
                found.setdefault(pack.digest, (pack, []))[1].append(part)
        if rest:
            left.append(Want(want.manifest, want.table, rest))
    return _ranges(found, threads), left


def _shortcut(entry: KernelEntry, held: Callable[[Delta], Path | None]) -> Part | None:
    delta = entry.delta
    base = None if delta is None else held(delta)
    if delta is None or base is None:
        return None
    frame = Block(delta.pack, delta.offset, delta.length, entry.size, delta.sha256)
    return Part(frame, (msgspec.structs.replace(entry, offset=0),), base)


def _by_block(want: Want) -> dict[int, dict[tuple[str, str], KernelEntry]]:
    """Block number → its wanted kernels, each content once."""
    found: dict[int, dict[tuple[str, str], KernelEntry]] = {}
    for entry in want.entries:
        found.setdefault(entry.block, {})[entry.sha256, entry.suffix] = entry
    return found


def _ranges(found: dict[str, tuple[Descriptor, list[Part]]], threads: int) -> list[Range]:
    total = sum(part.block.length for _, parts in found.values() for part in parts)
    share = total // min(threads, _AT_ONCE)
    # With room for the block that a row would otherwise just not have taken: one row more is one request more.
    longest = min(RANGE_BYTES, max(_SHORTEST, share + _SHORTEST))
    made = [row for pack, parts in found.values() for row in coalesce(pack, parts, longest)]
    # The longest first, so that at the end no thread is alone with a long one.
    return sorted(made, key=lambda row: row.length, reverse=True)


def coalesce(pack: Descriptor, parts: Sequence[Part], longest: int = RANGE_BYTES) -> list[Range]:
    """Join neighbours into ranges of bounded size."""
    rows: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: part.block.offset):
        row = rows[-1] if rows else None
        if (
            row is not None
            and 0 <= part.block.offset - row[-1].end <= GAP
            and part.end - row[0].block.offset <= longest
            and len(row) < RANGE_BLOCKS
        ):
            row.append(part)
        else:
            rows.append([part])
    return [Range(pack, tuple(row)) for row in rows]
