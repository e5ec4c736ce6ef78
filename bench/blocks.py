"""What the size of a block and the order of kernels in it cost: all of a tree, and one kernel of it.

    python bench/blocks.py TREE [--blocks 4,8,16,32,64] [--level 9] [--suffix .cubin]

Each directory of TREE is packed as one bundle.  "One kernel" is the length of the block that it lies in.  "chosen" is
what `kartifacts build` does: the best of the three orders by a sample, and blocks of at most 1 MiB compressed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from kartifacts.build import blocks
from kartifacts.build.blocks import PackInput, Planned

UNBOUNDED = 1 << 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--blocks", default="4,8,16,32,64", help="MiB, before compression")
    parser.add_argument("--level", type=int, default=blocks_level())
    parser.add_argument("--suffix", default="")
    options = parser.parse_args()
    bundles = planned(options.tree, options.suffix)
    raw = sum(kernel.size for bundle in bundles for kernel in bundle)
    print(f"{sum(map(len, bundles))} files in {len(bundles)} directories, {raw / 1e6:.0f} MB, level {options.level}\n")
    print("| order | block MiB | all MB | one kernel: median MB | largest MB | CPU s |")
    print("| --- | --: | --: | --: | --: | --: |")
    for name in ("name", "words from the last", "size"):
        for size in map(int, options.blocks.split(",")):
            row(name, size, bundles, options.level, UNBOUNDED)
    row("chosen", blocks.BLOCK_BYTES >> 20, bundles, options.level, blocks.BLOCK_LENGTH)


def blocks_level() -> int:
    from kartifacts.build.pack import LEVEL

    return LEVEL


def planned(tree: Path, suffix: str) -> list[Sequence[Planned]]:
    folders: dict[Path, list[PackInput]] = defaultdict(list)
    for path in sorted(tree.rglob(f"*{suffix}")):
        if path.is_file():
            folders[path.parent].append(PackInput(path.relative_to(tree).as_posix(), path))
    return [blocks.plan(entries) for _, entries in sorted(folders.items())]


def arranged(name: str, bundle: Sequence[Planned], size: int) -> Sequence[Planned]:
    if name == "chosen":
        return blocks.arranged(bundle, size)
    return dict(zip(("name", "words from the last", "size"), blocks.orders(bundle), strict=True))[name]


def row(name: str, mebibytes: int, bundles: list[Sequence[Planned]], level: int, longest: int) -> None:
    size, start = mebibytes << 20, time.process_time()
    lengths: list[int] = []  # of the block of each kernel
    total = 0
    with tempfile.TemporaryDirectory() as scratch:
        for bundle in bundles:
            groups = blocks.grouped(arranged(name, bundle, size), size)
            for frame in blocks.compressed(groups, level, 2, Path(scratch), block_length=longest):
                frame.content.close()
                total += frame.length
                lengths += [frame.length] * len(frame.kernels)
    one = f"{statistics.median(lengths) / 1e6:.2f} | {max(lengths) / 1e6:.2f}"
    print(f"| {name} | {mebibytes} | {total / 1e6:.1f} | {one} | {time.process_time() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main()
