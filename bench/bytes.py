"""How many bytes and requests it takes to fetch all of a release, parts of it, the next one, and nothing.

    python bench/bytes.py [--tree DIRECTORY [--without DIR]] [--archs 10.3a] [--named sm103] [--kernels 100]

Without --tree the data is A of fetch.py.  Counted is what nginx sent, headers included: each case fetches by the
command's own code into a store of its own.  Nothing here is timed, so a busy machine changes no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import contenders
import corpus
import mirror

from kartifacts import config
from kartifacts.cli import flows
from kartifacts.cli.flows import Selection
from kartifacts.publish.repository import Repository

SEED = 20260000
CHANGED = 0.01  # of the kernels of the next release


class Moved(NamedTuple):
    sent: float  # MB
    requests: int
    to_packs: int  # of the requests
    packed: float  # MB of `sent`
    kernels: float  # MB, what was asked for when it is unpacked


class Line(NamedTuple):
    case: str
    moved: Moved
    note: str = ""


class Limit(NamedTuple):
    what: str
    found: float
    most: float


class Bench:
    """Two releases on one mirror, and what it sends for a fetch."""

    def __init__(self, place: Path, served: mirror.Mirror) -> None:
        self._place, self._served, self._stores = place, served, 0
        repository = Repository(place / "release")
        self._packs = {
            layer.digest.removeprefix("sha256:")
            for pin in repository.pins(corpus.LIBRARY)
            for bundle in repository.release(pin).manifests
            for layer in repository.bundle(bundle).layers
        }

    def new_store(self) -> Path:
        self._stores += 1
        return self._place / f"store{self._stores}"

    def fetch(self, lock: str, store: Path, selection: Selection) -> Moved:
        values = {"mirrors": f"{self._served.url()}/release", "lock": self._place / lock, "store": store}
        settings = config.read({}, {**values, "progress": "off"})
        self._served.sent()
        flows.fetch(settings, selection, out=None)
        sent = self._served.sent()
        packs = [one.size for one in sent if one.path.rpartition("/")[2] in self._packs]
        kernels = sum(row["size"] for row in flows.listing(settings, selection)["kernels"])
        return Moved(sum(one.size for one in sent) / 1e6, len(sent), len(packs), sum(packs) / 1e6, kernels / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="a directory in the layout of flashinfer-cubin's cubins")
    parser.add_argument("--without", action="append", default=[], help="a directory of the tree to leave out")
    parser.add_argument("--archs", default="10.3a", help="fetch what these can run alone; default: 10.3a")
    parser.add_argument("--named", default="sm103", help="fetch what has this in its path alone; default: sm103")
    parser.add_argument("--kernels", type=int, default=100, help="how many to fetch alone; default: 100")
    parser.add_argument("--lines", type=int, default=8, help="one in how many lines of a changed kernel differs")
    parser.add_argument("--scratch", type=Path, help="default: a temporary directory")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        place = Path(scratch)
        raw = options.tree.resolve() if options.tree else place / "raw"
        corpus.prepare("C" if options.tree else "A", raw, place, options.without)
        rows = contenders.read(str(place / "list"))
        changed = next_release(raw, rows, place, options)
        with mirror.serving(place, raw, place / "release", rows) as served:
            lines, limits = cases(Bench(place, served), rows, changed, options)
        show(lines, limits)
        if options.json:
            found = [{"case": line.case, "note": line.note, **line.moved._asdict()} for line in lines]
            written = {"cases": found, "limits": [limit._asdict() for limit in limits]}
            options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def next_release(raw: Path, rows: Sequence[contenders.Row], place: Path, options: argparse.Namespace) -> list[str]:
    """The same files in the same repository as version 2, except that a few kernels were compiled anew."""
    tree, rng = place / "next", random.Random(SEED)
    kernels = [row.path for row in rows if not row.path.endswith((".txt", ".h"))]
    changed = sorted(rng.sample(kernels, round(len(kernels) * CHANGED)))
    shutil.copytree(raw, tree, copy_function=link, ignore=shutil.ignore_patterns(*options.without))
    for path in changed:
        content = recompiled((raw / path).read_bytes(), rng, options.lines)
        (tree / path).unlink()
        (tree / path).write_bytes(content)
    for listed in list(tree.rglob("checksums.txt")):
        names = [line.split()[1] for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
        corpus.write_checksums(listed.parent, names)
    corpus.publish(tree, place / "release", place / "next.lock", "2")
    shutil.rmtree(tree)
    return changed


def link(source: str, target: str) -> None:
    """What is changed later is unlinked before, so a second name will do where there can be one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def recompiled(content: bytes, rng: random.Random, lines: int) -> bytes:
    """Other code in places: of one in so many lines of 128 bytes 16 bytes differ.  All else of the file is kept."""
    changed = bytearray(content)
    for start, size in code_of(content):
        for line in range(start, start + size - 127, 128):
            if rng.randrange(lines) == 0:
                changed[line + 32 : line + 48] = rng.randbytes(16)
    return bytes(changed)


def code_of(content: bytes) -> list[tuple[int, int]]:
    """Where the executable sections of a 64-bit ELF file lie, or all of what is none."""
    if not content.startswith(b"\x7fELF\x02\x01"):
        return [(0, len(content))]
    (first,), (size, count) = struct.unpack_from("<Q", content, 0x28), struct.unpack_from("<HH", content, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", content, first + size * number) for number in range(count)]
    return [(offset, length) for _, _, flags, _, offset, length in sections if flags & 4]


def cases(
    bench: Bench, rows: Sequence[contenders.Row], changed: Sequence[str], options: argparse.Namespace
) -> tuple[list[Line], list[Limit]]:
    everything, kept = Selection(), bench.new_store()
    full = bench.fetch("kartifacts.lock", kept, everything)
    again = bench.fetch("kartifacts.lock", kept, everything)
    upgrade = bench.fetch("next.lock", kept, everything)
    lines = [
        Line("full fetch", full),
        Line("nothing changed", again),
        Line("upgrade", upgrade, f"{len(changed)} of {len(rows)} kernels changed"),
    ]
    limits = [
        Limit("nothing changed: requests", again.requests, 1),
        Limit("upgrade: MB / full fetch", upgrade.sent / full.sent, 0.02),
    ]
    if options.tree:
        part = bench.fetch("kartifacts.lock", bench.new_store(), Selection(archs=options.archs))
        lines.append(Line(f"all that {options.archs} runs", part))
        limits.append(Limit("full fetch: MB", full.sent, 120))
        named = tuple(row.path for row in rows if options.named in row.path.lower())
        alone = bench.fetch("kartifacts.lock", bench.new_store(), Selection(paths=named))
        lines.append(Line(f"{len(named)} kernels named {options.named}", alone))
        share = alone.sent / alone.kernels / (full.sent / full.kernels)
        limits.append(Limit(f"named {options.named}: MB a MB of kernels / full fetch", share, 1.1))
    chosen = random.Random(SEED).sample([row.path for row in rows], min(options.kernels, len(rows)))
    ones = [bench.fetch("kartifacts.lock", bench.new_store(), Selection(paths=(path,))) for path in chosen]
    middle = Moved(*(statistics.median(values) for values in zip(*ones, strict=True)))
    worst = Moved(*(max(values) for values in zip(*ones, strict=True)))
    lines += [Line("one kernel, median", middle, f"of {len(ones)}"), Line("one kernel, maximum", worst)]
    limits.append(Limit("one kernel: MB from packs in the median", middle.packed, 1))
    limits.append(Limit("one kernel: requests to packs at most", worst.to_packs, 1))
    return lines, limits


def show(lines: Sequence[Line], limits: Sequence[Limit]) -> None:
    print("| case | kernels MB | sent MB | of it packs MB | requests | of it to packs | |")
    print("| --- | --: | --: | --: | --: | --: | --- |")
    for case, moved, note in lines:
        sizes = f"{moved.kernels:.2f} | {moved.sent:.3f} | {moved.packed:.3f}"
        print(f"| {case} | {sizes} | {moved.requests:g} | {moved.to_packs:g} | {note} |")
    print("\n| goal | measured | at most | |\n| --- | --: | --: | --- |")
    for what, found, most in limits:
        print(f"| {what} | {found:.3g} | {most:g} | {'ok' if found <= most else 'MISSED'} |")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and directories go then too
    main()
