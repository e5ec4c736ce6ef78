"""Many processes at once, processes that are killed, processes that may not write."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.fetch import Fetcher
from kartifacts.model.digest import sha256
from kartifacts.store import Store
from kartifacts.testing import Mirror, TinyRepository, faults, tiny_repository
from tests.processes import state

from .conftest import FILES

Run = Callable[..., subprocess.Popen[str]]
Make = Callable[..., Fetcher]

FETCH = """
import sys
from pathlib import Path
from kartifacts import config
from kartifacts.fetch import Fetcher
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import decode_lock
from kartifacts.sources import from_settings
from kartifacts.store import Store

def paths(store, lock, uris, **overrides):
    base = {"store": store, "connect_timeout": 1.0, "read_timeout": 20.0, "retries": 1, "progress": "off"}
    settings = config.read({}, {**base, **overrides})
    fetcher = Fetcher(Store(settings.store), from_settings(settings), settings)
    (pin,) = decode_lock(Path(lock).read_bytes()).releases
    (bundle,) = fetcher.bundles(pin)
    wanted = [entry for entry in bundle.table.kernels if not uris or entry.uri in uris]
    return fetcher.ensure(bundle, wanted)

def fetch(*arguments, **overrides):
    return {uri: sha256(path.read_bytes()) for uri, path in paths(*arguments, **overrides).items()}
"""
ALL = FETCH + "print(sorted(fetch(Path(sys.argv[1]), sys.argv[2], None, mirrors=sys.argv[3]).items()))"


def test_eight_cold_processes_make_one_request_for_each_thing(
    mirror: Mirror, repository: TinyRepository, run: Run, tmp_path: Path
) -> None:
    everyone = threading.Event()
    mirror.order(faults.hold(everyone), match=repository.pin.sha256)
    processes = [run(ALL, tmp_path / "store", repository.lock, mirror.url) for _ in range(8)]
    while not (tmp_path / "store" / "v1" / "locks").is_dir() or mirror.count() < 1:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    everyone.set()
    results = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 8
    assert len(results) == 1
    assert "b.so" in results.pop()
    for blob in (repository.pin.sha256, repository.manifest, repository.table, repository.packs[0]):
        assert mirror.count(blob) == 1
    assert list((tmp_path / "store" / "v1" / "locks").iterdir()) == []


MANY = (
    FETCH
    + """
import os, ssl, traceback, zstandard, kartifacts.sources.http
start, go = os.pipe()
children = []
for number in range(int(sys.argv[4])):
    child = os.fork()
    if child == 0:
        try:
            os.close(go)
            os.read(start, 1)  # returns for all at once, when the parent closes its end
            found = fetch(Path(sys.argv[1]), sys.argv[2], {"a.cubin"}, mirrors=sys.argv[3])
            os._exit(0 if set(found) == {"a.cubin"} else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    children.append(child)
os.close(go)
print(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children))
"""
)


def test_sixty_four_cold_processes_ask_for_one_artifact_once(
    mirror: Mirror, repository: TinyRepository, run: Run, tmp_path: Path
) -> None:
    mirror.order(faults.delay(0.2), match=repository.packs[0])
    started = time.monotonic()
    out, err = run(MANY, tmp_path / "store", repository.lock, mirror.url, 64).communicate()
    assert out == "64\n", err
    assert time.monotonic() - started < 60
    for blob in (repository.pin.sha256, repository.manifest, repository.table, repository.packs[0]):
        assert mirror.count(blob) == 1
    assert list((tmp_path / "store" / "v1" / "locks").iterdir()) == []


def test_processes_of_one_node_share_the_limit_of_transfers(tmp_path: Path, run: Run) -> None:
    files = {f"{number:02}": os.urandom(700_000) for number in range(24)}
    repository = tiny_repository(tmp_path / "repository", files, kernels_per_block=1)
    code = FETCH + (
        "number = int(sys.argv[4])\n"
        "uris = {f'{n:02}' for n in range(number, 24, 8)}\n"
        "fetch(Path(sys.argv[1]), sys.argv[2], uris, mirrors=sys.argv[3], download_threads=3)"
    )
    with Mirror(repository.path) as mirror:
        mirror.order(faults.delay(0.05))
        processes = [run(code, tmp_path / "store", repository.lock, mirror.url, number) for number in range(8)]
        for process in processes:
            assert process.wait() == 0, process.communicate()
        assert 2 <= mirror.most_at_once <= 3
        assert mirror.count(repository.packs[0]) == 24


def test_threads_of_one_process_fetch_in_parallel_and_within_the_limit(tmp_path: Path, fetcher: Make) -> None:
    files = {f"{number:02}": os.urandom(700_000) for number in range(16)}
    repository = tiny_repository(tmp_path / "repository", files, kernels_per_block=1)
    with Mirror(repository.path) as mirror:
        one = fetcher(mirrors=mirror.url, download_threads="4")
        (bundle,) = one.bundles(repository.pin)
        mirror.order(faults.delay(0.1))
        found = one.ensure(bundle, bundle.table.kernels[::2])
        assert {uri: path.read_bytes() for uri, path in found.items()} == {
            entry.uri: files[entry.uri] for entry in bundle.table.kernels[::2]
        }
        assert 2 <= mirror.most_at_once <= 4


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_transfer_that_was_killed_half_way_leaves_nothing_and_is_done_by_the_next(
    mirror: Mirror, repository: TinyRepository, run: Run, tmp_path: Path, with_signal: signal.Signals, fetcher: Make
) -> None:
    mirror.order(faults.stall(50_000), match=repository.packs[0], times=1)
    process = run(ALL, tmp_path / "store", repository.lock, mirror.url)
    while mirror.count(repository.packs[0]) < 1:
        assert process.poll() is None
        time.sleep(0.01)
    started = time.monotonic()
    process.send_signal(with_signal)
    process.wait(10)
    assert time.monotonic() - started < 2
    assert process.returncode != 0
    assert Store(tmp_path / "store").verify().damaged == ()
    one = fetcher(mirrors=mirror.url)
    started = time.monotonic()
    (bundle,) = one.bundles(repository.pin)
    assert len(one.ensure(bundle, bundle.table.kernels)) == 5
    assert time.monotonic() - started < 2, "a lock of the dead is no lock"
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and "sha256" not in path.parts]


def test_a_waiter_takes_over_from_a_process_that_was_killed(
    mirror: Mirror, repository: TinyRepository, run: Run, tmp_path: Path
) -> None:
    mirror.order(faults.stall(50_000), match=repository.packs[0], times=1)
    first = run(ALL, tmp_path / "store", repository.lock, mirror.url)
    while mirror.count(repository.packs[0]) < 1:
        assert first.poll() is None
        time.sleep(0.01)
    second = run(ALL, tmp_path / "store", repository.lock, mirror.url)
    first.kill()
    started = time.monotonic()
    out, err = second.communicate()
    assert time.monotonic() - started < 5
    assert "b.so" in out, err


def test_a_file_system_without_locks_costs_requests_and_nothing_else(
    mirror: Mirror, repository: TinyRepository, run: Run, tmp_path: Path
) -> None:
    code = (
        "import errno, fcntl, logging, os\n"
        "logging.basicConfig()\n"
        "def flock(*_): raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))\n"
        "fcntl.flock = flock\n" + ALL
    )
    processes = [run(code, tmp_path / "store", repository.lock, mirror.url) for _ in range(4)]
    warnings = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert "b.so" in out
        warnings.append(err.count("no locks"))
    assert max(warnings) == 1
    assert 1 <= mirror.count(repository.packs[0]) <= 4
    assert Store(tmp_path / "store").verify().damaged == ()


def test_a_gc_by_the_same_pins_disturbs_no_process_that_fetches(
    mirror: Mirror, repository: TinyRepository, run: Run, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    keep = {sha256(content) for content in FILES.values()} | {repository.pin.sha256, repository.manifest}
    processes = [run(ALL, store.root, repository.lock, mirror.url) for _ in range(4)]
    collected = 0
    while any(process.poll() is None for process in processes):
        store.gc(keep | {repository.table})
        collected += 1
    results = {process.communicate() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4, results
    assert collected > 1
    assert len(results) == 1


def test_a_gc_that_keeps_nothing_never_makes_a_wrong_answer(
    mirror: Mirror, repository: TinyRepository, run: Run, tmp_path: Path
) -> None:
    """What it removes is fetched again, or said to be gone; what a process has mapped stays readable."""
    store = Store(tmp_path / "store")
    code = (
        FETCH
        + """
import mmap
from kartifacts.errors import StoreError
mapped = []
for _ in range(30):
    try:
        for uri, path in paths(Path(sys.argv[1]), sys.argv[2], None, mirrors=sys.argv[3]).items():
            with open(path, "rb") as file:
                mapped.append((uri, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
    except StoreError as error:
        assert "gone" in str(error), error
    except FileNotFoundError as error:  # between the answer and our own open
        assert error.filename.startswith(sys.argv[1]), error
    print("turn", flush=True)
for uri, content in mapped:
    print(uri, sha256(content))
"""
    )
    process = run(code, store.root, repository.lock, mirror.url)
    assert process.stdout is not None
    seen: set[tuple[str, str]] = set()
    for line in process.stdout:
        if line == "turn\n":
            store.gc(set())
        else:
            uri, digest = line.split()
            seen.add((uri, digest))
    assert process.wait() == 0, process.communicate()
    assert seen == {(uri, sha256(content)) for uri, content in FILES.items()}
    assert mirror.count(repository.packs[0]) > 2


def test_warm_loads_of_many_processes_write_nothing_and_never_miss(
    mirror: Mirror, repository: TinyRepository, run: Run, tmp_path: Path, fetcher: Make
) -> None:
    one = fetcher(mirrors=mirror.url)
    (bundle,) = one.bundles(repository.pin)
    one.ensure(bundle, bundle.table.kernels)
    before = state(tmp_path / "store")
    mirror.requests.clear()
    code = FETCH + "for _ in range(50):\n    fetch(Path(sys.argv[1]), sys.argv[2], None, mirrors=sys.argv[3])"
    processes = [run(code, tmp_path / "store", repository.lock, mirror.url) for _ in range(8)]
    for process in processes:
        assert process.wait() == 0, process.communicate()
    assert state(tmp_path / "store") == before
    assert mirror.count() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")
def test_a_user_who_may_write_nowhere_loads_what_is_there_and_a_new_store_takes_the_rest(
    repository: TinyRepository, run: Run, open_path: Path
) -> None:
    shutil.copytree(repository.path, open_path / "repository")
    lock = open_path / "repository" / "kartifacts.lock"
    store = open_path / "store"
    subprocess.run(
        [sys.executable, "-c", FETCH + "fetch(Path(sys.argv[1]), sys.argv[2], {'b.so'}, path=(Path(sys.argv[3]),))",
         store, lock, open_path / "repository"],
        check=True,
    )  # fmt: skip
    before = state(open_path)
    code = FETCH + "print(fetch(Path(sys.argv[1]), sys.argv[2], {sys.argv[4]}, path=(Path(sys.argv[3]),)))"
    arguments = (store, lock, open_path / "repository")
    out, err = run(code, *arguments, "b.so", user=65534).communicate()
    assert "b.so" in out, err
    assert state(open_path) == before
    _, err = run(code, *arguments, "a.cubin", user=65534).communicate()
    assert "StoreError" in err
    assert "KARTIFACTS_STORE" in err
    assert state(open_path) == before
    mine = open_path / "mine"
    mine.mkdir()
    os.chown(mine, 65534, 65534)
    out, err = run(code, mine / "store", *arguments[1:], "a.cubin", user=65534).communicate()
    assert "a.cubin" in out, err


def test_a_dead_mirror_costs_a_prefetch_two_timeouts_in_all(tmp_path: Path, fetcher: Make) -> None:
    files = {f"{number:03}": os.urandom(2000) + bytes(700_000) for number in range(200)}
    repository = tiny_repository(tmp_path / "repository", files, kernels_per_block=1, blocks_per_pack=1)
    with socket.socket() as listener, Mirror(repository.path) as good:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:  # from now on every further connection attempt is dropped
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fetch = fetcher(mirrors=good.url, store=str(tmp_path / "without"))
        times = []
        for one in (fetch, fetcher(mirrors=f"{dead} {good.url}", download_threads="8")):
            started = time.monotonic()
            (bundle,) = one.bundles(repository.pin)
            assert len(one.ensure(bundle, bundle.table.kernels)) == 200
            times.append(time.monotonic() - started)
        for filler in fillers:
            filler.close()
    assert times[1] - times[0] < 2 * 0.5 + 1.5


def test_a_prefetch_needs_little_memory_whatever_the_size(tmp_path: Path, run: Run) -> None:
    block = os.urandom(8 << 20)
    files = {f"{number:02}": block + bytes([number]) for number in range(8)}
    files["large"] = os.urandom(1 << 20) * 90
    repository = tiny_repository(tmp_path / "repository", files, kernels_per_block=1)
    code = FETCH + (
        "paths(Path(sys.argv[1]), sys.argv[2], None, mirrors=sys.argv[3])\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    server = run(
        "import sys\nfrom kartifacts.testing import Mirror\n"
        "with Mirror(sys.argv[1]) as mirror:\n    print(mirror.url, flush=True)\n    sys.stdin.read()",
        repository.path,
    )
    assert server.stdout is not None
    out, err = run(code, tmp_path / "store", repository.lock, server.stdout.readline().strip()).communicate()
    assert out, err
    assert int(out) < 100 << 10
