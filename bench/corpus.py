"""The files that are fetched, A, B, N or a tree of the user's, and the release that they become.

A = 2,000 files of 20-200 KB, B = 4 files of 256 MiB, both of which compress about as well as cubins: 4 times one by
one, 9 times next to each other.  N = 4 files of 64 MiB of noise.  C = a tree in the layout of flashinfer-cubin.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from contenders import Row

LIBRARY = "bench"
_FOLDER = "0" * 40 + "/files"  # a release is imported, as its user would, from a tree that names its commit and family
_NOISE, _LARGE = 64 << 20, 256 << 20


def prepare(name: str, raw: Path, place: Path, without: Sequence[str] = ()) -> None:
    """Make the files, unless they are given, publish them below `place`, and list them there."""
    if name != "C":
        make(name, raw / _FOLDER)
        write_checksums(raw / _FOLDER, sorted(path.name for path in (raw / _FOLDER).iterdir()))
    publish(raw, place / "release", place / "kartifacts.lock", "1", without)
    rows = "".join(f"{row.sha256} {row.size} {row.path}\n" for row in released(place / "release"))
    (place / "list").write_text(rows, encoding="utf-8")


def make(name: str, directory: Path) -> None:
    directory.mkdir(parents=True)
    rng = random.Random(20260000)
    stock = [rng.randbytes(rng.randrange(256, 2048)) for _ in range(400)]
    if name == "N":
        for number in range(4):
            (directory / f"noise{number}.bin").write_bytes(rng.randbytes(_NOISE))
    elif name == "B":
        for number in range(4):
            with open(directory / f"pack{number}.bin", "wb") as file:
                while file.tell() < _LARGE:
                    file.write(cubin(rng, stock))
                file.truncate(_LARGE)
    else:
        for number in range(2000):
            (directory / f"kernel{number:04}.bin").write_bytes(cubin(rng, stock))


def cubin(rng: random.Random, stock: list[bytes]) -> bytes:
    """Runs from a few pieces of a common stock, and a little noise between them."""
    size = rng.randrange(20_000, 200_000)
    chosen, content = rng.sample(stock, 12), bytearray()
    while len(content) < size:
        piece = rng.choice(chosen)
        start = rng.randrange(0, len(piece) - 64, 16)
        content += piece[start : start + rng.randrange(48, 320)]
        content += rng.randbytes(rng.randrange(0, 16))
    return bytes(content[:size])


def write_checksums(directory: Path, names: Sequence[str]) -> None:
    listed = directory / "checksums.txt"
    text = "".join(f"{sha256(directory / name)} {name}\n" for name in names)
    listed.unlink(missing_ok=True)  # it may be another's name too
    listed.write_text(text, encoding="utf-8")


def publish(tree: Path, release: Path, lock: Path, version: str, without: Sequence[str] = ()) -> None:
    """As a release engineer would: a bundle for each family and arch, next to the releases that there are."""
    from kartifacts import config
    from kartifacts.cli import flows

    names = {"library": LIBRARY, "version": version, "allow_unlisted": True, "without": tuple(without), "lock": lock}
    flows.import_checksums(tree, release, settings=config.read({}, {"progress": "off"}), **names)


def released(release: Path, version: str = "1") -> list[Row]:
    """Each file that a release holds."""
    from kartifacts.publish.repository import Repository

    repository = Repository(release)
    rows = []
    for pin in repository.pins(LIBRARY, version):
        for descriptor in repository.release(pin).manifests:
            table = repository.table(repository.bundle(descriptor), descriptor.digest)
            rows += [Row(entry.sha256, entry.size, entry.uri) for entry in table.kernels]
    return sorted(rows, key=lambda row: row.path)


def sha256(path: Path) -> str:
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hashed.update(piece)
    return hashed.hexdigest()


if __name__ == "__main__":
    name, raw, place, *without = sys.argv[1:]
    prepare(name, Path(raw), Path(place), without)
