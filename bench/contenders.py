"""The tools to compare with, each as a user would have it fetch all files and end with their sha256 checked.

    python bench/contenders.py NAME URL LIST OUT

One process runs one of them once.  LIST has a line `sha256 size path` for each file below URL/raw; OUT is an empty
directory.  Which files there are is known to all before, so none has to ask; the hub's client asks, as it cannot be
told.  Authorities are named by the variables that each tool reads.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

HUB = "bench/files"
COMMIT = "c0ffee" + "0" * 34


class Row(NamedTuple):
    sha256: str
    size: int
    path: str


def read(listed: str) -> list[Row]:
    with open(listed, encoding="utf-8") as file:
        fields = [line.rstrip("\n").split(" ", 2) for line in file]
    return [Row(digest, int(size), path) for digest, size, path in fields]


def check(rows: list[Row], out: str) -> None:
    """What follows a tool that verifies nothing: one reader, a buffer that begins a page, no copies."""
    buffer = mmap.mmap(-1, 1 << 20)
    view = memoryview(buffer)
    for row in rows:
        hashed = hashlib.sha256()
        with open(os.path.join(out, row.path), "rb", buffering=0) as file:
            while count := file.readinto(view):
                hashed.update(view[:count])
        if hashed.hexdigest() != row.sha256:
            raise SystemExit(f"{row.path} is wrong")


def make_directories(rows: list[Row], out: str) -> None:
    for directory in {os.path.dirname(row.path) for row in rows}:
        os.makedirs(os.path.join(out, directory), exist_ok=True)


def flashinfer(url: str, rows: list[Row], out: str) -> None:
    """What flashinfer does, told in our words: see README.md for what was looked at.

    One session, four threads, a request a file and the whole body in memory; around each file a file lock and two
    lines of log, into a file and to stderr, then a bar moves.  Everything is read again at the end and hashed.
    """
    import logging
    import uuid
    from concurrent.futures import ThreadPoolExecutor, as_completed
    from pathlib import Path

    import filelock
    import requests
    from tqdm import tqdm

    log = logging.getLogger("peer")
    log.setLevel("INFO")
    for handler in (logging.StreamHandler(), logging.FileHandler(os.path.join(out, "peer.log"))):
        handler.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(filename)s:%(lineno)d - %(message)s"))
        log.addHandler(handler)
    session = requests.Session()

    def download(path: str) -> None:
        source, target = f"{url}/raw/{path}", os.path.join(out, path)
        with filelock.FileLock(f"{target}.lock", timeout=30):
            log.info(f"have the lock of {target}")  # noqa: G004  formatted whatever the level, as there
            if os.path.exists(source):
                raise SystemExit(f"{source} is a file")
            partial = f"{target}.{uuid.uuid4().hex}.tmp"
            try:
                answer = session.get(source, timeout=10)
                answer.raise_for_status()
                with open(partial, "wb") as file:
                    file.write(answer.content)
                os.replace(partial, target)
                log.info(f"downloaded {source} to {target}")  # noqa: G004
            finally:
                if os.path.exists(partial):
                    os.remove(partial)

    with tqdm(total=len(rows), desc="downloading") as bar, ThreadPoolExecutor(4) as pool:
        futures = []
        for row in rows:
            Path(out, row.path).parent.mkdir(parents=True, exist_ok=True)
            future = pool.submit(download, row.path)
            future.add_done_callback(lambda _: bar.update(1))
            futures.append(future)
        for future in as_completed(futures):
            future.result()
    for row in rows:
        with open(os.path.join(out, row.path), "rb") as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != row.sha256:
            raise SystemExit(f"{row.path} is wrong")


def requests16(url: str, rows: list[Row], out: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import requests

    session = requests.Session()
    session.mount(url, requests.adapters.HTTPAdapter(pool_maxsize=16))
    make_directories(rows, out)

    def download(row: Row) -> None:
        with session.get(f"{url}/raw/{row.path}", stream=True, timeout=30) as answer:
            answer.raise_for_status()
            with open(os.path.join(out, row.path), "wb") as file:
                file.writelines(answer.iter_content(1 << 20))

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(download, rows):
            pass
    check(rows, out)


def curl(url: str, rows: list[Row], out: str) -> None:
    asked = os.path.join(out, "curl.conf")
    with open(asked, "w", encoding="utf-8") as file:
        file.writelines(f'url = "{url}/raw/{row.path}"\noutput = "{os.path.join(out, row.path)}"\n' for row in rows)
    quiet = ["-sSf", "--no-progress-meter"]
    subprocess.run(["curl", "-Z", "--parallel-max", "16", *quiet, "--create-dirs", "-K", asked], check=True)
    check(rows, out)


def aria2c(url: str, rows: list[Row], out: str) -> None:
    asked = os.path.join(out, "aria.txt")
    with open(asked, "w", encoding="utf-8") as file:
        file.writelines(f"{url}/raw/{row.path}\n  out={row.path}\n" for row in rows)
    authority = ["--ca-certificate", os.environ["CURL_CA_BUNDLE"]] if url.startswith("https") else []
    options = ["-q", "-j16", "-x4", "--file-allocation=none", *authority]
    subprocess.run(["aria2c", *options, "-d", out, "-i", asked], check=True)
    check(rows, out)


def pooch(url: str, rows: list[Row], out: str) -> None:
    """It verifies itself, one file after the other."""
    import pooch as library

    library.get_logger().setLevel("ERROR")
    registry = {row.path: f"sha256:{row.sha256}" for row in rows}
    box = library.create(path=out, base_url=f"{url}/raw/", registry=registry)
    for row in rows:
        box.fetch(row.path)


def hub(url: str, rows: list[Row], out: str) -> None:
    """snapshot_download with its defaults, except that nothing else is spoken to: no xet, no telemetry, no token."""
    os.environ.update(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
    os.environ.update(HF_ENDPOINT=f"{url}/hub", HF_HOME=os.path.join(out, "home"))
    from huggingface_hub import snapshot_download

    check(rows, snapshot_download(HUB, cache_dir=os.path.join(out, "hub")))


class Contender(NamedTuple):
    title: str
    run: Callable[[str, list[Row], str], None]
    needs: tuple[str, ...]  # modules and programs


CONTENDERS = {
    "flashinfer": Contender("FlashInfer's algorithm, 4 threads", flashinfer, ("filelock", "requests", "tqdm")),
    "requests": Contender("requests, 16 threads", requests16, ("requests",)),
    "curl": Contender("curl -Z --parallel-max 16", curl, ("curl",)),
    "aria2c": Contender("aria2c -j16 -x4", aria2c, ("aria2c",)),
    "pooch": Contender("pooch", pooch, ("pooch",)),
    "huggingface_hub": Contender("huggingface_hub, snapshot_download", hub, ("huggingface_hub",)),
}


if __name__ == "__main__":
    name, url, listed, out = sys.argv[1:]
    CONTENDERS[name].run(url, read(listed), out)
