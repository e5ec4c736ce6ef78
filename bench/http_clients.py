"""What HTTP clients of Python cost: to import, for many small files, and for ranges of large ones.

    python bench/http_clients.py [--rounds 3] [--only NAME,...] [--scratch DIRECTORY]

One nginx on the loopback serves 2,000 files of 20-200 KB and 2 files of 256 MiB, which are read in ranges of 4 MiB.
Each client is a process of its own with 8 threads (or transfers) that takes the sha256 of every byte and keeps none.
CPU seconds are of that process, its start and imports included; so is the wall time.  Clients that are not installed
are left out.  Rounds are interleaved; medians are shown.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PORT = 8491
THREADS = 8
PIECE = 256 << 10
RANGE = 4 << 20
Row = tuple[str, int, int, int]  # digest of the blob, its size, start, length

# -- the clients: each gives a function that reads one row and returns the sha256 of what came -------------------------


def kartifacts_source(base: str) -> Callable[[Row], str]:
    from kartifacts import config
    from kartifacts.sources.http import HttpSource

    source = HttpSource(base, config.read({"HOME": "/nonexistent"}))

    def read(row: Row) -> str:
        digest, size, start, length = row
        with source.read(digest, size, start=start, length=length) as pieces:  # type: ignore[arg-type]
            return digest_of(pieces)

    return read


def http_client(base: str, *, into: bool = False) -> Callable[[Row], str]:
    import http.client
    import mmap
    import threading

    host, _, port = base.removeprefix("http://").partition(":")
    local = threading.local()

    def read(row: Row) -> str:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(host, int(port))
            local.buffer = memoryview(mmap.mmap(-1, PIECE))
        local.connection.request("GET", f"/blobs/sha256/{row[0]}", headers=range_of(row))
        response = local.connection.getresponse()
        digest = hashlib.sha256()
        if into:
            while count := response.readinto(local.buffer):
                digest.update(local.buffer[:count])
        else:
            while piece := response.read1(PIECE):
                digest.update(piece)
        response.close()
        return digest.hexdigest()

    return read


def http_client_into(base: str) -> Callable[[Row], str]:
    return http_client(base, into=True)


def urllib3_pool(base: str) -> Callable[[Row], str]:
    import urllib3

    pool = urllib3.PoolManager(maxsize=THREADS)

    def read(row: Row) -> str:
        response = pool.request(
            "GET", f"{base}/blobs/sha256/{row[0]}", headers=range_of(row), preload_content=False, decode_content=False
        )
        result = digest_of(iter(lambda: response.read1(PIECE), b""))
        response.release_conn()
        return result

    return read


def requests_sessions(base: str) -> Callable[[Row], str]:
    import threading

    import requests

    local = threading.local()

    def read(row: Row) -> str:
        if not hasattr(local, "session"):
            local.session = requests.Session()
        with local.session.get(f"{base}/blobs/sha256/{row[0]}", headers=range_of(row), stream=True) as response:
            return digest_of(iter(lambda: response.raw.read1(PIECE, decode_content=False), b""))

    return read


def httpx_client(base: str) -> Callable[[Row], str]:
    import httpx

    client = httpx.Client(limits=httpx.Limits(max_connections=THREADS))

    def read(row: Row) -> str:
        with client.stream("GET", f"{base}/blobs/sha256/{row[0]}", headers=range_of(row)) as response:
            return digest_of(response.iter_raw())

    return read


def aiohttp_client(base: str, rows: list[Row]) -> list[str]:
    import asyncio

    import aiohttp

    async def run() -> list[str]:
        limit = asyncio.Semaphore(THREADS)

        async def read(row: Row) -> str:
            async with limit, session.get(f"{base}/blobs/sha256/{row[0]}", headers=range_of(row)) as response:
                digest = hashlib.sha256()
                async for piece in response.content.iter_any():
                    digest.update(piece)
                return digest.hexdigest()

        async with aiohttp.ClientSession(auto_decompress=False, read_bufsize=PIECE) as session:
            return list(await asyncio.gather(*(read(row) for row in rows)))

    return asyncio.run(run())


def pycurl_handles(base: str) -> Callable[[Row], str]:
    import threading

    import pycurl

    local = threading.local()

    def read(row: Row) -> str:
        if not hasattr(local, "handle"):
            local.handle = pycurl.Curl()
            local.handle.setopt(pycurl.BUFFERSIZE, PIECE)
        digest = hashlib.sha256()
        local.handle.setopt(pycurl.URL, f"{base}/blobs/sha256/{row[0]}")
        local.handle.setopt(pycurl.HTTPHEADER, [f"{name}: {value}" for name, value in range_of(row).items()])
        local.handle.setopt(pycurl.WRITEFUNCTION, digest.update)
        local.handle.perform()
        return digest.hexdigest()

    return read


CLIENTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "kartifacts": ("kartifacts.sources.http", kartifacts_source),
    "http.client": ("http.client", http_client),
    "http.client readinto": ("http.client", http_client_into),
    "urllib3": ("urllib3", urllib3_pool),
    "requests": ("requests", requests_sessions),
    "httpx": ("httpx", httpx_client),
    "aiohttp": ("aiohttp", aiohttp_client),
    "pycurl": ("pycurl", pycurl_handles),
}


def range_of(row: Row) -> dict[str, str]:
    _, size, start, length = row
    return {} if length == size else {"Range": f"bytes={start}-{start + length - 1}"}


def digest_of(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def read_all(name: str, base: str, rows: list[Row]) -> list[str]:
    make = CLIENTS[name][1]
    if make is aiohttp_client:
        found: list[str] = make(base, rows)
        return found
    read = make(base)
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(read, rows))


# -- the measurement ---------------------------------------------------------------------------------------------------


def make_data(tree: Path) -> dict[str, list[tuple[Row, str]]]:
    """Write the files; gives the rows of each kind of work, with the sha256 that each must have."""
    blobs = tree / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    chance = random.Random(20260000)
    small: list[tuple[Row, str]] = []
    for _ in range(2000):
        content = chance.randbytes(chance.randrange(20_000, 200_000))
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        small.append(((digest, len(content), 0, len(content)), digest))
    ranges: list[tuple[Row, str]] = []
    for _ in range(2):
        content = b"".join(chance.randbytes(1 << 20) for _ in range(256))
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        for start in range(0, len(content), RANGE):
            part = hashlib.sha256(content[start : start + RANGE]).hexdigest()
            ranges.append(((digest, len(content), start, RANGE), part))
    return {"2,000 files": small, "ranges of 4 MiB": ranges}


def measured(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, cwd=HERE)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def import_milliseconds(module: str) -> float:
    """What an import adds to a bare process: the median of 15, interleaved."""
    bare, loaded = [], []
    for _ in range(15):
        bare.append(measured([sys.executable, "-c", "pass"])[0])
        loaded.append(measured([sys.executable, "-c", f"import {module}"])[0])
    return 1000 * (statistics.median(loaded) - statistics.median(bare))


def worker(name: str, base: str, rows: Path) -> None:
    work = json.loads(rows.read_text())
    found = read_all(name, base, [tuple(row) for row, _ in work])
    if found != [expected for _, expected in work]:
        sys.exit(f"{name} read other bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if options.worker:
        worker(options.worker[0], options.worker[1], Path(options.worker[2]))
        return
    wanted = [name for name in CLIENTS if not options.only or name in options.only.split(",")]
    names = [name for name in wanted if importlib.util.find_spec(CLIENTS[name][0].partition(".")[0])]
    imports = {name: import_milliseconds(CLIENTS[name][0]) for name in names}
    with tempfile.TemporaryDirectory(dir=options.scratch) as directory:
        base = Path(directory)
        work = make_data(base / "tree")
        for kind, rows in work.items():
            (base / kind).write_text(json.dumps(rows))
        script = [str(HERE / "ci" / "stores" / "nginx")]
        subprocess.run([*script, "start", str(base / "nginx"), str(base / "tree"), str(PORT)], check=True)
        try:
            seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for number in range(options.rounds):
                for name in random.Random(number).sample(names, len(names)):
                    for kind in work:
                        task = ["--worker", name, f"http://127.0.0.1:{PORT}", str(base / kind)]
                        seen.setdefault((name, kind), []).append(measured([sys.executable, __file__, *task]))
        finally:
            subprocess.run([*script, "stop", str(base / "nginx")], check=True)
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"| client | import ms | {' | '.join(f'{kind}: wall s | CPU s' for kind in work)} |")
    print("|---|---|" + "---|---|" * len(work))
    for name in names:
        cells = [
            f"{statistics.median(each[part] for each in seen[name, kind]):.2f}" for kind in work for part in (0, 1)
        ]
        print(f"| {name} | {imports[name]:.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
