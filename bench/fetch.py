"""What it costs to have many files fetched, verified and in place, beside the tools that are used for it today.

    python bench/fetch.py [--data A,B] [--tree DIRECTORY] [--rounds 3] [--scratch DIRECTORY]

A = 2,000 files of 20-200 KB, B = 4 files of 256 MiB, C = the files below --tree (e.g. an unpacked flashinfer-cubin).
One nginx on the loopback serves the files as they are and as a published release.  Each contender is a process of its
own with an empty output directory; what does not verify by itself is followed by a sha256 of every file, in its time.
Rounds are interleaved.  Wall seconds are noisy on a shared machine: read the ratios, and the CPU seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
PORT = 8471
PEER_FLASHINFER = """
# FlashInfer's algorithm: 4 threads, a request a file, the whole body in memory, everything verified at the end.
import hashlib, os, sys
from concurrent.futures import ThreadPoolExecutor
import requests
base, listed, out = sys.argv[1:4]
rows = [line.split() for line in open(listed)]
session = requests.Session()
def fetch(row):
    target = os.path.join(out, row[2])
    os.makedirs(os.path.dirname(target), exist_ok=True)
    answer = session.get(f"{base}/{row[2]}", timeout=30)
    answer.raise_for_status()
    with open(target + ".tmp", "wb") as file:
        file.write(answer.content)
    os.replace(target + ".tmp", target)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(fetch, rows))
for digest, _, name in rows:
    with open(os.path.join(out, name), "rb") as file:
        if hashlib.sha256(file.read()).hexdigest() != digest:
            sys.exit(f"{name} is wrong")
"""
PEER_REQUESTS = PEER_FLASHINFER.replace("ThreadPoolExecutor(4)", "ThreadPoolExecutor(16)").replace(
    "session = requests.Session()",
    "session = requests.Session()\nsession.mount('http://', requests.adapters.HTTPAdapter(pool_maxsize=16))",
)
PEER_CURL = """
import hashlib, os, subprocess, sys
base, listed, out = sys.argv[1:4]
rows = [line.split() for line in open(listed)]
with open(os.path.join(out, "..", "curl.conf"), "w") as file:
    for _, _, name in rows:
        file.write(f'url = "{base}/{name}"\\noutput = "{os.path.join(out, name)}"\\n')
quiet = ["-sf", "--no-progress-meter"]
subprocess.run(["curl", "-Z", "--parallel-max", "16", *quiet, "--create-dirs", "-K", file.name], check=True)
for digest, _, name in rows:
    with open(os.path.join(out, name), "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            sys.exit(f"{name} is wrong")
"""
PEER_ARIA = PEER_CURL.replace(
    """file.write(f'url = "{base}/{name}"\\noutput = "{os.path.join(out, name)}"\\n')""",
    """file.write(f"{base}/{name}\\n  out={name}\\n")""",
).replace(
    """["curl", "-Z", "--parallel-max", "16", *quiet, "--create-dirs", "-K", file.name]""",
    """["aria2c", "-q", "-j16", "-x4", "-d", out, "-i", file.name]""",
)
PEER_POOCH = """
import sys
import pooch
base, listed, out = sys.argv[1:4]
rows = [line.split() for line in open(listed)]
pooch.get_logger().setLevel("ERROR")
box = pooch.create(path=out, base_url=base + "/", registry={name: "sha256:" + digest for digest, _, name in rows})
for _, _, name in rows:
    box.fetch(name)
"""
OURS = """
import sys
from kartifacts import config
from kartifacts.cli import flows
url, lock, store = sys.argv[1:4]
settings = config.read({}, {"mirrors": url, "lock": lock, "store": store, "progress": "off"})
flows.fetch(settings, flows.Selection(None, "", "", ()), out=None)
"""


class Run(NamedTuple):
    wall: float
    cpu: float
    memory: int  # MiB, of the largest process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="A,B")
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=None, help="default: a temporary directory")
    options = parser.parse_args()
    names = options.data.split(",") + (["C"] if options.tree else [])
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        for name in names:
            measure(name, Path(scratch), options)


def measure(name: str, scratch: Path, options: argparse.Namespace) -> None:
    place = scratch / name
    place.mkdir()
    raw = options.tree.resolve() if name == "C" else place / "raw"
    # In another process: a child's peak memory starts from that of the process that starts it, so this one stays small.
    prepared = multiprocessing.get_context("spawn").Process(target=prepare, args=(name, raw, place))
    prepared.start()
    prepared.join()
    if prepared.exitcode:
        raise SystemExit("the data could not be prepared")
    listed, lock = place / "list", place / "kartifacts.lock"
    rows = [line.split() for line in listed.read_text().splitlines()]
    www = place / "www"
    www.mkdir()
    (www / "raw").symlink_to(raw)
    (www / "release").symlink_to(place / "release")
    nginx = ["bash", str(HERE / "ci/stores/nginx")]
    subprocess.run([*nginx, "start", str(place / "nginx"), str(www), str(PORT)], check=True, stdout=subprocess.DEVNULL)
    try:
        runs = rounds(contenders(listed, lock), scratch, options.rounds)
    finally:
        subprocess.run([*nginx, "stop", str(place / "nginx")], check=True)
    total = sum(int(size) for _, size, _ in rows)
    moved = sum(path.stat().st_size for path in (place / "release/blobs/sha256").iterdir())
    print(f"\n## {name}: {len(rows)} files, {total / 1e6:.0f} MB; as a release {moved / 1e6:.0f} MB on the wire\n")
    table(runs)
    shutil.rmtree(place)


def prepare(name: str, raw: Path, place: Path) -> None:
    """Make the files, unless they are given, list them, and publish them."""
    if name != "C":
        make(name, raw)
    files = sorted(path for path in raw.rglob("*") if path.is_file())
    rows = [(sha256(path), path.stat().st_size, path.relative_to(raw).as_posix()) for path in files]
    (place / "list").write_text("".join(f"{digest} {size} {name}\n" for digest, size, name in rows))
    publish(rows, raw, place)


def contenders(listed: Path, lock: Path) -> dict[str, list[str]]:
    base = f"http://127.0.0.1:{PORT}"
    peer = [f"{base}/raw", str(listed)]
    found = {
        "kartifacts": [sys.executable, "-c", OURS, f"{base}/release", str(lock)],
        "FlashInfer's algorithm, 4 threads": [sys.executable, "-c", PEER_FLASHINFER, *peer],
        "requests, 16 threads": [sys.executable, "-c", PEER_REQUESTS, *peer],
        "curl -Z --parallel-max 16": [sys.executable, "-c", PEER_CURL, *peer],
        "aria2c -j16 -x4": [sys.executable, "-c", PEER_ARIA, *peer],
        "pooch": [sys.executable, "-c", PEER_POOCH, *peer],
    }
    for tool, there in (
        ("curl", shutil.which("curl")),
        ("aria2c", shutil.which("aria2c")),
        ("pooch", importable("pooch")),
    ):
        if not there:
            print(f"{tool} is not installed and is left out")
            found = {name: command for name, command in found.items() if not name.startswith(tool)}
    return found


def importable(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def rounds(commands: dict[str, list[str]], scratch: Path, count: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(count):
        for name in random.Random(number).sample(list(commands), len(commands)):
            out = scratch / "out"
            out.mkdir()
            runs[name].append(timed([*commands[name], str(out)]))
            shutil.rmtree(out)
    return runs


def timed(command: list[str]) -> Run:
    start = time.monotonic()
    process = subprocess.Popen(command)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[:1]} failed with {process.returncode}")
    return Run(time.monotonic() - start, used.ru_utime + used.ru_stime, used.ru_maxrss >> 10)


def table(runs: dict[str, list[Run]]) -> None:
    def median(name: str, field: str) -> float:
        return statistics.median(getattr(run, field) for run in runs[name])

    yardsticks = [name for name in runs if name.startswith(("FlashInfer", "curl"))]
    print(f"| | wall s | CPU s | MiB |{''.join(f' wall / {name.split()[0]} |' for name in yardsticks)}")
    print(f"| --- | --: | --: | --: |{' --: |' * len(yardsticks)}")
    for name in sorted(runs, key=lambda name: median(name, "wall")):
        ratios = [
            statistics.median(mine.wall / theirs.wall for mine, theirs in zip(runs[name], runs[other], strict=True))
            for other in yardsticks
        ]
        shown = f"{median(name, 'wall'):.2f} | {median(name, 'cpu'):.2f} | {median(name, 'memory'):.0f}"
        print(f"| {name} | {shown} |{''.join(f' {ratio:.2f} |' for ratio in ratios)}")


def make(name: str, directory: Path) -> None:
    """Files that compress about as well as cubins do: runs of a common stock, between runs of noise."""
    directory.mkdir(parents=True)
    rng = random.Random(20260000)
    stock = [rng.randbytes(rng.randrange(64, 2048)) for _ in range(400)]
    if name == "B":
        piece = b"".join(rng.choice(stock) if rng.random() < 0.75 else rng.randbytes(1024) for _ in range(4096))
        for number in range(4):
            with open(directory / f"pack{number}.bin", "wb") as file:
                while file.tell() < 256 << 20:
                    file.write(rng.randbytes(64))
                    file.write(piece)
                file.truncate(256 << 20)
        return
    for number in range(2000):
        size = rng.randrange(20_000, 200_000)
        content = bytearray()
        while len(content) < size:
            content += rng.choice(stock) if rng.random() < 0.75 else rng.randbytes(256)
        (directory / f"kernel{number:04}.cubin").write_bytes(content[:size])


def publish(rows: list[tuple[str, int, str]], raw: Path, place: Path) -> None:
    from kartifacts.build.pack import PackInput, pack_bundle
    from kartifacts.publish.lockfile import add_pins
    from kartifacts.publish.release import make_release
    from kartifacts.publish.repository import Repository

    entries = [PackInput(name, raw / name, sha256=digest) for digest, _, name in rows]
    names = {"library": "bench", "family": "files", "arch": "any", "abi": "none"}
    bundle = pack_bundle(entries, place / "release", **names, toolchain={})
    make_release(place / "release", "bench", "1", [bundle])
    add_pins(place / "kartifacts.lock", Repository(place / "release").pins())


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
