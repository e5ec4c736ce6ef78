"""Measures `sync` and the publishing of one changed bundle in a signed repository of 100,000 kernels.

    python bench/trust.py [--work DIRECTORY] [--kernels 100000] [--bundles 200] [--rounds 5] [--port 8651]

The repository is made by the code that users run, with provenance and an SBOM for each bundle, and kept in `--work` for
the next time.  Readers are processes of their own, and what nginx sent them stands in its log.  Publishing is measured
into a directory, where what is written is counted, and into SeaweedFS, through a proxy that counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kartifacts.model.manifest import Descriptor
    from kartifacts.model.materials import Materials

STORES = Path(__file__).parent.parent / "ci" / "stores"
LIBRARY = "bench"
BUILDER = "https://ci.example/builders/7"
ALONE = """
import sys
from tuf.ngclient import Updater
url, root, state = sys.argv[1:]
updater = Updater(state, f"{url}/metadata/", f"{url}/targets/", state, bootstrap=open(root, "rb").read())
updater.refresh()
assert updater.get_targetinfo(sys.stdin.read()) is not None
"""


class Run(NamedTuple):
    """One process: seconds, megabytes at its peak, and what it was sent in how many answers."""

    wall: float
    cpu: float
    peak: float
    sent: int
    answers: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, help="where the repository is kept; default: a directory that is removed")
    parser.add_argument("--kernels", type=int, default=100_000)
    parser.add_argument("--bundles", type=int, default=200)
    parser.add_argument("--flat", type=int, default=30_000, help="targets of the flat repository; clients read 5 MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8651, help="the first of ten ports on the loopback")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kartifacts-bench-") as home:
        work = options.work or Path(home) / "work"
        work.mkdir(parents=True, exist_ok=True)
        # In another process: the peak of a child begins at that of the process which started it.
        subprocess.run(
            [
                sys.executable,
                __file__,
                "--make",
                str(work),
                *map(str, (options.kernels, options.bundles, options.flat)),
            ],
            check=True,
        )
        read(work, Path(home), options)
        publish(work, Path(home), options)


# -- making it ---------------------------------------------------------------------------------------------------------


def make(work: Path, kernels: int, bundles: int, flat: int) -> None:
    """Two builds that differ in one bundle, and the first of them published."""
    from kartifacts.publish.buckets.directory import DirectoryBucket
    from kartifacts.publish.protocol import publish
    from kartifacts.trust.keyceremony import init

    done = work / f"made-{kernels}-{bundles}-{flat}"
    if done.exists():
        return
    for left in work.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    started = time.monotonic()
    first = [bundle(work / "1.0", number, kernels // bundles, "1.0") for number in range(bundles)]
    release(work / "1.0", "1.0", first)
    shutil.copytree(work / "1.0/blobs", work / "1.1/blobs", copy_function=os.link)
    release(work / "1.1", "1.1", [bundle(work / "1.1", 0, kernels // bundles, "1.1"), *first[1:]])
    print(f"built two releases of {kernels} kernels in {time.monotonic() - started:.0f} s", flush=True)
    keyring = init(work / "keys", [LIBRARY], {}, now=datetime.now(timezone.utc))
    publish(work / "1.0", DirectoryBucket(work / "repository"), keyring=keyring, builder_id=BUILDER)
    (work / "root.json").write_bytes(keyring.root("online"))
    make_flat(work / "flat", flat)
    done.touch()


def bundle(out: Path, number: int, kernels: int, version: str) -> tuple[Descriptor, Materials]:
    """One bundle of kernels of 1 to 2 KB that are half alike, and the materials that it was made of."""
    from kartifacts.build.blocks import PackInput
    from kartifacts.build.pack import pack_bundle
    from kartifacts.model.digest import sha256
    from kartifacts.model.materials import Content, Materials

    chance = random.Random(f"{number} {version}")
    common = random.Random(number).randbytes(700)
    about = {"library": LIBRARY, "family": f"family{number:03}", "arch": "9.0a", "abi": "none"}
    with tempfile.TemporaryDirectory(prefix="kartifacts-bench-", dir=out.parent) as place:
        inputs, imported = [], []
        for each in range(kernels):
            content = common + chance.randbytes(300 + chance.randrange(1000))
            path = Path(place) / f"{each}.cubin"
            path.write_bytes(content)
            uri = f"{about['family']}/kernel_{each:04}_sm90a_{sha256(content)[:16]}.cubin"
            inputs.append(PackInput(uri, path, ".cubin"))
            imported.append(Content(path=uri, sha256=sha256(content), size=len(content)))
        listed = Content(path="checksums.txt", sha256=sha256(version.encode()), size=100 * kernels)
        materials = Materials(version=1, kind="import", files=[listed], imported=imported, **about)
        return pack_bundle(inputs, out, toolchain={}, level=3, **about), materials


def release(out: Path, version: str, bundles: Sequence[tuple[Descriptor, Materials]]) -> None:
    from kartifacts.publish.release import make_release

    materials = {descriptor.digest: made_of for descriptor, made_of in bundles}
    make_release(out, LIBRARY, version, [descriptor for descriptor, _ in bundles], materials)


def make_flat(place: Path, count: int) -> None:
    """What one gets without a second tier: each kernel a target of TUF."""
    from securesystemslib.signer import CryptoSigner
    from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

    signer, until = CryptoSigner.generate_ed25519(), datetime(2099, 1, 1, tzinfo=timezone.utc)
    root = Root(expires=until)
    for role in ("root", "timestamp", "snapshot", "targets"):
        root.add_key(signer.public_key, role)
    chance = random.Random(0)
    names = [f"family{number % 200:03}/kernel_{number}.cubin" for number in range(count)]
    targets = {name: TargetFile(1000, {"sha256": chance.randbytes(32).hex()}, name) for name in names}
    (place / "metadata").mkdir(parents=True)
    snapshot = Snapshot(expires=until)
    for name, signed in (
        ("1.root", root),
        ("1.targets", Targets(expires=until, targets=targets)),
        ("1.snapshot", snapshot),
        ("timestamp", Timestamp(expires=until, snapshot_meta=MetaFile(1))),
    ):
        metadata = Metadata(signed)
        metadata.sign(signer)
        (place / "metadata" / f"{name}.json").write_bytes(metadata.to_bytes())
    (place / "root.json").write_bytes((place / "metadata/1.root.json").read_bytes())
    (place / "name").write_text(names[-1])


# -- readers -----------------------------------------------------------------------------------------------------------


def read(work: Path, home: Path, options: argparse.Namespace) -> None:
    url = f"http://127.0.0.1:{options.port}"
    name = f"{LIBRARY}/1.0/index.json"
    nginx, state = str(STORES / "nginx"), home / "nginx"
    subprocess.run([nginx, "start", str(state), str(work), str(options.port)], check=True)
    rows: dict[str, list[Run]] = {}
    numbers = itertools.count()
    try:
        for _ in range(options.rounds):
            user = home / f"user{next(numbers)}"
            user.mkdir()
            sync = [sys.executable, "-m", "kartifacts", "sync", "--root", f"{work}/root.json"]
            environ = {"KARTIFACTS_MIRRORS": f"{url}/repository", "KARTIFACTS_STORE": f"{user}/store"}
            environ["KARTIFACTS_LOCK"] = f"{user}/kartifacts.lock"
            for label, command, said in (
                ("kartifacts sync, cold", sync, ""),
                ("kartifacts sync, warm", sync, ""),
                ("python -c pass", [sys.executable, "-c", "pass"], ""),
                ("import kartifacts.cli", [sys.executable, "-c", "import kartifacts.cli"], ""),
                ("tuf.ngclient alone, cold", alone(f"{url}/repository", work / "root.json", user / "tuf"), name),
                ("tuf.ngclient alone, warm", alone(f"{url}/repository", work / "root.json", user / "tuf"), name),
                (
                    f"tuf.ngclient, {options.flat:,} targets in one role, cold",
                    alone(f"{url}/flat", work / "flat/root.json", user / "flat"),
                    (work / "flat/name").read_text(),
                ),
            ):
                rows.setdefault(label, []).append(run(command, environ, said, user, state / "access.log"))
    finally:
        subprocess.run([nginx, "stop", str(state)], check=True)
    print(f"{options.kernels:,} kernels in {options.bundles} bundles, loopback; median of {options.rounds}\n")
    print(f"{'':52}{'wall s':>8}{'CPU s':>8}{'MB':>8}{'KB sent':>10}{'answers':>9}")
    for label, runs in rows.items():
        wall, cpu, peak, sent, answers = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{label:52}{wall:8.2f}{cpu:8.2f}{peak:8.0f}{sent / 1000:10.1f}{answers:9.0f}")


def alone(url: str, root: Path, state: Path) -> list[str]:
    state.mkdir(exist_ok=True)
    return [sys.executable, "-c", ALONE, url, str(root), str(state)]


def run(command: Sequence[str], environ: Mapping[str, str], said: str, home: Path, log: Path) -> Run:
    before = log.stat().st_size
    place = home / "input"
    place.write_text(said)
    environ = {"PATH": os.environ.get("PATH", ""), "HOME": str(home), **environ}
    actions = [(os.POSIX_SPAWN_OPEN, 0, str(place), os.O_RDONLY, 0)]
    actions.append((os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0))
    started = time.perf_counter()
    child = os.posix_spawn(command[0], command, environ, file_actions=actions)
    _, status, used = os.wait4(child, 0)
    wall = time.perf_counter() - started
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    time.sleep(0.05)  # until nginx has written down the last answer
    with open(log, encoding="utf-8") as file:
        file.seek(before)
        answers = [line.split('"')[2].split() for line in file]
    sent = sum(int(size) for _, size in answers)
    return Run(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000, sent, len(answers))


# -- the publisher -----------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """One request that a publisher made."""

    method: str
    path: str
    size: int  # of its body


def publish(work: Path, home: Path, options: argparse.Namespace) -> None:
    """The release in which one bundle changed, into what holds the one before."""
    kinds = kinds_of(work)
    print(f"\n1.1 after 1.0: 1 of {options.bundles} bundles changed; what is signed about each is sent with it")
    place = work / "directory"  # on one file system with what is linked there
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(work / "repository", place, copy_function=os.link)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    row("into a directory", *publishing(f"dir:{place}", "1.1", work, home), {})
    new = [path for path in sorted(place.rglob("*")) if before.get(path) != path.stat().st_mtime_ns and path.is_file()]
    once = {path.stat().st_ino: path for path in reversed(new)}.values()  # two names of one file are written once
    tell(kinds, {path.relative_to(place).as_posix(): path.stat().st_size for path in once})
    if shutil.which("weed") is None:
        print("\nnot measured: SeaweedFS, since weed is not installed")
        return
    port = options.port + 1
    script, state = str(STORES / "seaweedfs"), home / "weed"
    subprocess.run([script, "start", str(state), str(port)], check=True, stdout=subprocess.DEVNULL)
    try:
        make_bucket(port)
        with counting(port, port + 8) as asked:
            text = f"s3://kernels/repository?endpoint=http://127.0.0.1:{port + 8}&region=us-east-1"
            print(f"\nfirst, all of 1.0: {publishing(text, '1.0', work, home)[0]:.1f} s, {len(asked)} requests")
            asked.clear()
            row("into SeaweedFS", *publishing(text, "1.1", work, home), Counter(each.method for each in asked))
            sent = {each.path.partition("repository/")[2]: each.size for each in asked if each.method == "PUT"}
            tell(kinds, {path: size for path, size in sent.items() if size})
            print(f"all bodies: {sum(each.size for each in asked):,} bytes")
    finally:
        subprocess.run([script, "stop", str(state)], check=True)


def publishing(bucket: str, version: str, work: Path, home: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and megabytes of a process that publishes."""
    command = [sys.executable, "-m", "kartifacts", "publish", bucket, "--from", f"{work}/{version}"]
    keys = home / f"keys-{time.monotonic_ns()}"
    shutil.copytree(work / "keys", keys)
    environ = {"AWS_ACCESS_KEY_ID": "kartadmin", "AWS_SECRET_ACCESS_KEY": "kartsecretkart"}
    (home / "no.log").touch()
    found = run([*command, "--keys", str(keys), "--builder-id", BUILDER], environ, "", home, home / "no.log")
    return found.wall, found.cpu, found.peak


def row(label: str, wall: float, cpu: float, peak: float, asked: Mapping[str, int]) -> None:
    requests = ", ".join(f"{count} {method}" for method, count in sorted(asked.items()))
    print(f"{label}: {wall:.1f} s, CPU {cpu:.1f} s, {peak:.0f} MB{'; ' if requests else ''}{requests}")


def tell(kinds: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    """Bytes by what they are for."""
    found: Counter[str] = Counter()
    for path, size in sizes.items():
        found[kinds.get(path.rpartition("/")[2], kind_of(path))] += size
    for kind, size in sorted(found.items()):
        print(f"  {size:>12,}  {kind}")
    print(f"  {sum(size for kind, size in found.items() if kind != BUNDLE):>12,}  all but the bundle")


BUNDLE = "the bundle: packs, kernel table, manifest, materials"


def kinds_of(work: Path) -> dict[str, str]:
    """Digest → what the new blobs of 1.1 are for."""
    from kartifacts.publish.repository import Repository

    repository = Repository(work / "1.1")
    (pin,) = repository.pins()
    old = {path.name for path in (work / "1.0/blobs/sha256").iterdir()}
    new = {path.name: BUNDLE for path in (work / "1.1/blobs/sha256").iterdir() if path.name not in old}
    return {**new, pin.sha256: "release index, as a blob"}


def kind_of(path: str) -> str:
    if path.startswith("blobs/"):
        return "what is said of the bundle and, if it is a blob, the index of that"
    if path.startswith("targets/"):
        return f"{path.split('.')[-2]} of the release, as a target"
    if path.startswith(("metadata/", "airgap/")):
        return "signed metadata of both views"
    return "index.json, leases and trials"


def make_bucket(port: int) -> None:
    import boto3

    boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="kartadmin",
        aws_secret_access_key="kartsecretkart",
    ).create_bucket(Bucket="kernels")


@contextmanager
def counting(port: int, front: int) -> Iterator[list[Asked]]:
    """Hand requests at `front` over to `port`, and note them."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def hand_over(self) -> None:
            if self.headers.get("Expect"):
                self.send_response_only(100)
                self.end_headers()
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(Asked(self.command, self.path.partition("?")[0], len(body)))
            kept = {name: value for name, value in self.headers.items() if name != "Expect"}
            connection = HTTPConnection("127.0.0.1", port)
            connection.request(self.command, self.path, body or None, kept)
            answer = connection.getresponse()
            content = answer.read()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            if answer.getheader("Content-Length") is None and answer.status not in (204, 304):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = hand_over  # noqa: N815  its names

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", front), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    else:
        main()
