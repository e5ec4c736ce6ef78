"""What it costs to have many files fetched, verified and in place, beside the tools that are used for it today.

    python bench/fetch.py [--data A,B] [--tree DIRECTORY] [--net loopback,wan,lossy] [--https] [--rounds 3]

README.md says what is measured how.  Wall seconds are noisy on a shared machine: read the ratios, which are medians of
the ratios within one round, and the CPU seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import contenders
import corpus
import mirror
import wan

LOSS = {"wan": 0.0, "lossy": 1.0}  # percent each way
TITLES = {"kartifacts": "kartifacts fetch", **{name: one.title for name, one in contenders.CONTENDERS.items()}}
YARDSTICKS = ("flashinfer", "curl")
RAW_BYTES = {"A": 220e6, "B": 1.1e9, "N": 270e6}


class Run(NamedTuple):
    wall: float
    cpu: float  # of the process and all whose end it waited for
    memory: float  # MB, of the largest process
    received: float  # MB, as the server counted them
    requests: int


class Case(NamedTuple):
    data: str
    net: str
    scheme: str

    def __str__(self) -> str:
        return f"{self.data}, {self.net}, {self.scheme}"


class Goal(NamedTuple):
    data: str  # a name, or "" for all
    net: str
    field: str
    limit: float
    versus: str = ""  # the contender that the field is divided by

    def __str__(self) -> str:
        unit = f" x {TITLES[self.versus]}" if self.versus else " MB"
        return f"{self.field} <= {self.limit:g}{unit}"


GOALS = [
    Goal("A", "loopback", "wall", 0.15, "flashinfer"),
    Goal("A", "loopback", "wall", 1.0, "curl"),
    Goal("B", "loopback", "wall", 1.1, "curl"),
    Goal("C", "loopback", "wall", 0.15, "flashinfer"),
    Goal("C", "loopback", "wall", 0.5, "curl"),
    Goal("C", "", "received", 120),
    Goal("A", "wan", "wall", 0.6, "curl"),
    Goal("", "", "memory", 150),
]
Results = dict[Case, dict[str, list[Run]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="A,B", help="of A, B and N; default: A,B")
    parser.add_argument("--tree", type=Path, help="C: a directory in the layout of flashinfer-cubin's cubins")
    parser.add_argument("--without", action="append", default=[], help="a directory of the tree to leave out")
    parser.add_argument("--net", default="loopback", help="of loopback, wan and lossy; default: loopback")
    parser.add_argument("--congestion", default="cubic", help="control of the slow lines; default: cubic")
    parser.add_argument("--https", action="store_true", help="over TLS instead of plain HTTP")
    parser.add_argument("--only", default="", help=f"of {','.join(TITLES)}; default: all that are installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="default: a tmpfs if there is a large one")
    parser.add_argument("--json", type=Path, help="write every run into this file")
    options = parser.parse_args()
    data = [name for name in options.data.split(",") if name] + (["C"] if options.tree else [])
    names = installed(options.only)
    results: Results = {}
    with scratch_directory(options, data) as scratch:
        for name in data:
            results.update(measure(name, names, scratch, options))
    goals(results)
    if options.json:
        record(options.json, results, options)


def installed(only: str) -> list[str]:
    asked = only.split(",") if only else list(TITLES)
    if unknown := set(asked) - set(TITLES):
        raise SystemExit(f"unknown contender {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    found = []
    for name in asked:
        needs = contenders.CONTENDERS[name].needs if name != "kartifacts" else ()
        missing = [each for each in needs if not shutil.which(each) and importlib.util.find_spec(each) is None]
        if missing:
            print(f"{TITLES[name]} is left out: {', '.join(missing)} not installed")
        else:
            found.append(name)
    return found


@contextmanager
def scratch_directory(options: argparse.Namespace, data: Sequence[str]) -> Iterator[Path]:
    """In memory if it fits: a disk would cost each contender about the same, and hide what differs."""
    sizes = [RAW_BYTES.get(name, 0) for name in data]
    if options.tree:
        sizes.append(sum(path.stat().st_size for path in options.tree.rglob("*") if path.is_file()))
    need, memory, parent = 4 * max(sizes), Path("/dev/shm"), options.scratch
    if parent is None and memory.is_dir() and shutil.disk_usage(memory).free > need:
        parent = memory
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-") as scratch:
        kind = subprocess.run(["stat", "-f", "-c", "%T", scratch], capture_output=True, text=True, check=False)
        print(f"files are written to {Path(scratch).parent} ({kind.stdout.strip() or 'unknown file system'})")
        yield Path(scratch)


def measure(data: str, names: Sequence[str], scratch: Path, options: argparse.Namespace) -> Results:
    place = scratch / data
    place.mkdir()
    raw = options.tree.resolve() if data == "C" else place / "raw"
    isolated(corpus.prepare, data, raw, place, options.without)
    rows = contenders.read(str(place / "list"))
    wire = sum(path.stat().st_size for path in (place / "release/blobs/sha256").iterdir())
    total = sum(row.size for row in rows)
    print(f"\n# {data}: {len(rows)} files, {total / 1e6:.0f} MB; as a release {wire / 1e6:.1f} MB")
    results: Results = {}
    for net in options.net.split(","):
        case = Case(data, net, "https" if options.https else "http")
        try:
            results[case] = on(case, place, raw, rows, names, options)
        except wan.Unavailable as missing:
            print(f"\n{case}: left out, {missing}")
            continue
        table(case, results[case])
    shutil.rmtree(place)
    return results


def on(
    case: Case, place: Path, raw: Path, rows: list[contenders.Row], names: Sequence[str], options: argparse.Namespace
) -> dict[str, list[Run]]:
    """All rounds of one case."""
    with ExitStack() as stack:
        server, client, address = [], [], "127.0.0.1"
        if case.net != "loopback":
            line = stack.enter_context(wan.line(place, loss=LOSS[case.net], congestion=options.congestion))
            server, client, address = line.server, line.client, wan.SERVER
        serving = mirror.serving(place, raw, place / "release", rows, address=address, inside=server)
        served = stack.enter_context(serving)
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for number in range(options.rounds):
            for name in random.Random(number).sample(list(names), len(names)):
                out = place / "out"
                out.mkdir()
                done = run(name, client, served, case.scheme == "https", place)
                isolated(complete, place / "list", out)
                sent = served.sent()
                received = sum(one.size for one in sent) / 1e6
                runs[name].append(done._replace(received=received, requests=len(sent)))
                shutil.rmtree(out)
        if case.net != "loopback":
            print(f"\nthe line itself took {line.cpu():.1f} CPU s; congestion control {options.congestion}")
    return runs


def run(name: str, inside: Sequence[str], served: mirror.Mirror, secure: bool, place: Path) -> Run:
    """One contender once, as a process of its own."""
    out, url = place / "out", served.url(secure)
    ours = ("KARTIFACTS_", "HF_")
    environ = {key: text for key, text in os.environ.items() if not key.startswith(ours) and "proxy" not in key.lower()}
    environ.update(dict.fromkeys(("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"), str(served.authority)))
    if name == "kartifacts":
        lock = str(place / "kartifacts.lock")
        environ.update(KARTIFACTS_MIRRORS=f"{url}/release", KARTIFACTS_LOCK=lock, KARTIFACTS_STORE=str(out / "store"))
        command = ["-m", "kartifacts", "fetch"]
    else:
        command = [contenders.__file__, name, url, str(place / "list"), str(out)]
    with open(place / "output", "w+", encoding="utf-8") as output:
        start = time.monotonic()
        process = subprocess.Popen(
            [*inside, sys.executable, *command], env=environ, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with what it started
            raise
        wall = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{TITLES[name]} failed with {process.returncode}:\n{output.read()[-3000:]}")
    return Run(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6, 0, 0)


def complete(listed: Path, out: Path) -> None:
    """Not timed: that each file is there, whoever fetched it and under whatever name."""
    missing = {row.sha256 for row in contenders.read(str(listed))}
    for path in out.rglob("*"):
        if path.is_file() and not path.is_symlink():
            missing.discard(corpus.sha256(path))
    if missing:
        raise SystemExit(f"{len(missing)} files are missing or wrong")


def isolated(work: object, *arguments: object) -> None:
    """In another process: a child's peak memory starts from that of the process that starts it, so this stays small."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)  # type: ignore[arg-type]
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work} failed")


def ratio(mine: list[Run], theirs: list[Run], field: str) -> float:
    return statistics.median(getattr(a, field) / getattr(b, field) for a, b in zip(mine, theirs, strict=True))


def median(runs: list[Run], field: str) -> float:
    return statistics.median(getattr(run, field) for run in runs)


def table(case: Case, runs: dict[str, list[Run]]) -> None:
    others = [name for name in YARDSTICKS if name in runs]
    short = {"flashinfer": "FI"}
    heads = [f"{field}/{short.get(name, name)}" for name in others for field in ("wall", "CPU")]
    heads = ["wall s", "CPU s", "RSS MB", "received MB", "requests", *heads]
    print(f"\n## {case} ({len(next(iter(runs.values())))} rounds)\n\n| | {' | '.join(heads)} |")
    print(f"| --- |{' --: |' * len(heads)}")
    for name in sorted(runs, key=lambda name: median(runs[name], "wall")):
        mine = runs[name]
        cells = [f"{median(mine, field):.2f}" for field in ("wall", "cpu")]
        cells += [f"{median(mine, 'memory'):.0f}", f"{median(mine, 'received'):.1f}", f"{median(mine, 'requests'):.0f}"]
        cells += [f"{ratio(mine, runs[other], field):.2f}" for other in others for field in ("wall", "cpu")]
        print(f"| {TITLES[name]} | {' | '.join(cells)} |", flush=True)


def judged(results: Results) -> Iterator[tuple[Case, Goal, float]]:
    for case, runs in results.items():
        for goal in GOALS:
            if goal.data in ("", case.data) and goal.net in ("", case.net) and "kartifacts" in runs:
                if goal.versus in runs:
                    yield case, goal, ratio(runs["kartifacts"], runs[goal.versus], goal.field)
                elif not goal.versus:
                    yield case, goal, median(runs["kartifacts"], goal.field)


def goals(results: Results) -> None:
    print("\n# Goals\n\n| case | goal | measured | |\n| --- | --- | --: | --- |")
    for case, goal, found in judged(results):
        print(f"| {case} | {goal} | {found:.3g} | {'ok' if found <= goal.limit else 'MISSED'} |")


def record(path: Path, results: Results, options: argparse.Namespace) -> None:
    written = {
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "load": os.getloadavg()},
        "options": {key: str(value) for key, value in vars(options).items()},
        "runs": [
            {**case._asdict(), "contender": name, "round": number, **run._asdict()}
            for case, runs in results.items()
            for name, found in runs.items()
            for number, run in enumerate(found)
        ],
        "goals": [
            {**case._asdict(), "goal": str(goal), "measured": found, "met": found <= goal.limit}
            for case, goal, found in judged(results)
        ],
    }
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and directories go then too
    main()
