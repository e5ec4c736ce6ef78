"""Measures `status`, `list`, `gc --dry-run` and a warm `fetch` over a full store, beside what only walks and stats.

    python bench/status.py [--kernels 100000] [--bundles 200]

Every row is a process of its own, start included: wall and CPU seconds, peak memory, and the wall as a multiple of
`os.walk` + `os.stat` over the same files.  The store is real: one file a kernel, read-only, named by its digest.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kartifacts.model.manifest import (
    ARTIFACT_BUNDLE,
    MEDIA_INDEX,
    MEDIA_MANIFEST,
    MEDIA_PACK,
    MEDIA_TABLE,
    NOTE,
    RELEASE_FORMAT,
    Block,
    BundleManifest,
    Descriptor,
    KernelEntry,
    Lock,
    Pin,
    Release,
    Table,
    encode,
)
from kartifacts.store import Store

_WALK = """
import os, sys
count = size = 0
for directory, _, names in os.walk(sys.argv[1]):
    for name in names:
        found = os.stat(os.path.join(directory, name))
        count, size = count + 1, size + found.st_size
print(count, size)
"""
_SQLITE = """
import os, sqlite3, sys
rows = sqlite3.connect(sys.argv[2]).execute("select name, size from kernels")
print(sum(os.stat(os.path.join(sys.argv[1], name[:2], name)).st_size == size for name, size in rows))
"""
_JSON = """
import json, os, sys
with open(sys.argv[2]) as file:
    kernels = json.load(file)["kernels"]
names = [(kernel["sha256"] + kernel["suffix"], kernel["size"]) for kernel in kernels]
print(sum(os.stat(os.path.join(sys.argv[1], name[:2], name)).st_size == size for name, size in names))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=int, default=100_000)
    parser.add_argument("--bundles", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kartifacts-bench-") as home:
        root = Path(home)
        # In another process: the peak of a child begins at that of the process which started it.
        filling = multiprocessing.get_context("fork").Process(
            target=fill, args=(root, options.kernels, options.bundles)
        )
        filling.start()
        filling.join()
        files = root / "store/v1/sha256"
        command = [sys.executable, "-m", "kartifacts"]
        rows = {
            "os.walk + os.stat": [sys.executable, "-c", _WALK, str(files)],
            "sqlite3 + os.stat": [sys.executable, "-c", _SQLITE, str(files), f"{root}/kernels.db"],
            "json + os.stat": [sys.executable, "-c", _JSON, str(files), f"{root}/kernels.json"],
            "kartifacts status": [*command, "status"],
            "kartifacts list": [*command, "list"],
            "kartifacts gc --dry-run": [*command, "gc", "--dry-run"],
            "kartifacts fetch (warm)": [*command, "fetch"],
        }
        measured = {name: [] for name in rows}
        for _ in range(options.rounds):
            for name, row in rows.items():
                measured[name].append(run(row, root))
        print(f"{options.kernels} kernels in {options.bundles} bundles; median of {options.rounds}")
        print(f"{'':26}{'wall s':>8}{'CPU s':>8}{'peak MB':>9}{'x walk':>8}")
        base = statistics.median(wall for wall, _, _ in measured["os.walk + os.stat"])
        for name, found in measured.items():
            wall, cpu, peak = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"{name:26}{wall:8.2f}{cpu:8.2f}{peak:9.0f}{wall / base:8.2f}")


def run(command: list[str], root: Path) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MB of a process."""
    environ = {"PATH": os.environ.get("PATH", ""), "HOME": str(root), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    environ |= {"KARTIFACTS_STORE": f"{root}/store", "KARTIFACTS_LOCK": f"{root}/kartifacts.lock"}
    started = time.perf_counter()
    out = os.open(root / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    child = os.posix_spawn(command[0], command, environ, file_actions=[(os.POSIX_SPAWN_DUP2, out, 1)])
    _, status, used = os.wait4(child, 0)
    os.close(out)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def fill(root: Path, kernels: int, bundles: int) -> None:
    """A store that holds a release whole, and lists of the same kernels for others to read."""
    store = Store(root / "store")
    made: list[KernelEntry] = []
    manifests: list[Descriptor] = []
    for number in range(bundles):
        entries = [write(store, index) for index in range(number, kernels, bundles)]
        manifests.append(bundle(store, f"family{number:03}", entries))
        made += entries
    release = Release(
        schema_version=2,
        media_type=MEDIA_INDEX,
        manifests=manifests,
        annotations={NOTE + "format": RELEASE_FORMAT, NOTE + "library": "bench", NOTE + "version": "1"},
    )
    index = put(store, encode(release), MEDIA_INDEX)
    pin = Pin(library="bench", version="1", sha256=index.sha256, size=index.size)
    (root / "kartifacts.lock").write_bytes(encode(Lock(version=1, releases=[pin])))
    baselines(root, made)


def write(store: Store, index: int) -> KernelEntry:
    """One kernel as the store holds it; not through the store's writer, which would flush each."""
    content = index.to_bytes(8, "big")
    digest = hashlib.sha256(content).hexdigest()
    path = store.path(digest, ".so")  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o444)
    return KernelEntry(
        uri=f"norm/op{index % 50}?dtype=bfloat16&hidden={index}",
        sha256=digest,
        size=len(content),
        block=0,
        offset=0,
        suffix=".so",
        key=hashlib.sha256(b"key" + content).hexdigest(),
        op_digest=hashlib.sha256(b"op" + content).hexdigest(),
        exports=["launch"],
        needs={"glibc": "2.17", "tvm_ffi": "0.1"},
    )


def bundle(store: Store, family: str, entries: list[KernelEntry]) -> Descriptor:
    import zstandard

    block = Block(0, 0, 100, 1 << 20, "0" * 64)
    table = Table(version=1, library="bench", family=family, arch="9.0", abi="none", blocks=[block], kernels=entries)
    raw = encode(table)
    notes = {"library": "bench", "version": "1", "family": family, "arch": "9.0", "abi": "none"}
    config = put(store, zstandard.ZstdCompressor().compress(raw), MEDIA_TABLE, {"raw-size": str(len(raw))})
    pack = Descriptor(media_type=MEDIA_PACK, digest="sha256:" + "0" * 64, size=1000)
    manifest = BundleManifest(
        schema_version=2, media_type=MEDIA_MANIFEST, artifact_type=ARTIFACT_BUNDLE, config=config, layers=[pack]
    )
    return put(store, encode(manifest), MEDIA_MANIFEST, notes)


def put(store: Store, content: bytes, media_type: str, notes: dict[str, str] | None = None) -> Descriptor:
    from kartifacts.model.digest import sha256

    digest = sha256(content)
    store.put(digest, content)
    annotations = {NOTE + name: text for name, text in (notes or {}).items()}
    return Descriptor(media_type=media_type, digest=f"sha256:{digest}", size=len(content), annotations=annotations)


def baselines(root: Path, kernels: list[KernelEntry]) -> None:
    """The same list as others would keep it."""
    import sqlite3

    with sqlite3.connect(root / "kernels.db") as database:
        database.execute("create table kernels (name text primary key, size integer)")
        database.executemany(
            "insert into kernels values (?, ?)", [(kernel.sha256 + kernel.suffix, kernel.size) for kernel in kernels]
        )
    table = Table(version=1, library="bench", family="all", arch="9.0", abi="none", blocks=[], kernels=kernels)
    (root / "kernels.json").write_bytes(encode(table))


if __name__ == "__main__":
    main()
